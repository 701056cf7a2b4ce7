"""`python -m tests.fuzz --count 120000`: mutations by the thousand, and a table of what became of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.environments import describe_run, table, write_result
from tests.fuzz.engine import CORPUS, Finding, Outcome, fuzz
from tests.fuzz.targets import TARGETS


def save(finding: Finding) -> Path:
    """Keep an input in the corpus, with a note of what it did."""
    digest = hashlib.sha256(finding.data).hexdigest()[:12]
    path = CORPUS / f"{finding.target.replace(' ', '-')}-{digest}"
    path.with_suffix(".input").write_bytes(finding.data)
    note = {"target": finding.target, "file": finding.file, "what": finding.what, "seed": finding.seed}
    path.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n")
    return path


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(outcome: Outcome) -> list[list[str]]:
    defects = Counter(each.target for each in outcome.findings)
    numbers: dict[str, tuple[int, ...]] = {
        name: (sum(counts.values()), counts["refused"], counts["read"], counts["same"], defects[name])
        for name, counts in outcome.counts.items()
    }
    seconds = {**outcome.seconds, "all": sum(outcome.seconds.values())}
    numbers["all"] = tuple(map(sum, zip(*numbers.values(), strict=True)))
    return [[name, *(f"{number:,}" for number in row), f"{seconds[name]:.0f}"] for name, row in numbers.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after about so long")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=[target.name for target in TARGETS])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fuzz.md")
    options = parser.parse_args()
    started = time.monotonic()
    outcome = fuzz(options.count, start=options.start, seconds=options.seconds, only=options.only, say=say)
    header = ("format", "mutations", "refused", "read", "unchanged", "defects", "seconds")
    shown = table(header, rows(outcome))
    print(shown)
    for what, count in Counter((each.target, each.what) for each in outcome.findings).most_common():
        print(f"{count} x {what[0]}: {what[1]}")
    kinds: dict[tuple[str, str], Finding] = {}
    for each in outcome.findings:
        if (key := (each.target, each.what)) not in kinds or len(each.data) < len(kinds[key].data):
            kinds[key] = each
    for each in kinds.values():
        print(f"kept {save(each)}")
    if options.write:
        about = (
            f"Mutations of valid files, read by orthomerge: {outcome.total:,} in {time.monotonic() - started:.0f} s."
        )
        write_result("fuzz", {"# Fuzzing": about, "## What became of them": shown, "## Run": describe_run()})
    sys.exit(bool(outcome.findings))


if __name__ == "__main__":
    main()
