"""Some of the fuzzing on every run, with fixed seeds; `make fuzz` does more of it. What was ever found is replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fuzz.engine import CORPUS, fuzz, replay
from tests.fuzz.targets import TARGETS

COUNT = 6_000  # in all; more by `make fuzz`
WHOLE = sum(target.share for target in TARGETS.values())
KEPT = sorted(CORPUS.glob("*.json"))


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_are_refused_or_read_alike(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    count = round(COUNT * TARGETS[target].share / WHOLE)
    counts, findings = fuzz(target, range(count))
    with capsys.disabled():
        print(f"\nfuzz {target}: {count} mutations, {dict(counts)}", end=" ")
    assert [(each.seed, each.file, each.what) for each in findings] == []
    assert sum(counts.values()) == count > 50


@pytest.mark.parametrize("note", KEPT, ids=[path.stem for path in KEPT])
def test_what_was_found_once(note: Path) -> None:
    about = json.loads(note.read_text())
    assert replay(about["target"], about["file"], note.with_suffix(".input").read_bytes()) is None
