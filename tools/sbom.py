"""A bill of materials in CycloneDX 1.6: what `pip install orthomerge[all]` brings along, with hashes and licences.

python -m tools.sbom [OUT.cdx.json]     (minutes; needs the package index)
"""

from __future__ import annotations

import json
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.lock import ROOT, canonical, report

from orthomerge.version import VERSION


def bill(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The document, from what pip reports."""
    parts = [_component(item) for item in sorted(items, key=lambda item: canonical(item["metadata"]["name"]))]
    subject = {"type": "library", "bom-ref": f"pkg:pypi/orthomerge@{VERSION}", "name": "orthomerge", "version": VERSION}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {"timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", "component": subject},
        "components": parts,
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def _component(item: dict[str, Any]) -> dict[str, Any]:
    about, archive = item["metadata"], item["download_info"].get("archive_info", {})
    name, version = canonical(about["name"]), about["version"].partition("+")[0]
    found = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "hashes": [{"alg": "SHA-256", "content": archive["hashes"]["sha256"]}] if "hashes" in archive else [],
    }
    if expression := about.get("license_expression"):
        found["licenses"] = [{"expression": expression}]
    elif told := (about.get("license") or "").strip().split("\n")[0][:80]:
        found["licenses"] = [{"license": {"name": told}}]
    return found


if __name__ == "__main__":
    _out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / f"orthomerge-{VERSION}.cdx.json"
    _out.parent.mkdir(parents=True, exist_ok=True)
    _found = bill(report("all"))
    _out.write_text(json.dumps(_found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{_out}: {len(_found['components'])} components\n")
