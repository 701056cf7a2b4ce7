"""`python -m tests.golden`: compare with the committed values, or `--write` them anew, or `--against COMMIT`."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.golden.compare import compare_exactly, summary
from tests.golden.driver import start
from tests.golden.outcomes import Outcome, differences, play, write_values
from tests.golden.world import make_world

ROOT = Path(__file__).resolve().parents[2]
_SAME_MACHINE = 1e-6


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write tests/golden/values.json from what is there now")
    parser.add_argument("--against", metavar="COMMIT", help="run both on this machine and compare whole tensors")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        place = Path(name)
        new = _play(ROOT / "src", place / "new")
        if options.against is not None:
            old = _play(_source(options.against, place / "source"), place / "old")
            return _report(_against(old, new), f"{options.against} and the working tree")
        if options.write:
            complaints = {name: list(outcome.complaints) for name, outcome in new.items() if outcome.complaints}
            if not complaints:
                write_values(new)
            return _report(complaints, "the table of commands and what happens")
        return _report(differences(new), "committed values and the working tree")


def _play(source: Path, place: Path) -> dict[str, Outcome]:
    place.mkdir(parents=True)
    make_world(place / "world")
    old = not (source / "orthomerge" / "api").is_dir()  # commit 719347c and those before it
    with start(source, place) as driver:
        return play(driver, old=old)


def _against(old: Mapping[str, Outcome], new: Mapping[str, Outcome]) -> dict[str, list[str]]:
    """Differences by command: in bytes for moves and merges without data, beyond 1e-6 for all else."""
    changes: dict[str, list[str]] = {}
    for name, outcome in new.items():
        tolerance = 0.0 if outcome.command.same_bytes else _SAME_MACHINE
        before, lines = old[name], list[str]()
        codes = before.result.exit, outcome.result.exit
        if codes[0] != codes[1]:
            lines.append(f"exit code {codes[0]} before, {codes[1]} now: {outcome.result.text[-300:]}")
        if values := compare_exactly(before.values, outcome.values, tolerance):
            lines.append(summary(values, 6))
        lines += [f"before: {each}" for each in before.complaints if each not in outcome.complaints]
        lines += [f"now: {each}" for each in outcome.complaints if each not in before.complaints]
        changes |= {name: lines} if lines else {}
    return changes


def _report(changes: Mapping[str, list[str]], what: str) -> int:
    for name, lines in changes.items():
        print(*(f"{name}: {line}" for line in lines), sep="\n")
    print(f"{len(changes) or 'no'} commands differ between {what}")
    return int(bool(changes))


def _source(commit: str, folder: Path) -> Path:
    """The source of a commit, below a new folder."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


if __name__ == "__main__":
    sys.exit(main())
