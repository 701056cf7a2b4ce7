"""The table of aligners, options that are refused, and that few inputs never hurt; contracts are in tests/checks."""

import math
from statistics import mean
from typing import Any

import pytest
import torch
from tests.alignment.planted import accuracy, doubles, planted_task

from orthomerge.alignment.aligners import ALIGNERS, aligners, find_aligner, make_aligner
from orthomerge.alignment.problem import Problem
from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import maker_of, schema
from orthomerge.testing.aligners import turned_pair
from orthomerge.testing.toys import head_of, pair_of

D = 6
CLOSED = ("ridge", "orthogonal", "similarity", "scaling", "linear", "invertible", "affine", "logit-procrustes")
OURS = ("auto", "kl-map", *CLOSED)


STRENGTHS = [
    (name, option)
    for name, row in ALIGNERS.items()
    for option in ("strength", "kappa", "prior")
    if option in schema(maker_of(row))
]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {option: -1.0}, f"'{option}' must be 0 or more, or auto, got -1") for name, option in STRENGTHS),
        *((name, {option: math.nan}, f"'{option}' must be 0 or more, or auto, got nan") for name, option in STRENGTHS),
        *(("invertible", {"floor": value}, r"'floor' must be in \(0, 1\), got") for value in (0.0, 1.0, math.nan)),
        ("ridge", {"strength": "much"}, "strength"),
    ],
)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_aligner(name, options)


def test_names() -> None:
    assert find_aligner("ridge").maker.endswith("linear_maps:Ridge")
    with pytest.raises(RecipeError, match="unknown aligner 'rigde'; did you mean 'ridge'"):
        make_aligner("rigde")
    assert list(aligners())[: len(ALIGNERS)] == list(ALIGNERS)


def test_a_problem_reads_what_the_head_reads() -> None:
    given = turned_pair()
    plain, unit = (Problem.of(given, head_of(kind)) for kind in ("plain", "normalising"))
    assert torch.equal(plain.H, given.merged.values.double())
    torch.testing.assert_close(unit.T.norm(dim=1), torch.ones(12, dtype=torch.float64))
    assert (plain.biased, unit.biased) == (True, False)
    torch.testing.assert_close(plain.Z, plain.head(given.expert.values).double(), rtol=0, atol=1e-5)


FEW = (1, 2, 5)  # a class, of 5: 5, 10 and 25 inputs of 32 features
SEEDS = 5
NOISE = 0.01  # the mean over 5 draws of 2,000 test inputs is good to about 0.004


@pytest.mark.parametrize(("angle", "shrink"), [(1.0, 0.6), (0.2, 0.95)])
@pytest.mark.parametrize("name", [name for name in OURS if name != "scaling"])
def test_fewer_inputs_than_features_never_hurt(name: str, angle: float, shrink: float) -> None:
    """Where much was lost by merging, and where next to nothing was; rank-deficient in all cases."""
    slow = name in ("kl-map", "auto")
    for per_class in FEW[:2] if name == "kl-map" else FEW:  # its cross-validation takes its time
        gains = []
        for seed in range(2 if slow else SEEDS):
            task = planted_task(per_class, seed=seed, angle=angle, shrink=shrink)
            gains.append(accuracy(make_aligner(name).fit(task.pair, task.head).classifier, task) - task.unaligned)
        assert mean(gains) >= -NOISE


@pytest.mark.parametrize("name", [name for name in OURS if name not in ("scaling", "auto", "kl-map")])
def test_inputs_in_a_plane_never_hurt(name: str) -> None:
    """Many inputs, but all on one line: rank 1, and noise in the teacher."""
    gains = []
    for seed in range(SEEDS):
        task = planted_task(1, seed=seed)
        merged, expert = task.pair.merged.values, task.pair.expert.values
        line = torch.linspace(0, 1, 40)[:, None]
        given = pair_of(merged[0] + line * (merged[1] - merged[0]), expert[0] + line * (expert[1] - expert[0]))
        noisy = pair_of(given.merged.values, given.expert.values + 0.1 * doubles(40, 32, seed=seed).float())
        gains.append(accuracy(make_aligner(name).fit(noisy, task.head).classifier, task) - task.unaligned)
    assert mean(gains) >= -NOISE
