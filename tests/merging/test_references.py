"""Every variant of TIES and DARE against another implementation: its own package, or its steps spelled out naively.

A reference gets the deltas [T, *shape] of every tensor and the options of the entry, and leaves `scale` to the test.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.merging.making import merged, random_vectors, stacked

from orthomerge.merging.dare import keep_mask
from orthomerge.merging.kinds import Site
from orthomerge.merging.methods import METHODS, make_method

Deltas = dict[str, torch.Tensor]
Options = Mapping[str, Any]


@cache
def peft() -> ModuleType:
    """The module peft.utils.merge_utils alone: importing all of PEFT takes ten seconds."""
    package = importlib.util.find_spec("peft")
    assert package is not None
    assert package.origin is not None
    spec = importlib.util.spec_from_file_location(
        "peft_merge_utils", f"{Path(package.origin).parent}/utils/merge_utils.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def masks(key: str, deltas: torch.Tensor, keep: float, seed: int) -> torch.Tensor:
    """The entries that DARE keeps of one tensor, [T, *shape]: the draws depend on names alone."""
    site = Site(key, tuple(deltas.shape[1:]), 0, tuple("abcdefgh"[: len(deltas)]))
    drawn = [keep_mask(site, task, prod(site.shape), keep=keep, seed=seed) for task in site.tasks]
    return torch.stack(drawn).reshape(deltas.shape)


def column(options: Options, deltas: torch.Tensor) -> torch.Tensor:
    """The weights, shaped to multiply `deltas`."""
    weights = torch.tensor(options["weights"] or (1.0,) * len(deltas))
    return weights.reshape(-1, *(1,) * (deltas.ndim - 1))


def flat(rows: torch.Tensor) -> torch.Tensor:
    """[T, *shape] as [T, n], for scalars and empty tensors too."""
    return rows.reshape(len(rows), rows[0].numel())


def flattened(reference: Callable[[torch.Tensor, Options], torch.Tensor], deltas: Deltas, options: Options) -> Deltas:
    """A reference for whole vectors [T, n], applied to all tensors at once."""
    result = reference(torch.cat([flat(rows) for rows in deltas.values()], dim=1), options)
    parts = torch.split(result, [rows[0].numel() for rows in deltas.values()])
    return {key: part.reshape(deltas[key].shape[1:]) for key, part in zip(deltas, parts, strict=True)}


def kept(rows: torch.Tensor, density: float) -> torch.Tensor:
    """The entries as large as the int(density * n)-th largest of each row [T, n]."""
    count = int(density * rows.shape[1])
    if not count:
        return torch.zeros_like(rows)
    limits = rows.abs().sort(dim=1, descending=True).values[:, count - 1 : count]
    return torch.where(rows.abs() >= limits, rows, 0)


def agreeing(rows: torch.Tensor) -> torch.Tensor:
    return rows.sign() == torch.where(rows.sum(0) >= 0, 1, -1)


def paper_mean(rows: torch.Tensor, options: Options) -> torch.Tensor:
    trimmed = kept(rows, options["density"])
    agree = agreeing(trimmed)
    return (trimmed * agree).sum(0) / agree.sum(0).clamp(min=1)


def paper_sum(rows: torch.Tensor, options: Options) -> torch.Tensor:
    trimmed = kept(rows, options["density"])
    return (trimmed * agreeing(trimmed)).sum(0)


def ties_per_tensor(deltas: Deltas, options: Options) -> Deltas:
    return {
        key: paper_mean(flat(rows), options).reshape(rows.shape[1:]) if rows.numel() else rows[0]
        for key, rows in deltas.items()
    }


def ties_mergekit(deltas: Deltas, options: Options) -> Deltas:
    def one(deltas: torch.Tensor) -> torch.Tensor:
        rows = []
        for delta in deltas:
            mask = torch.zeros(delta.numel())
            mask[delta.abs().flatten().argsort(descending=True)[: max(1, int(options["density"] * len(mask)))]] = 1
            rows.append(delta * mask.reshape(delta.shape))
        weights = column(options, deltas)
        stacked = torch.stack(rows) * weights
        agree = agreeing(stacked)
        divisor = (weights * agree).sum(0) if options["normalize"] else torch.ones(())
        return (stacked * agree).sum(0) / torch.where(divisor == 0, 1, divisor)

    return {key: one(rows) if rows.numel() else rows[0] for key, rows in deltas.items()}


def ties_peft(deltas: Deltas, options: Options) -> Deltas:
    return {
        key: peft().ties(list(rows), column(options, rows).flatten(), options["density"])
        for key, rows in deltas.items()
    }


def ties_fusionbench(deltas: Deltas, options: Options) -> Deltas:
    def whole(rows: torch.Tensor, options: Options) -> torch.Tensor:
        d = rows.shape[1]
        limit = rows.abs().kthvalue(d - int(d * options["density"]), dim=1, keepdim=True).values
        trimmed = rows * (rows.abs() >= limit)
        sign = trimmed.sum(0).sign()
        sign[sign == 0] = sign.sum().sign()
        chosen = trimmed * torch.where(sign > 0, trimmed > 0, trimmed < 0)
        if options["merge"] == "sum":
            return chosen.sum(0)
        if options["merge"] == "mean":
            return chosen.sum(0) / (chosen != 0).sum(0).clamp(min=1)
        return chosen.abs().max(0).values * sign

    return flattened(whole, deltas, options)


def dare(deltas: Deltas, options: Options) -> Deltas:
    keep = 1 - options["drop"]
    return {key: (rows * masks(key, rows, keep, options["seed"]) / keep).sum(0) for key, rows in deltas.items()}


def dare_ties(deltas: Deltas, options: Options) -> Deltas:
    keep = 1 - options["drop"]
    enlarged = {key: rows * masks(key, rows, keep, options["seed"]) / keep for key, rows in deltas.items()}
    return flattened(paper_sum, enlarged, options)


def restored(key: str, deltas: torch.Tensor, options: Options) -> torch.Tensor:
    """mergekit's dropped tensor [T, *shape] with its L1 norms restored, and weighted."""
    rows = []
    for delta, mask in zip(deltas, masks(key, deltas, options["density"], options["seed"]), strict=True):
        masked = delta * mask
        before, after = delta.abs().sum(), masked.abs().sum()
        rescaled = options["density"] < 1 and options["rescale"] and before >= 1e-7 and after >= 1e-7
        rows.append(masked * (before / after) if rescaled else masked)
    return torch.stack(rows) * column(options, deltas)


