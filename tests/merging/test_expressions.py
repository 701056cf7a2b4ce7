"""Expressions over task vectors: what they stand for, and what is refused."""

from pathlib import Path

import pytest
import torch

from orthomerge.api.open import open as open_experts
from orthomerge.core.errors import RecipeError
from orthomerge.merging.merge import task_vectors
from orthomerge.merging.vectors import TaskVector, evaluate

KEY = "encoder.layer.0.output.dense.weight"


@pytest.fixture(scope="module")
def vectors(berts: Path) -> dict[str, TaskVector]:
    """Task vectors under names that Python has, and names that it has not."""
    two, three, five = task_vectors(
        open_experts({name: berts / name for name in ("two", "three", "five")}, base=berts / "base")
    ).vectors.values()
    return {"a": two, "b.c": three, "lambda": five, "a-b": three, "1st": five, "it's": two}


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        ("a", {"a": 1.0}),
        ("-0.5 * a", {"a": -0.5}),
        ("a + (b.c - lambda)", {"a": 1.0, "b.c": 1.0, "lambda": -1.0}),
        ("a - b.c - lambda", {"a": 1.0, "b.c": -1.0, "lambda": -1.0}),
        ("2 * 3 * a / 4 - -b.c", {"a": 1.5, "b.c": 1.0}),
        ("(1 + 2) / 1e1 * (a - 'lambda')", {"a": 0.3, "lambda": -0.3}),
        ("'a-b' * .5 + \"1st\"", {"a-b": 0.5, "1st": 1.0}),
        ('a\n  + "it\'s"', {"a": 1.0, "it's": 1.0}),
    ],
)
def test_what_an_expression_stands_for(vectors: dict[str, TaskVector], text: str, factors: dict[str, float]) -> None:
    expected = sum(factor * vectors[name][KEY].double() for name, factor in factors.items())
    torch.testing.assert_close(evaluate(text, vectors)[KEY].double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is missing"),
        ("1 a", "is missing"),
        ("a +", "is missing"),
        ("a b.c", "is missing"),
        ("(a", "is missing"),
        ("a) + (a", "is missing"),
        ("a-b", "names 'b', which is no expert"),
        ("1st", "names 'st', which is no expert"),
        ("1_0 * a", "names '_0', which is no expert"),
        ("0x1 * a", "names 'x1', which is no expert"),
        ("lamda", "names 'lamda', which is no expert; did you mean 'lambda'"),
        ("__import__", "which is no expert"),
        ("a; a", "';' is not allowed"),
        ("a # a", "'#' is not allowed"),
        ("'a", '"\'" is not allowed'),
        ("+a", "only names, numbers"),
        ("2 ** 3 * a", "only names, numbers"),
        ("a // 2", "only names, numbers"),
        ("a(a)", "only names, numbers"),
        ("()", "only names, numbers"),
        ("a + 1", "a number and a task vector cannot be added"),
        ("a * a", "by numbers only"),
        ("2 / a", "by numbers only"),
        ("a / (1 - 1)", "division by zero"),
        ("1 + 2", "it is a number, not a task vector"),
        ("-" * 100_000 + "a", "cannot be read"),
        ("(" * 150 + "a" + ")" * 150 + "+", "is missing"),
        ("9" * 400 + " * a", "too large"),
    ],
)
def test_what_is_refused(vectors: dict[str, TaskVector], text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        evaluate(text, vectors)
