"""Fuzzing guided by coverage, with atheris: `python -m tests.fuzz.guided -max_total_time=60`.

The first byte chooses a format, the rest is its first file. The oracle is that of `engine.judge`. Atheris stops at the
first defect and leaves the input as `crash-...`; it has wheels for Linux and Python up to 3.13 only, which is why the
seeded mutator and not this is what `make test` runs.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    atheris: Any = importlib.import_module("atheris")
except ImportError:
    print("atheris does not install here, so that nothing is guided by coverage; `python -m tests.fuzz` needs nothing")
    sys.exit(0)

with atheris.instrument_imports(include=["orthomerge"]):
    from tests.fuzz.engine import judge
    from tests.fuzz.targets import TARGETS

CHEAP = [target for target in TARGETS if target.name not in ("parquet", "pictures")]  # those are not our parsers


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(place) for place in range(len(CHEAP))]
        seeds = Path(name) / "seeds"
        seeds.mkdir()
        for place, (target, folder) in enumerate(zip(CHEAP, folders, strict=True)):
            folder.mkdir()
            target.make(folder)
            (seeds / str(place)).write_bytes(bytes([place]) + (folder / target.files[0]).read_bytes())

        def one(data: bytes) -> None:
            place = data[0] % len(CHEAP) if data else 0
            (folders[place] / CHEAP[place].files[0]).write_bytes(data[1:])
            _, complaint = judge(CHEAP[place], folders[place])
            if complaint is not None:
                raise RuntimeError(f"{CHEAP[place].name}: {complaint}")

        atheris.Setup([*sys.argv, "-timeout=20", "-rss_limit_mb=3000", "-max_len=8192", str(seeds)], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
