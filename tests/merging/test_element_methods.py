"""What holds for every method that merges element by element, beside the contracts of `tests/checks`."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import maker_of, schema
from orthomerge.merging.dare import Dare
from orthomerge.merging.elements import Consensus
from orthomerge.merging.kinds import SurveyMethod, TensorMethod
from orthomerge.merging.methods import METHODS, make_method
from orthomerge.merging.ties import Ties
from orthomerge.merging.vectors import TaskVectors

Method = TensorMethod | SurveyMethod
Merge = Callable[[Method, TaskVectors], dict[str, torch.Tensor]]
ELEMENT = [name for name, row in METHODS.items() if not row.matrices]
TASKS = ("a", "b", "c")


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", ELEMENT)
def test_the_size_of_blocks_changes_no_bit(
    name: str,
    coarse: bool,
    random_vectors: Callable[..., TaskVectors],
    merged: Merge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where equal entries and sums of zero abound either, nor where the runs of statistics cut across blocks."""
    monkeypatch.setattr("orthomerge.merging.statistics._RUN", 50)
    count = METHODS[name].experts[1] or 3
    method = make_method(name, {}, tasks=TASKS[:count])
    whole, *others = (
        merged(method, random_vectors(tile=tile, coarse=coarse, experts=count)) for tile in (1 << 40, 64, 7)
    )
    for other in others:
        assert other.keys() == whole.keys()
        for key, delta in whole.items():
            assert torch.equal(delta, other[key]), key


FAITHFUL: list[tuple[str, Any]] = [(name, row.faithful) for name, row in METHODS.items() if not row.matrices]
FAITHFUL += [("ties@fusionbench", {"density": 1.0, "scale": 1.0, "merge": merge}) for merge in ("mean", "max")]


@pytest.mark.parametrize(("name", "options"), [case for case in FAITHFUL if not isinstance(case[1], str)])
def test_one_expert_comes_back_bit_for_bit(
    name: str, options: dict[str, Any], random_vectors: Callable[..., TaskVectors], merged: Merge
) -> None:
    vectors = random_vectors(experts=1)
    result = merged(make_method(name, options, tasks=("a",)), vectors)
    assert all(torch.equal(delta, vectors.vectors["a"][key]) for key, delta in result.items())


def _makers(option: str) -> list[Callable[..., Method]]:
    """Everything that has an option: rows, and the classes with every choice open."""
    makers: list[Callable[..., Method]] = [Ties, Dare, *(maker_of(METHODS[name]) for name in ELEMENT)]
    return [maker for maker in makers if option in schema(maker)]


REFUSED: list[tuple[Callable[..., Method], str, Any, str]] = [
    *(
        (maker, "density", density, r"'density' must be in \(0, 1\], got")
        for maker in _makers("density")
        for density in (0.0, -0.1, 1.01, float("nan"))
    ),
    *((maker, "drop", drop, r"'drop' must be in \[0, 1\), got") for maker in _makers("drop") for drop in (1.0, -0.1)),
    *(
        (maker, "gamma", share, r"'gamma' must be in \[0, 1\), got")
        for maker in _makers("gamma")
        for share in (1.0, -0.1)
    ),
    *((maker, "scale", float("inf"), "'scale' must be a finite number, got inf") for maker in _makers("scale")),
    *(
        (maker, "weights", (1.0, float("nan")), "'weights' must be a finite number, got nan")
        for maker in _makers("weights")
    ),
    *((maker, "threshold", float("nan"), "'threshold' must be a finite number") for maker in _makers("threshold")),
]


@pytest.mark.parametrize(("maker", "option", "value", "message"), REFUSED)
def test_numbers_that_are_refused(maker: Callable[..., Method], option: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        maker(**{option: value})


PER_EXPERT = [
    (maker, option)
    for option in ("weights", "scale", "threshold")
    for maker in _makers(option)
    if tuple[float, ...] in get_args(schema(maker)[option][0])
]


@pytest.mark.parametrize(("maker", "option"), PER_EXPERT)
def test_one_number_for_three_experts_is_refused(
    maker: Callable[..., Method], option: str, random_vectors: Callable[..., TaskVectors], merged: Merge
) -> None:
    method = maker(**{option: (1.0,)}, **({"agree": 1} if maker is Consensus else {}))
    with pytest.raises(RecipeError, match="1 numbers were given for 3 experts; give one, or one each"):
        merged(method, random_vectors())
