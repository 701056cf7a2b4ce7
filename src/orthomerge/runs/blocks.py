"""The blocks of a recipe for what comes after the merge: scoring, diagnosis, report, and sweeps over all of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orthomerge.core.errors import RecipeError

Count = int | float | Literal["all"]
Kind = Literal["inductive", "transductive"]


@dataclass(frozen=True)
class Reading:
    """One or several ways of reading merged features; where it says a list, each of them is scored.

    `protocol`: see `docs/evaluation.md`, or else `aligner`: by the head that an aligner makes. `shots`: inputs a class,
    a share below 1, or all. `seeds`: draws of few shots. `access`: where those inputs come from. `options`: of the
    protocol or aligner.
    """

    protocol: str = "current"
    aligner: str | tuple[str, ...] | None = None
    shots: Count | tuple[Count, ...] = "all"
    seeds: int = 5
    access: Kind | tuple[Kind, ...] = "inductive"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.aligner is not None and self.protocol != "current":
            raise RecipeError(
                f"a reading has a 'protocol' or an 'aligner', got {self.protocol!r} and {self.aligner!r}; "
                "write them as two items of the list"
            )
        if () in (self.aligner, self.shots, self.access):
            raise RecipeError("'aligner', 'shots' and 'access' must not be empty lists; leave out what is not needed")
        if self.seeds < 1:
            raise RecipeError(f"'seeds' must be at least 1, got {self.seeds}")
        for count in self.counts:
            if count is not None and (count <= 0 or (isinstance(count, float) and count >= 1)):
                raise RecipeError(f"'shots' must be whole numbers a class, shares below 1, or all, got {count}")

    @property
    def aligners(self) -> tuple[str | None, ...]:
        """Every aligner; None alone where a protocol reads."""
        return self.aligner if isinstance(self.aligner, tuple) else (self.aligner,)

    @property
    def counts(self) -> tuple[int | float | None, ...]:
        """Every number of shots; None is all."""
        given = self.shots if isinstance(self.shots, tuple) else (self.shots,)
        return tuple(None if count == "all" else count for count in given)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Every access class."""
        return self.access if isinstance(self.access, tuple) else (self.access,)


@dataclass(frozen=True)
class Evaluate:
    """What the merge is scored on, always on test inputs, and how it is read.

    `data`: as of `align`, but labelled; of all tasks or of some. `protocols`: names, or mappings as of `Reading`.
    `support`: the split that inductive readings are fitted to. `references`: whether base and experts are scored too.
    `against`: the method that others are compared with, the best if None; `margin`: points below which two may be
    called comparable.
    """

    data: Mapping[str, str]
    protocols: tuple[str | Reading, ...] = (Reading(), Reading(aligner="auto"))
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
    def readings(self) -> tuple[Reading, ...]:
        """The protocols, short forms written out."""
        return tuple(Reading(given) if isinstance(given, str) else given for given in self.protocols)


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
    shots: Count | tuple[Count, ...] = "all"
    access: Kind | tuple[Kind, ...] = "inductive"
    choose: Literal["val", "test"] | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        for scale in self.scales:
            if not math.isfinite(scale):
                raise RecipeError(f"'scales' must be finite numbers, got {scale}")
        if not self.aligners:
            raise RecipeError("'aligners' is empty: name at least one, or `none` for the heads as they are")
        for name in ("methods", "scales", "aligners", "shots", "access"):
            given = getattr(self, name)
            twice = [item for place, item in enumerate(given) if item in given[:place]] if type(given) is tuple else []
            if twice:
                raise RecipeError(f"{name!r} has {twice[0]!r} twice; name each once")
        Reading(shots=self.shots, seeds=self.seeds, access=self.access)  # the same checks
