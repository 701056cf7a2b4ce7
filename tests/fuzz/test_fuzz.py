"""Some of the fuzzing on every run, with fixed seeds; `make fuzz` does more of it. What was ever found is replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fuzz.engine import CORPUS, fuzz, replay, target_named
from tests.fuzz.targets import TARGETS

COUNT = 6_000  # in all; more by `make fuzz`
KEPT = sorted(CORPUS.glob("*.json"))


@pytest.mark.parametrize("target", [target.name for target in TARGETS])
def test_mutations_are_refused_or_read_alike(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    share = target_named(target).share / sum(each.share for each in TARGETS)
    outcome = fuzz(round(COUNT * share), only=target, seconds=60)
    with capsys.disabled():
        print(f"\nfuzz {target}: {outcome.total} mutations, {dict(outcome.counts[target])}", end=" ")
    assert [(each.seed, each.file, each.what) for each in outcome.findings] == []
    assert outcome.total > 50


@pytest.mark.parametrize("note", KEPT, ids=[path.stem for path in KEPT])
def test_what_was_found_once(note: Path) -> None:
    about = json.loads(note.read_text())
    assert replay(target_named(about["target"]), about["file"], note.with_suffix(".input").read_bytes()) is None
