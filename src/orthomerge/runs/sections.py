"""The sections of a recipe: inputs of a fit, aligned heads, scores, diagnosis, report, and sweeps over all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orthomerge.core.errors import RecipeError

Split = Literal["train", "val", "test"]
Shots = int | float | Literal["all"]
Access = Literal["inductive", "transductive"]


@dataclass(frozen=True)
class Align:
    """How to align the heads of the merge, and on which inputs; labels that these have are not looked at.

    `data`: task name to a table, an .npz, an image folder or a dataset. `limit`: at most N inputs per task.
    """

    data: Mapping[str, str]
    aligner: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    split: Split = "train"
    limit: int | None = None

    def __post_init__(self) -> None:
        _check_inputs(self, "nothing to align on: give the inputs of at least one task")


@dataclass(frozen=True)
class Fit:
    """The inputs that a fitted method looks at, and what computes; labels that inputs have are not looked at.

    `data`, `split`, `limit`: as of `align`; in Python, a `Task` may be in the place of a path. `precision`: of the
    forward passes; auto is bfloat16 on a GPU, float32 on a CPU. `resume`: keep the state of a long fit beside the
    output, and continue from it after a kill. `save_every`: seconds between two such states, 60 if None.
    """

    data: Mapping[str, str]
    split: Split = "train"
    limit: int | None = None
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    resume: bool = True
    save_every: float | None = None

    def __post_init__(self) -> None:
        _check_inputs(self, "nothing to fit to: give the inputs of every task")
        if self.save_every is not None and not 0 <= self.save_every < math.inf:
            raise RecipeError(f"'save_every' must be a number of seconds, got {self.save_every}")


def _check_inputs(section: Align | Fit, empty: str) -> None:
    if not section.data:
        raise RecipeError(f"{empty} as 'data'")
    if section.split not in ("train", "val", "test"):
        raise RecipeError(f"'split' must be train, val or test, got {section.split!r}")
    if section.limit is not None and section.limit < 1:
        raise RecipeError(f"'limit' must be at least 1, got {section.limit}")


@dataclass(frozen=True)
class Scoring:
    """One or several ways to score a model; every combination of what is listed is scored.

    `protocol`: see `docs/evaluation.md`, or else `aligner`: by the head that an aligner makes. `shots`: inputs per
    class, a share below 1, or all. `seeds`: draws of few shots. `access`: where those inputs come from. `options`: of
    the protocol or aligner.
    """

    protocol: str = "current"
    aligner: str | tuple[str, ...] | None = None
    shots: Shots | tuple[Shots, ...] = "all"
    seeds: int = 5
    access: Access | tuple[Access, ...] = "inductive"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.aligner is not None and self.protocol != "current":
            raise RecipeError(
                f"an item of 'protocols' has a 'protocol' or an 'aligner', got {self.protocol!r} and {self.aligner!r}; "
                "write them as two items of the list"
            )
        if () in (self.aligner, self.shots, self.access):
            raise RecipeError("'aligner', 'shots' and 'access' must not be empty lists; leave out what is not needed")
        if self.seeds < 1:
            raise RecipeError(f"'seeds' must be at least 1, got {self.seeds}")
        for count in listed(self.shots):
            if count != "all" and (count <= 0 or (isinstance(count, float) and count >= 1)):
                raise RecipeError(f"'shots' must be whole numbers per class, shares below 1, or all, got {count}")


def listed(value: Any) -> tuple[Any, ...]:
    """The items of an option that may be one value or a list of them."""
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True)
class Evaluate:
    """What the merge is scored on, always on test inputs, and how.

    `data`: as of `align`, but labelled; of all tasks or of some. `protocols`: names, or mappings as of `Scoring`.
    `support`: the split that inductive protocols are fitted to. `references`: whether base and experts are scored too.
    `against`: the method that others are compared with, the best if None; `margin`: points below which two may be
    called comparable.
    """

    data: Mapping[str, str]
    protocols: tuple[str | Scoring, ...] = (Scoring(), Scoring(aligner="auto"))
    support: Literal["train", "val"] = "train"
    references: bool = True
    against: str | None = None
    margin: float = 1.0
    device: str = "auto"
    batch: int = 64

    def __post_init__(self) -> None:
        if not self.data:
            raise RecipeError("nothing to score on: give the data of at least one task as 'data'")
        if not self.protocols:
            raise RecipeError("'protocols' is empty: name at least one, or leave it out")
        if self.batch < 1:
            raise RecipeError(f"'batch' must be at least 1, got {self.batch}")
        if not self.margin > 0:
            raise RecipeError(f"'margin' must be a positive number of points, got {self.margin:g}")

    @property
    def scorings(self) -> tuple[Scoring, ...]:
        """The protocols, short forms written out."""
        return tuple(Scoring(item) if isinstance(item, str) else item for item in self.protocols)


@dataclass(frozen=True)
class Diagnose:
    """How closely to look at the merge (see `docs/diagnosis.md`). `aligner`: that of `align`, else auto.

    `scales`: also a curve over scales, which merges anew.
    """

    aligner: str | None = None
    points: int = 400
    layers: int = 512
    maps: int = 4096
    probe: bool = True
    limit: int | None = None
    scales: bool = False


@dataclass(frozen=True)
class Report:
    """The page. `title`: its heading, the name of the run folder if None."""

    title: str | None = None


@dataclass(frozen=True)
class SweptMethod:
    """A method of a sweep. `method`: its name. `parameters`: its options; where these give a scale, it stays."""

    method: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Every combination of these lists is merged and scored, each that means something else once.

    `methods`: names, or mappings as of `SweptMethod`; the recipe's own if there are none. `scales`: of every method
    that has one. `seeds`: how many, of merges that draw at random and of few inputs. `aligners`: names, and `none` for
    heads as they are. `shots` and `access`: as of `evaluate`. `choose`: the split on which the best is chosen; val if
    all tasks have one. `keep`: leave the merged models in the run folder.
    """

    methods: tuple[str | SweptMethod, ...] = ()
    scales: tuple[float, ...] = ()
    seeds: int = 1
    aligners: tuple[str, ...] = ("none", "auto")
    shots: Shots | tuple[Shots, ...] = "all"
    access: Access | tuple[Access, ...] = "inductive"
    choose: Literal["val", "test"] | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        for scale in self.scales:
            if not math.isfinite(scale):
                raise RecipeError(f"'scales' must be finite numbers, got {scale}")
        if not self.aligners:
            raise RecipeError("'aligners' is empty: name at least one, or `none` for the heads as they are")
        for name in ("methods", "scales", "aligners", "shots", "access"):
            items = listed(getattr(self, name))
            twice = next((item for place, item in enumerate(items) if item in items[:place]), None)
            if twice is not None:
                raise RecipeError(f"{name!r} has {twice!r} twice; name each once")
        Scoring(shots=self.shots, seeds=self.seeds, access=self.access)  # the same checks
