"""requirements-dev.lock: every package that development installs, with the hash of the file that pip takes.

python -m tools.lock           resolve constraints.txt with pip and write the lock (minutes; needs the package index)
python -m tools.lock --check   compare the lock with constraints.txt; needs nothing

The hashes are those of this platform's wheels (see the first line of the lock). To install from it:
pip install --require-hashes -r requirements-dev.lock && pip install --no-deps --no-build-isolation -e .
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK, CONSTRAINTS = ROOT / "requirements-dev.lock", ROOT / "constraints.txt"
_TORCH = "torch==2.13.0"  # asked for by this very version: any other spec pulls the CUDA build
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def report(extra: str) -> list[dict[str, Any]]:
    """What pip would install for an extra of this project: name, version, url and hashes of each package."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.json")
        words = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", str(path)]
        given = ["--constraint", str(CONSTRAINTS), _TORCH, f"{ROOT}[{extra}]"]
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *words, *given], check=True)
        found: list[dict[str, Any]] = json.loads(path.read_text())["install"]
    return [item for item in found if canonical(item["metadata"]["name"]) != "orthomerge"]


def write_lock(items: list[dict[str, Any]]) -> None:
    """One entry a package, in the order of their names."""
    machine = f"{platform.python_implementation()} {sys.version_info.major}.{sys.version_info.minor}, {sys.platform}"
    lines = [f"# Made by `make lock` for {machine} {platform.machine()}; do not edit."]
    for item in sorted(items, key=lambda item: canonical(item["metadata"]["name"])):
        name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"].partition("+")[0]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{digest}")
    LOCK.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pinned(text: str) -> dict[str, str]:
    """Versions by name, of a constraints file or a lock."""
    pairs = (line.split()[0].partition("==") for line in text.splitlines() if "==" in line and not line.startswith("#"))
    return {canonical(name): version for name, _, version in pairs}


def locked(text: str) -> list[str]:
    """Packages of a lock that have a hash."""
    entries = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return [canonical(entry.partition("==")[0]) for entry in entries if _HASH.search(entry)]


def differences(constraints: str, lock: str) -> list[str]:
    """In words, whatever makes the two files disagree; empty if nothing does."""
    wanted, found = pinned(constraints), pinned(lock)
    hashed = set(locked(lock))
    wrong = [f"{name} {version} is not in the lock" for name, version in wanted.items() if name not in found]
    wrong += [f"{name} {version} is in no constraint" for name, version in found.items() if name not in wanted]
    both = wanted.keys() & found.keys()
    wrong += [f"{name} is {wanted[name]} but locked {found[name]}" for name in both if wanted[name] != found[name]]
    return sorted(wrong + [f"{name} has no hash" for name in found if name not in hashed])


def main() -> None:
    """Write, or check."""
    if "--check" not in sys.argv:
        write_lock(report("dev"))
    wrong = differences(CONSTRAINTS.read_text(encoding="utf-8"), LOCK.read_text(encoding="utf-8"))
    if wrong:
        raise SystemExit("requirements-dev.lock and constraints.txt differ; run `make lock`:\n" + "\n".join(wrong))
    sys.stdout.write(f"{len(pinned(LOCK.read_text()))} packages, each with its hash\n")


if __name__ == "__main__":
    main()
