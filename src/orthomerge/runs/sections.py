"""Sections of a recipe: `align`, `fit`, `evaluate`, `diagnose`, `report` and `sweep`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.checks import at_least_one, not_negative, positive
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.analysis.detail import Detail
    from orthomerge.evaluation.protocols import EvaluationProtocol

Split = Literal["train", "val", "test"]
Shots = int | float | Literal["all"]
Access = Literal["inductive", "transductive"]


@dataclass(frozen=True)
class Align:
    """Section `align`: how to align the heads of the merge, and on which inputs; their labels are not used.

    `data`: task name to a table, an .npz, an image folder or a dataset. `limit`: at most N inputs per task.
    """

    data: Mapping[str, str]
    aligner: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    split: Split = "train"
    limit: int | None = None

    def __post_init__(self) -> None:
        at_least_one(limit=self.limit)


@dataclass(frozen=True)
class Fit:
    """Section `fit`: unlabelled inputs of a fitted method, and how it is computed.

    `data`, `split`, `limit`: as in `Align`. `precision`: of the forward passes; auto is bfloat16 on a GPU. `resume`:
    save the state of the fit beside the output every `save_every` seconds (60 if None), to continue if interrupted.
    """

    data: Mapping[str, str]
    split: Split = "train"
    limit: int | None = None
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    resume: bool = True
    save_every: float | None = None

    def __post_init__(self) -> None:
        at_least_one(limit=self.limit)
        not_negative(save_every=self.save_every or 0)


@dataclass(frozen=True)
class Scoring:
    """An item of `protocols`: every combination of the values that are lists.

    `aligner`: instead of a `protocol`, score the head that an aligner fits. `shots`: inputs per class, a share below 1,
    or all. `seeds`: draws of few shots. `access`: where those inputs come from.
    """

    protocol: str = "current"
    aligner: str | tuple[str, ...] | None = None
    shots: Shots | tuple[Shots, ...] = "all"
    seeds: int = 5
    access: Access | tuple[Access, ...] = "inductive"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.aligner is not None and self.protocol != "current":
            both = f"{self.protocol!r} and {self.aligner!r}; write them as two items of the list"
            raise RecipeError(f"an item of 'protocols' has a 'protocol' or an 'aligner', got {both}")
        if () in (self.aligner, self.shots, self.access):
            raise RecipeError("'aligner', 'shots' and 'access' must not be empty lists; leave out what is not needed")
        at_least_one(seeds=self.seeds)
        for count in listed(self.shots):
            if count != "all" and (count <= 0 or (isinstance(count, float) and count >= 1)):
                raise RecipeError(f"'shots' must be whole numbers per class, shares below 1, or all, got {count}")


def listed(value: Any) -> tuple[Any, ...]:
    """Return the items of an option that is one value or a list."""
    return value if isinstance(value, tuple) else (value,)


def protocols_of(scorings: Iterable[Scoring], support: Split) -> list[EvaluationProtocol]:
    """Return every distinct protocol of `scorings`, with checked names and options."""
    from orthomerge.evaluation.protocols import EvaluationProtocol

    protocols = list[EvaluationProtocol]()
    for scoring in scorings:
        for aligner, shots, access in product(listed(scoring.aligner), listed(scoring.shots), listed(scoring.access)):
            protocol = EvaluationProtocol(scoring.protocol, scoring.options, aligner=aligner)
            protocol.builder()  # checks names and options
            if protocol.needs:
                drawn = {} if shots == "all" else {"shots": shots, "seeds": scoring.seeds}
                protocol = replace(protocol, access=access, support=support, **drawn)
            if protocol not in protocols:
                protocols.append(protocol)
    return protocols


@dataclass(frozen=True)
class Evaluate:
    """Section `evaluate`: how models are scored on labelled test inputs.

    `data`: of all tasks or of some. `protocols`: names, or mappings as in `Scoring`. `support`: the split that
    inductive protocols are fitted to. `references`: also score base and experts. `against`: the method that others are
    compared with, the best if None. `margin`: points below which two methods may be called comparable.
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
        if not self.protocols:
            raise RecipeError("'protocols' is empty: name at least one, or leave it out")
        at_least_one(batch=self.batch)
        positive(margin=self.margin)

    @property
    def scorings(self) -> tuple[Scoring, ...]:
        """Protocols, with short forms written out."""
        return tuple(Scoring(item) if isinstance(item, str) else item for item in self.protocols)


@dataclass(frozen=True)
class Diagnose:
    """Section `diagnose`: how much to measure (`analysis.detail.Detail`). `aligner`: that of `align` or auto if None.

    `scales`: also draw a curve over scales, which merges again at each scale.
    """

    aligner: str | None = None
    points: int = 400
    layers: int = 512
    maps: int = 4096
    probe: bool = True
    limit: int | None = None
    scales: bool = False

    def detail(self, *, seed: int) -> Detail:
        """Return the section as checked options of a diagnosis."""
        from orthomerge.analysis.detail import Detail

        return Detail(**{name: value for name, value in vars(self).items() if name != "scales"}, seed=seed)


@dataclass(frozen=True)
class Report:
    """Section `report`. `title`: heading of the page; the name of the run folder if None."""

    title: str | None = None


@dataclass(frozen=True)
class SweptMethod:
    """A method of a sweep with its options; `scales` does not replace a `scale` among them."""

    method: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Section `sweep`: every distinct combination of these lists is merged and scored.

    `methods`: names, or mappings as in `SweptMethod`; the recipe's own if empty. `scales`: for every method that has
    one. `seeds`: how many, for random merges and for draws of few inputs. `aligners`: names, and `none` for the
    original heads. `shots` and `access`: as in `Scoring`. `choose`: the split on which the best is chosen; val if all
    tasks have one. `keep`: leave the merged models in the run folder.
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
            raise RecipeError("'aligners' is empty: name at least one, or `none` for the original heads")
        Scoring(shots=self.shots, seeds=self.seeds, access=self.access)  # checks that both share
