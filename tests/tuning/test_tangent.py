"""benchmarks/tangent.py: what it chooses, what it claims, and a small run of it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks import tangent
from benchmarks.tangent import SCALES, TITLES, Outcome, claim, digits_study, run

from orthomerge.data.task import Task
from orthomerge.suites import digits
from orthomerge.suites.digits import digit_tasks
from orthomerge.tuning.settings import Mode, Tuning

COUNT = 400


def planted(share: float) -> Outcome:
    """Two tasks, of whose inputs a share is right at lambda = 1 and all are right elsewhere."""
    some = {task: np.arange(COUNT) < share * COUNT for task in ("a", "b")}
    every = {task: np.full(COUNT, True) for task in ("a", "b")}
    merged = dict.fromkeys((0.0, *SCALES), every) | {1.0: some}
    return Outcome(every, merged, {scale: 1.0 if scale in (0.5, 0.3) else 0.9 for scale in SCALES})


def outcomes(full: float, linearised: float, tau_jp: float) -> dict[Mode, list[Outcome]]:
    shares: dict[Mode, float] = {"full": full, "linearised": linearised, "tau_jp": tau_jp}
    return {mode: [planted(share), planted(share)] for mode, share in shares.items()}


def test_of_the_best_scales_the_smallest_is_chosen() -> None:
    assert planted(0.5).chosen == 0.3


@pytest.mark.parametrize(
    ("shares", "linearised", "tau_jp"),
    [
        ((0.2, 0.6, 0.9), True, True),
        ((0.2, 0.9, 0.6), True, True),  # only the comparisons with ordinary experts count
        ((0.2, 0.2, 0.9), False, True),
        ((0.2, 0.6, 0.24), True, False),  # above, but not clearly
        ((0.6, 0.2, 0.1), False, False),
    ],
)
def test_the_claim_is_what_was_found(shares: tuple[float, float, float], linearised: bool, tau_jp: bool) -> None:
    text = claim(outcomes(*shares))
    words = ["holds" if one else "DOES NOT HOLD" for one in (linearised, tau_jp)]
    assert text.endswith(f"The claim: linearised: {words[0]}; tau-Jp: {words[1]}.")
    assert f"linearised against ordinary: {100 * (shares[1] - shares[0]):+.1f} points" in text
    assert f"tau-Jp against its own base: {100 * (shares[2] - 1):+.1f} points" in text  # all are right at lambda = 0


def first(task: Task, count: int) -> Task:
    """A task with only the first inputs of every split."""
    return replace(task, splits={split: part.take(range(count)) for split, part in task.splits.items()})


def test_a_small_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    some = {name: first(task, 32) for name, task in digit_tasks().items() if name in ("parity", "size")}
    monkeypatch.setattr(digits, "digit_tasks", lambda: some)
    monkeypatch.setattr(tangent, "SCALES", (0.3, 1.0))
    for name, value in list(vars(digits).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(digits, name, replace(value, steps=1))
    study = digits_study(folder=tmp_path, say=lambda text: None)
    assert "these seven share their images" in study.about
    found = run(study, [*TITLES], 1, lambda text: None)
    names = {"experts", "experts-linearised", "experts-tau_jp"}
    assert {path.name for path in tmp_path.iterdir()} == {"base", "mtl", *names}  # no merge is left
    for (outcome,) in found.values():
        assert set(outcome.merged) == {0.0, 0.3, 1.0}
        assert set(outcome.val) == {0.3, 1.0}
        assert {len(right) for scored in outcome.merged.values() for right in scored.values()} == {32}
    assert "tau-Jp against linearised" in claim(found)
