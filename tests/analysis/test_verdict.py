"""The verdict on planted cases: a rotation is called one, lost information too; and the commands that it suggests."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.calling import call

from orthomerge.analysis.conflict import Conflict
from orthomerge.analysis.detail import Detail
from orthomerge.analysis.diagnose import suggested_commands
from orthomerge.analysis.diagnosis import Finding
from orthomerge.analysis.families import Reading, TaskComparison, compare_task
from orthomerge.analysis.recovery import Estimate, difference, recovery
from orthomerge.analysis.verdict import Case, verdict
from orthomerge.api.open import open as open_experts
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.files.folders import MANIFEST
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head
from orthomerge.testing.toys import linear_head, random, rotation

Hits = NDArray[np.bool_]
D, CLASSES = 12, 4
WORDS = {"align": "align OUT", "refit": "merge --method realign", "probe": "evaluate"}
COMMANDS = {what: f"orthomerge {words}" for what, words in WORDS.items()}


def planted(change: torch.Tensor, *, count: int = 600, seed: int = 0) -> tuple[FeaturePair, FeaturePair, Head]:
    """Train and test features of classes that the expert tells apart; the merge sees `change` of them."""
    means = 4.0 * random(CLASSES, D, seed=100)
    head = linear_head(means, -0.5 * means.square().sum(1))

    def pair(split: Any, seed: int) -> FeaturePair:
        labels = torch.arange(count) % CLASSES
        T = means[labels] + random(count, D, seed=seed)
        return FeaturePair(Features(T @ change.T, "toy", split, labels), Features(T, "toy", split, labels))

    return pair("train", seed), pair("test", seed + 1), head


def looked(change: torch.Tensor, *, count: int = 600, **more: Any) -> TaskComparison:
    seen, test, head = planted(change, count=count)
    return compare_task(seen, test, head=head, classifier=head, detail=Detail(**more))


def case_of(found: TaskComparison, **more: Any) -> Case:
    hits = {name: {"toy": found.hits[name]} for name in ("expert", "merged", "aligned")}
    readings = {name: {"toy": reading} for name, reading in found.readings.items()}
    given: dict[str, Any] = {"per_class": found.fitted / CLASSES, "commands": COMMANDS, **more}
    return Case("average", "auto", hits, readings, **given)


def titled(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.title: finding for finding in findings}


def shares(expert: float, merged: float, aligned: float, *, n: int = 1000) -> tuple[Hits, Hits, Hits]:
    """Hits whose shares are exact, nested in each other."""
    expert_hits, merged_hits, aligned_hits = (np.arange(n) < round(n * share) for share in (expert, merged, aligned))
    return expert_hits, merged_hits, aligned_hits


def of_tasks(hits: dict[str, tuple[Hits, Hits, Hits]], **more: Any) -> dict[str, Finding]:
    """The verdict on tasks with these hits; `base`: that of the base, if its hits are known, or its mean."""
    names = ("expert", "merged", "aligned")
    by_name = {name: {task: each[place] for task, each in hits.items()} for place, name in enumerate(names)}
    if isinstance(more.get("base"), dict):
        by_name["base"] = more.pop("base")
    given: dict[str, Any] = {"per_class": 100.0, "commands": COMMANDS, **more}
    return titled(verdict(Case("ties", "auto", by_name, {}, **given)))


def test_a_planted_rotation_is_won_back_and_called_one() -> None:
    found = looked(rotation(D, angle=3.0))
    assert found.hits["expert"].mean() > 0.99
    assert found.hits["merged"].mean() < 0.8
    findings = titled(verdict(case_of(found)))
    won = findings["Misaligned, not lost"]
    assert won.numbers["share"] > 97
    assert "no new parameter" in won.text
    assert "Nothing certain remains" in findings
    turned = findings["It is a rotation"]
    assert "the orthogonal map suffices" in turned.text
    assert turned.numbers["orthogonal"] < 0.01
    assert turned.numbers["raw"] > 0.5
    assert "`orthomerge align OUT`" in findings["What to try next"].text
    assert "realign" not in findings["What to try next"].text


def test_planted_loss_of_information() -> None:
    kept = torch.eye(D)
    kept[1:] = 0  # one of twelve directions is left
    found = looked(kept)
    probe = 100 * float(found.hits["probe"].mean())
    witness = Estimate(probe, probe - 2, probe + 2)
    findings = titled(verdict(case_of(found, witnesses={"a probe": witness})))
    lost = findings["Likely lost information"]
    assert lost.numbers["left"] > 5
    assert "more than the aligner does" in lost.text
    assert "realign" in findings["What to try next"].text


def test_a_stretch_is_no_rotation_and_identical_features_need_nothing() -> None:
    stretch = torch.diag(torch.tensor([0.02] * 6 + [3.0] * 6))
    findings = titled(verdict(case_of(looked(rotation(D) @ stretch))))
    assert findings["More than a rotation"].numbers["linear"] < 0.2
    findings = titled(verdict(case_of(looked(torch.eye(D)))))
    assert "That is a tie" in findings["Accuracy"].text
    assert "share" not in findings["Little to win back"].numbers
    assert "Nothing has to be done" in findings["What to try next"].text
    assert "The features agree" in findings


WITNESSES = {"knn": Estimate(60, 55, 65), "probe": Estimate(90, 88, 92)}


def base(share: float) -> dict[str, Any]:
    return {"base": {"toy": np.arange(1000) < 1000 * share}}


@pytest.mark.parametrize(
    ("shares_of", "options", "title", "words"),
    [
        ((0.95, 0.5, 0.7), {"witnesses": WITNESSES}, "Not all of it is lost", "saw labels (probe)"),
        ((0.95, 0.5, 0.7), {}, "Partly misaligned", "44 % of the loss"),
        ((0.9, 0.6, 0.4), {}, "Not a matter of alignment", "makes it worse by 20.0 points"),
        ((0.9, 0.6, 0.6), {}, "Not a matter of alignment", "wins nothing back for certain"),
        ((0.7, 0.9, 0.9), {}, "Accuracy", "20.0 points (17.5 to 22.5) more than the experts"),
        ((1.0, 0.95, 1.0), {"n": 20}, "Accuracy", "That is a tie"),
        ((0.9, 0.6, 0.7), {"per_class": 3.0}, "What remains", "lost information, or too few inputs"),
        ((0.9, 0.6, 0.7), base(0.8), "Accuracy", "more than the merge"),
        ((0.9, 0.6, 0.7), base(0.5), "Accuracy", "less than the merge"),
        ((0.9, 0.6, 0.7), base(0.6), "Accuracy", "a tie: the merge differs by 0.0"),
        ((0.9, 0.6, 0.7), {"scales": {0.1: 80.0, 0.3: 70.0}, "scale": 0.3}, "Scale",
         "0.1 is the best (80.0 in the mean); at 0.3, as merged, it is 70.0"),
        ((0.9, 0.6, 0.7), {"scales": {0.1: 80.0}}, "Scale", "0.1 is the best (80.0 in the mean)."),
    ],
)  # fmt: skip
def test_planted_shares(shares_of: tuple[float, float, float], options: dict[str, Any], title: str, words: str) -> None:
    more = dict(options)
    hits = shares(*shares_of, n=more.pop("n", 1000))
    assert words in of_tasks({"toy": hits}, **more)[title].text


def test_which_task_suffers_and_which_experts_conflict() -> None:
    hits = {"a": shares(0.9, 0.3, 0.8), "b": shares(0.9, 0.8, 0.9), "c": shares(0.9, 0.9, 0.9)}
    signs = ((0, 0.45, 0.5), (0.45, 0, 0.6), (0.5, 0.6, 0))
    conflict = Conflict(("a", "b", "c"), (), (), (), ((1, 0.2, 0.1), (0.2, 1, -0.3), (0.1, -0.3, 1)), signs)
    findings = of_tasks(hits, conflict=conflict)
    worst, pair = findings["Which task suffers"], findings["Which experts conflict"]
    assert "'a' loses the most: 60.0 points" in worst.text
    assert "clearly more than the next, 'b' (10.0)" in worst.text
    assert "'b' and 'c' pull against each other the most" in pair.text
    assert pair.numbers["sign conflict, %"] == pytest.approx(60)
    assert pair.numbers["cosine"] == -0.3


def test_tasks_and_pairs_that_cannot_be_told_apart() -> None:
    hits = {"a": shares(0.9, 0.60, 0.8, n=100), "b": shares(0.9, 0.62, 0.9, n=100)}
    nothing = ((0, math.nan), (math.nan, 0))
    findings = of_tasks(hits, conflict=Conflict(("a", "b"), (), (), (), nothing, nothing))
    assert "'b' may lose as much (the intervals overlap)" in findings["Which task suffers"].text
    assert "Which experts conflict" not in findings


def test_recovery_by_hand() -> None:
    expert, merged, aligned = ({"toy": each} for each in shares(0.9, 0.5, 0.8))
    found = recovery(expert, merged, aligned)
    assert (found.lost.value, found.won.value, found.left.value) == pytest.approx((40, 30, 10))
    assert found.share is not None
    assert found.share.value == pytest.approx(75)
    assert found.share.low < 75 < found.share.high
    assert found.share.high - found.share.low < 15
    assert recovery(expert, expert, expert).share is None
    # Two that never differ still have an interval.
    nothing = difference(expert, expert)
    assert nothing.value == 0
    assert nothing.low < 0 < nothing.high


def test_few_inputs_one_class_and_constant_features() -> None:
    seen, test, head = planted(torch.eye(D), count=1)
    given: dict[str, Any] = {"head": head, "classifier": head, "detail": Detail(maps=10)}
    found = compare_task(seen, test, **given)
    assert found.hits["aligned"].shape == (1,)
    assert math.isnan(found.readings["none"].distance)
    verdict(case_of(found))

    def constant(pair: FeaturePair) -> FeaturePair:
        flat = Features(torch.ones(len(pair.merged), D), "toy", pair.merged.split, pair.merged.labels)
        return FeaturePair(flat, pair.expert)

    seen, test, head = planted(torch.eye(D), count=60)
    found = compare_task(constant(seen), constant(test), **given)
    assert found.hits["aligned"].mean() <= 0.5
    verdict(case_of(found))


def test_bad_features_and_missing_labels_are_refused() -> None:
    seen, test, head = planted(torch.eye(D), count=20)
    given: dict[str, Any] = {"head": head, "classifier": head, "detail": Detail(maps=10, probe=False)}
    bad = FeaturePair(Features(torch.full((20, D), math.nan), "toy", "train"), seen.expert)
    with pytest.raises(NumericalError, match="merged features of 'toy' are NaN"):
        compare_task(bad, test, **given)
    with pytest.raises(RecipeError, match="test split of 'toy' has no labels"):
        compare_task(seen, FeaturePair(test.merged.unlabelled(), test.expert), **given)


def test_a_head_of_its_own_is_told_apart() -> None:
    seen, test, head = planted(rotation(D), count=200)
    detail = Detail(aligner="ridge", maps=50, probe=False)
    found = compare_task(seen, test, head=head, classifier=linear_head(random(CLASSES, D)), detail=detail)
    assert list(found.readings)[-2:] == ["as it is", "aligner ridge"]
    assert (found.mapped, found.fitted) == (50, 200)
    assert isinstance(found.readings["none"], Reading)
    assert "probe" not in found.hits


def test_a_saved_model_needs_its_data_and_a_merge_is_made(berts: Path, tables: Path, tmp_path: Path) -> None:
    experts = open_experts({"two": berts / "two"}, base=berts / "base")
    commands = suggested_commands("my out/", {"two": "two.csv"}, experts, aligner="ridge")
    assert commands == {
        "align": "orthomerge align 'my out/' --aligner ridge --data two=two.csv --out 'my out'-aligned",
        "probe": "orthomerge evaluate 'my out/' --data two=two.csv --protocol current --protocol probe",
        "refit": f"orthomerge merge two={berts / 'two'} --base {berts / 'base'} --method realign "
        "--data two=two.csv --out 'my out'-realigned",
    }
    moved = suggested_commands("out", {"two": "two.csv"}, experts, base="b", moved={"two": "e"})
    align = "orthomerge align out --aligner auto --data two=two.csv --base b --expert two=e --out out-aligned"
    assert moved["align"] == align
    command = suggested_commands(str(tmp_path / "out"), {"two": str(tables / "two.csv")}, experts)["refit"]
    quick = ["--set", "steps=2", "--set", "copies=0", "--set", "batch=4", "--device", "cpu", "-q"]
    call(*shlex.split(command)[1:], *quick)
    assert (tmp_path / "out-realigned" / MANIFEST).is_file()


@pytest.mark.parametrize("options", [{"labels": {"two": ["no", "yes"]}}, {"pooling": "mean"}, {"base": None}])
def test_paths_that_do_not_say_how_experts_are_opened(berts: Path, options: dict[str, Any]) -> None:
    experts = open_experts({"two": berts / "two"}, **{"base": berts / "base", **options})
    assert "refit" not in suggested_commands("out", {"two": "two.csv"}, experts)
