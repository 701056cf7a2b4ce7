"""`python -m tests.fuzz --count 120000`: mutations by the thousand, and a table of what became of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.environments import describe_run, table, write_result
from tests.fuzz.engine import CORPUS, Finding, fuzz, make_originals, mutated
from tests.fuzz.targets import TARGETS


def save(finding: Finding) -> Path:
    """Keep an input in the corpus, made again from its seed, with a note of what it did."""
    target = TARGETS[finding.target]
    with tempfile.TemporaryDirectory() as folder:
        file, data = mutated(target, make_originals(target, Path(folder)), finding.seed)
    path = CORPUS / f"{finding.target.replace(' ', '-')}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.with_suffix(".input").write_bytes(data)
    note = {"target": finding.target, "file": file, "what": finding.what, "seed": finding.seed}
    path.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120_000)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fuzz.md")
    options = parser.parse_args()
    targets = [target for target in TARGETS.values() if options.only in (None, target.name)]
    numbers: dict[str, tuple[float, ...]] = {}
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for target in targets:
        started = time.monotonic()
        count = round(options.count * target.share / sum(target.share for target in targets))
        counts, findings = fuzz(target.name, range(options.start, options.start + max(1, count)))
        spent = time.monotonic() - started
        became = (counts[kind] for kind in ("refused", "read", "same"))
        numbers[target.name] = (sum(counts.values()), *became, len(findings), spent)
        print(f"{target.name}: {sum(counts.values()):,} mutations in {spent:.0f} s", file=sys.stderr, flush=True)
        for finding in findings:
            kinds.setdefault((finding.target, finding.what), []).append(finding)
    numbers["all"] = tuple(map(sum, zip(*numbers.values(), strict=True)))
    header = ("format", "mutations", "refused", "read", "unchanged", "defects", "seconds")
    shown = table(header, [[name, *(f"{number:,.0f}" for number in row)] for name, row in numbers.items()])
    print(shown)
    for (name, what), alike in kinds.items():
        print(f"{len(alike)} x {name}: {what}; kept {save(alike[0])}")
    if options.write:
        total, *_, seconds = numbers["all"]
        about = f"Mutations of valid files, read by orthomerge: {total:,.0f} in {seconds:.0f} s."
        write_result("fuzz", {"# Fuzzing": about, "## What became of them": shown, "## Run": describe_run()})
    sys.exit(bool(kinds))


if __name__ == "__main__":
    main()
