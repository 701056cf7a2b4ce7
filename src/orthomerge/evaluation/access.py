"""Which inputs a protocol may see before it is scored, made into code so that it cannot be forgotten.

- data-free: none.
- inductive: inputs of another split than the scored one. "How will it do on new inputs?"
- cross-fitted: of the scored split, but never the inputs being scored: K folds, built on K - 1, scored on the last.
- transductive: the scored inputs themselves, unlabelled, as most papers do.

Labels never cross: a protocol that does not need them gets none, and one that does is never scored on an input whose
label it was shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import torch

from orthomerge.data.task import Split
from orthomerge.errors import IncompatibleError, RecipeError, nearest
from orthomerge.evaluation.evidence import evidence_for
from orthomerge.evaluation.metrics import UNSCORED, predict
from orthomerge.evaluation.protocol import Evidence, ReadingProtocol
from orthomerge.features.features import Features
from orthomerge.heads import Classifier, Head
from orthomerge.records import Access

__all__ = ["access_of", "cross_fitted", "fold_numbers", "protocol_predictions", "transductive"]

Build = Callable[[torch.Tensor], Classifier]


def access_of(support: Split | None, *, scored: Split = "test", folds: bool = False) -> Access:
    """The access class of a run whose support comes from split `support` (None: there is none)."""
    if support != scored:
        if folds:
            raise RecipeError(f"folds are of the scored split {scored!r}, but the support comes from {support!r}")
        return "data-free" if support is None else "inductive"
    return "cross-fitted" if folds else "transductive"


def fold_numbers(count: int, *, folds: int = 5, seed: int = 0) -> torch.Tensor:
    """The fold [n] of every input, sizes equal to within one; labels play no part."""
    if not 2 <= folds <= count:
        raise RecipeError(f"'folds' must be between 2 and the number of inputs ({count}), got {folds}")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % folds


def cross_fitted(
    build: Build, values: torch.Tensor, *, pool: torch.Tensor | None = None, folds: int = 5, seed: int = 0
) -> torch.Tensor:
    """A prediction for every row of `values`, each from a classifier that was built without it.

    `build` gets the row numbers that it may use: those of `pool` (all rows, if None) outside the fold to be scored.
    """
    fold = fold_numbers(len(values), folds=folds, seed=seed)
    pool = torch.arange(len(values)) if pool is None else _places(pool, len(values))
    predicted = torch.full((len(values),), UNSCORED)
    for number in range(folds):
        support, held_out = pool[fold[pool] != number], (fold == number).nonzero().flatten()
        if not len(support):
            raise RecipeError(f"fold {number + 1} of {folds} leaves no support; give more inputs than {len(pool)}")
        predicted[held_out] = predict(build(support), values[held_out])
    return predicted


def transductive(
    build: Build, values: torch.Tensor, *, pool: torch.Tensor | None = None, labelled: bool = False
) -> torch.Tensor:
    """Predictions for every row of `values` from one classifier built on `pool` (all rows, if None).

    `labelled`: the classifier sees the labels of the pool, so those rows are `UNSCORED`.
    """
    if labelled and (pool is None or len(pool) >= len(values)):
        raise RecipeError(
            "a protocol that needs labels cannot be scored on the inputs whose labels it was shown: of "
            f"{len(values)} inputs 0 would remain; take a part of them as support, or cross-fit"
        )
    pool = torch.arange(len(values)) if pool is None else _places(pool, len(values))
    predicted = predict(build(pool), values)
    if labelled:
        predicted[pool] = UNSCORED
    return predicted


def protocol_predictions(
    protocol: ReadingProtocol,
    head: Head,
    *,
    access: Access,
    test: Features,
    support: Features | None = None,
    teacher: torch.Tensor | None = None,
    expert: Features | None = None,
    test_teacher: torch.Tensor | None = None,
    test_expert: Features | None = None,
    seed: int = 0,
    places: torch.Tensor | None = None,
    spoil: Callable[[Evidence], Evidence] = lambda evidence: evidence,
    watch: Callable[[Classifier], None] = lambda classifier: None,
) -> torch.Tensor:
    """The predicted class [n] of every input of `test` under one kind of access.

    `support`, `teacher`, `expert`: for inductive access; `test_teacher`, `test_expert`: the expert's logits on `test`
    and its features, for the other two. `places`: rows of `test` that may be support there (few shots, or a share);
    None means all. A labelled protocol with transductive access gets `UNSCORED` at `places`: `metrics.scored` takes
    those out, and their number is missing from what the record says was scored. `spoil` makes a negative control of it,
    after the same checks (`controls.py`). `watch` is shown every classifier that was built.
    """
    if access not in get_args(Access):
        raise RecipeError(f"unknown access {access!r}; {nearest(access, get_args(Access))}")
    if (access == "data-free") != (not protocol.needs):
        needs = ", ".join(sorted(protocol.needs)) or "nothing"
        raise RecipeError(f"{type(protocol).__name__} needs {needs}, which does not go with {access!r} access")

    def made(support: Features | None, logits: torch.Tensor | None, seen: Features | None) -> Classifier:
        evidence = evidence_for(protocol, head, support=support, teacher=logits, expert=seen, seed=seed)
        classifier = protocol.build(spoil(evidence))
        watch(classifier)
        return classifier

    if access in ("data-free", "inductive"):
        _check_inductive(support, test, places)
        return predict(made(support, teacher, expert), test.values)
    if support is not None or teacher is not None or expert is not None:
        raise RecipeError(f"with {access!r} access the support is the scored inputs; give no other")

    def build(rows: torch.Tensor) -> Classifier:
        logits = None if test_teacher is None else test_teacher[rows]
        return made(test.take(rows), logits, None if test_expert is None else test_expert.take(rows))

    if test_teacher is not None and len(test_teacher) != len(test):
        raise IncompatibleError(f"{len(test)} inputs of {test.task!r} but {len(test_teacher)} rows of expert's logits")
    if access == "cross-fitted":
        return cross_fitted(build, test.values, pool=places, seed=seed)
    return transductive(build, test.values, pool=places, labelled="labels" in protocol.needs)


def _check_inductive(support: Features | None, test: Features, places: torch.Tensor | None) -> None:
    if places is not None:
        raise RecipeError("'places' are rows of the scored inputs: only cross-fitted and transductive access use them")
    if support is None:
        return
    if support.split == test.split:
        raise RecipeError(
            f"inductive support must come from another split than the scored one, got {support.split!r} for both; "
            "ask for cross-fitted or transductive access by name"
        )
    if support.task != test.task:
        raise IncompatibleError(f"the support is of {support.task!r} but the scored inputs are of {test.task!r}")


def _places(places: torch.Tensor, count: int) -> torch.Tensor:
    places = places.cpu()
    inside = places.ndim == 1 and places.dtype == torch.int64 and len(places) > 0
    if not inside or int(places.min()) < 0 or int(places.max()) >= count or int(places.bincount().max()) > 1:
        raise IncompatibleError(f"places must be distinct row numbers (int64) in 0..{count - 1}, at least one")
    return places
