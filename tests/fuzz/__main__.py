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


def save(found: Finding) -> Path:
    """Keep an input in the corpus, with a note of what it did."""
    digest = hashlib.sha256(found.data).hexdigest()[:12]
    path = CORPUS / f"{found.target.replace(' ', '-')}-{digest}"
    path.with_suffix(".input").write_bytes(found.data)
    note = {"target": found.target, "file": found.file, "what": found.what, "seed": found.seed}
    path.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n")
    return path


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows(outcome: Outcome) -> list[list[str]]:
    found = Counter(each.target for each in outcome.findings)
    made = []
    for name, counts in outcome.counts.items():
        total, seconds = sum(counts.values()), outcome.seconds[name]
        numbers = (total, counts["refused"], counts["read"], counts["same"], found[name])
        made.append([name, *(f"{number:,}" for number in numbers), f"{seconds:.0f}"])
    sums = [f"{sum(c[k] for c in outcome.counts.values()):,}" for k in ("refused", "read", "same")]
    made.append(
        ["all", f"{outcome.total:,}", *sums, f"{len(outcome.findings):,}", f"{sum(outcome.seconds.values()):.0f}"]
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120_000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after about so long")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=[target.name for target in TARGETS])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fuzz.md")
    given = parser.parse_args()
    started = time.monotonic()
    outcome = fuzz(given.count, start=given.start, seconds=given.seconds, only=given.only, say=say)
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
    if given.write:
        about = (
            f"Mutations of valid files, read by orthomerge: {outcome.total:,} in {time.monotonic() - started:.0f} s."
        )
        write_result("fuzz", {"# Fuzzing": about, "## What became of them": shown, "## Run": describe_run()})
    sys.exit(bool(outcome.findings))


if __name__ == "__main__":
    main()