def dare_mergekit(deltas: Deltas, options: Options, *, elect: bool = False) -> Deltas:
    result = {}
    for key, tensor in deltas.items():
        rows = restored(key, tensor, options)
        agree = agreeing(rows) if elect else torch.ones_like(rows)
        divisor = (column(options, tensor) * agree).sum(0) if options["normalize"] else torch.ones(())
        result[key] = (rows * agree).sum(0) / torch.where(divisor.abs() < 1e-8, 1, divisor)
    return result


def peft_with_our_draws(name: str) -> Callable[[Deltas, Options], Deltas]:
    def reference(deltas: Deltas, options: Options) -> Deltas:
        result = {}
        for key, rows in deltas.items():
            drawn = iter(masks(key, rows, options["density"], options["seed"]).float())
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "bernoulli", lambda _, drawn=drawn: next(drawn))
                result[key] = getattr(peft(), name)(list(rows), column(options, rows).flatten(), options["density"])
        return result

    return reference


MERGEKIT: dict[str, list[Any]] = {
    "weights": [None, (0.5, 0.2, 0.3), (1.0, -0.25, -0.75)],
    "normalize": [True, False],
    "rescale": [True, False],
    "density": [0.2, 0.7, 1.0],
    "scale": [0.7],
    "seed": [5],
}
PEFT: dict[str, list[Any]] = {"weights": [None, (0.5, 0.2, 0.3), (1.0, -0.5, 2.0)]}
# Entry, reference implementation, values of options to combine.
TABLE: list[tuple[str, Callable[..., Deltas], dict[str, list[Any]]]] = [
    ("ties", partial(flattened, paper_mean), {"density": [0.1, 0.2, 0.77], "scale": [1.0]}),
    ("ties_sum", partial(flattened, paper_sum), {"density": [0.2, 0.77], "scale": [0.3]}),
    ("ties_per_tensor", ties_per_tensor, {"density": [0.01, 0.2, 0.77], "scale": [0.7]}),
    (
        "ties@mergekit",
        ties_mergekit,
        {**PEFT, "density": [0.001, 0.2, 0.5, 1.0], "normalize": [True, False], "scale": [0.7]},
    ),
    ("ties@peft", ties_peft, {**PEFT, "density": [0.01, 0.2, 0.5, 0.99]}),
    ("ties@fusionbench", ties_fusionbench, {"density": [0.2, 0.9], "merge": ["sum", "mean", "max"], "scale": [0.3]}),
    ("dare", dare, {"drop": [0.0, 0.5, 0.9], "scale": [0.3], "seed": [3]}),
    ("dare_ties", dare_ties, {"drop": [0.0, 0.5, 0.9], "density": [0.2, 0.6, 1.0], "scale": [0.5], "seed": [3]}),
    ("dare@mergekit", dare_mergekit, MERGEKIT),
    ("dare_ties@mergekit", partial(dare_mergekit, elect=True), MERGEKIT),
    ("dare@peft", peft_with_our_draws("dare_linear"), {**PEFT, "density": [0.3, 0.9], "seed": [7]}),
    ("dare_ties@peft", peft_with_our_draws("dare_ties"), {**PEFT, "density": [0.3, 0.9], "seed": [7]}),
]
# Compared on deltas of few values too, where magnitudes equal the threshold: mergekit and PEFT leave those to a sort.
EQUAL_MAGNITUDES = ("ties", "ties_sum", "ties_per_tensor", "ties@fusionbench")


def cases() -> Iterator[Any]:
    for name, reference, values in TABLE:
        for chosen in product(*values.values()):
            options = dict(zip(values, chosen, strict=True))
            for coarse in (False, True) if name in EQUAL_MAGNITUDES else (False,):
                yield pytest.param(name, reference, options, coarse, id=f"{name}-{chosen}-{coarse}")


@pytest.mark.parametrize(("name", "reference", "options", "coarse"), list(cases()))
def test_against_references(name: str, reference: Callable[..., Deltas], options: dict[str, Any], coarse: bool) -> None:
    vectors = random_vectors(coarse=coarse)
    scale = options.get("scale", 1.0)
    expected = reference(stacked(vectors), options)
    given = {option: value for option, value in options.items() if value is not None}
    result = merged(make_method(name, given, tasks=vectors.tasks), vectors)
    for key, delta in result.items():
        torch.testing.assert_close(delta, scale * expected[key], rtol=2e-6, atol=1e-8)


def test_every_variant_has_a_reference() -> None:
    assert {name for name, _, _ in TABLE} == {name for name in METHODS if name.startswith(("ties", "dare"))}
