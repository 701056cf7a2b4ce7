"""Print pip constraints that pin every direct dependency, extras included, to the oldest version pyproject.toml allows.

torch stays at the version of constraints.txt: any other brings the CUDA build here.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lowest(pyproject: str) -> list[str]:
    """Pins `name==floor` of all requirements with a floor."""
    project = tomllib.loads(pyproject)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = {requirement for group in groups for requirement in group}
    floors = [match for text in sorted(requirements) if (match := re.match(r"([\w-]+)>=([\w.]+)", text))]
    return [f"{match[1]}=={match[2]}" for match in floors if match[1] != "torch"]


if __name__ == "__main__":
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    sys.stdout.write("\n".join([torch, *lowest((ROOT / "pyproject.toml").read_text())]) + "\n")
