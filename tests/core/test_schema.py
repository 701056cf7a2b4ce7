"""Plain data becomes dataclasses strictly; what is wrong is named with its place and, where there is one, its fix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build, describe, schema


@dataclass(frozen=True)
class Inner:
    size: int
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    path: str
    scale: float = 1.0
    steps: int = 3
    quick: bool = False
    kind: Literal["sum", "mean"] = "sum"
    names: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    numbers: Mapping[str, int] | None = None
    inner: Inner | None = None
    either: Inner | str = "x"
    scales: float | tuple[float, ...] = 0.3
    anything: Any = None
    derived: int = field(init=False, default=7)


def make(**data: object) -> Outer:
    return build(Outer, {"path": "p", **data}, where="here")


def test_everything_at_once() -> None:
    outer = make(
        scale=2, steps=4, quick=True, kind="mean", names=["a", "b"], weights={"a": 1, "b": 0.5}, numbers={"x": 1},
        inner={"size": 1}, either={"size": 2, "name": "n"}, scales=[1, 2.5], anything=[object],
    )  # fmt: skip
    assert outer == Outer(
        "p", 2.0, 4, True, "mean", ("a", "b"), {"a": 1.0, "b": 0.5}, {"x": 1}, Inner(1), Inner(2, "n"), (1.0, 2.5),
        [object],
    )  # fmt: skip
    assert (type(outer.scale), type(outer.weights["a"]), outer.derived) == (float, float, 7)


def test_defaults_and_ready_made_parts() -> None:
    assert make() == Outer("p")
    assert make(inner=Inner(3)).inner == Inner(3)
    assert make(numbers=None, inner=None).inner is None
    assert make(scales=1).scales == 1.0
    assert make(names=("a",)).names == ("a",)
    assert make(either="text").either == "text"


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "unknown, near": ({"scael": 1}, r"here: unknown option 'scael'; did you mean 'scale'\?"),
    "unknown, far": ({"zzz": 1}, "here: unknown option 'zzz'; known: anything, either, inner"),
    "not to be given": ({"derived": 1}, "here: unknown option 'derived'"),
    "text for a number": ({"scale": "1"}, "here: 'scale' must be number, got '1'"),
    "truth for a number": ({"scale": True}, "here: 'scale' must be number, got True"),
    "truth for a whole number": ({"steps": True}, "here: 'steps' must be whole number, got True"),
    "a number too large": ({"scale": 10**400}, r"here: 'scale' must be number, got 10000.*\.\.\."),
    "a number beyond all digits": ({"scale": 1 << 20_000}, "here: 'scale' must be number, got a very large int"),
    "fraction": ({"steps": 3.0}, r"here: 'steps' must be whole number, got 3\.0"),
    "number for text": ({"path": 3}, "here: 'path' must be text, got 3"),
    "nothing for text": ({"path": None}, "here: 'path' must be text, got None"),
    "number for truth": ({"quick": 1}, "here: 'quick' must be true or false, got 1"),
    "word": ({"kind": "maen"}, r"here: 'kind' must be sum \| mean, got 'maen'; did you mean 'mean'\?"),
    "list for a word": ({"kind": ["sum"]}, r"here: 'kind' must be sum \| mean, got \['sum'\]"),
    "text for a list": ({"names": "abc"}, "here: 'names' must be list of text, got 'abc'"),
    "item": ({"names": ["a", 2]}, "here: 'names' item 2 must be text, got 2"),
    "list for a mapping": ({"weights": [1]}, r"here: 'weights' must be mapping to number, got \[1\]"),
    "value of a mapping": ({"weights": {"a": "b"}}, "here: 'weights': 'a' must be number, got 'b'"),
    "name that is a truth": ({"weights": {False: 1}}, "'weights': the name False must be text; write it in quotes"),
    "name that is a number": ({"weights": {7: 1}}, "'weights': the name 7 must be text; write it in quotes"),
    "nested": ({"inner": {"siz": 1}}, r"here: 'inner': unknown option 'siz'; did you mean 'size'\?"),
    "nested, missing": ({"inner": {}}, "here: 'inner': 'size' is missing"),
    "nested, type": ({"either": {"size": "1"}}, "here: 'either': 'size' must be whole number, got '1'"),
    "union": ({"either": 3}, "here: 'either' must be mapping of options or text, got 3"),
    "optional": ({"numbers": 3}, "here: 'numbers' must be mapping to whole number or nothing, got 3"),
    "number or list": ({"scales": "x"}, "here: 'scales' must be number or list of number, got 'x'"),
    "long": ({"path": list(range(99))}, r"here: 'path' must be text, got \[0, 1, .{40,60}\.\.\."),
}


@pytest.mark.parametrize(("data", "match"), WRONG.values(), ids=WRONG.keys())
def test_wrong_data(data: dict[str, object], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        make(**data)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        *((data, "here must be a mapping of options, got") for data in (None, ["path"], "path", 3)),
        ({"path": "p", 3: 4}, "here: unknown option '3'"),
        ({None: 4}, "here: unknown option 'None'"),
        ({}, "here: 'path' is missing"),
    ],
)
def test_what_is_no_mapping_of_options(data: object, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        build(Outer, data, where="here")


def test_the_schema_is_the_fields() -> None:
    assert list(schema(Inner)) == ["size", "name"]
    assert [describe(kind) for kind, _ in schema(Outer).values()] == [
        "text", "number", "whole number", "true or false", "sum | mean", "list of text", "mapping to number",
        "mapping to whole number or nothing", "mapping of options or nothing", "mapping of options or text",
        "number or list of number", "anything",
    ]  # fmt: skip
