"""What one process and two are to agree on: each scene is a function of the group, and gives tensors by name.

As a script, under torchrun: all scenes one after the other, and what the first process gets in a file.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tests.fitting.making import CLASSES, POOLINGS, Words, make_encoder, make_setting, make_tasks
from torch import nn

from orthomerge.alignment.streaming import stream_sums
from orthomerge.distributed.group import Group, current_group
from orthomerge.distributed.launch import launch
from orthomerge.errors import NumericalError
from orthomerge.features.extract import extract
from orthomerge.fitting.adamerging import AdaMerging
from orthomerge.fitting.concrete_am import ConcreteAm
from orthomerge.fitting.distance import FeatureDistance
from orthomerge.fitting.drawing import heads_on_device
from orthomerge.fitting.fisher import fisher_of
from orthomerge.fitting.grams import grams
from orthomerge.fitting.inputs import encoded
from orthomerge.fitting.kinds import FittedMethod, Setting
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.fitting.lm_cocktail import LmCocktail
from orthomerge.fitting.mask import Mask
from orthomerge.fitting.moma import Moma
from orthomerge.fitting.passes import Passes
from orthomerge.fitting.realign import Realign
from orthomerge.fitting.sharded import ShardedEncoder
from orthomerge.merged import Merged
from orthomerge.models.families import family

Found = dict[str, Any]

BERT = family("bert")


def sharded_setting(group: Group, kind: Any = "bert", inputs: int = 32) -> Setting:
    """Of one process, as it always is; of several, with an encoder that each has a part of."""
    setting = make_setting(kind, inputs)
    if not group.several:
        return setting
    encoder = ShardedEncoder(
        _fresh(kind), partial(family(kind).features, pooling=POOLINGS[kind]), torch.device("cpu"), group
    )
    return replace(
        setting,
        encoder=encoder,
        base=encoder.cut(setting.base),
        tuned=lambda task: encoder.cut(setting.tuned(task)),
        merged=lambda method, options: encoder.cut(setting.merged(method, options)),
        group=group,
    )


def _fresh(kind: Any = "bert", layers: int = 2) -> nn.Module:
    module = make_encoder(kind, layers=layers).module
    for parameter in module.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None
    return module


def _fitted(method: FittedMethod, setting: Setting) -> Found:
    made = method.fit(setting)
    weights = made.weights
    if isinstance(setting.encoder, ShardedEncoder):
        setting.encoder.load(made.weights)
        weights = setting.encoder.whole()
    heads = [tensor for head in made.classifiers.values() for tensor in head.tensors().values()]  # type: ignore[attr-defined]
    rows = [{name: value for name, value in row.items() if name != "seconds"} for row in made.curve]
    return {"weights": weights, "heads": heads, "curve": rows, "facts": dict(made.facts)}


def _whole(method: FittedMethod, *, kind: Any = "bert", inputs: int = 32) -> Callable[[Group], Found]:
    return lambda group: _fitted(method, replace(make_setting(kind, inputs), group=group))


def _sharded(method: FittedMethod, *, kind: Any = "bert") -> Callable[[Group], Found]:
    return lambda group: _fitted(method, sharded_setting(group, kind))


def statistics(group: Group) -> Found:
    """Second moments that RegMean solves with, and Fisher information; more processes than batches, too."""
    setting = replace(make_setting(inputs=150), group=group)
    few = setting.inputs.only({task: rows[:40] for task, rows in setting.inputs.rows.items()})
    setting.encoder.load(setting.tuned("five"))
    found = {f"three batches, {name}": gram for name, gram in grams(setting, setting.inputs, "five").items()}
    found |= {f"one batch, {name}": gram for name, gram in grams(setting, few, "five").items()}
    head = heads_on_device(setting)["five"]
    some = setting.inputs.only({task: rows[:7] for task, rows in setting.inputs.rows.items()})
    return {"grams": found, "fisher": fisher_of(setting, some, "five", setting.tuned("five"), head, samples=2)}


def encoded_by_all(group: Group) -> Found:
    """Features inside a fit, in batches of 8 and in one."""
    setting = replace(make_setting(inputs=37), group=group)
    return {
        "small": encoded(setting.encoder, setting.inputs, "two", size=8, group=group),
        "one": encoded(setting.encoder, setting.inputs, "two", group=group),
    }


def features(group: Group) -> Found:
    """Extraction, for which the first process calls the others; texts of many lengths, and one more task after it."""
    encoder, found = _fresh(), {}
    for task, inputs in make_tasks("bert", 43, 0).items():
        made = extract(encoder, BERT, "mean", inputs["train"], Words(), task=task, batch=8, device="cpu")
        found[task] = made.values
    with torch.no_grad():
        next(encoder.parameters()).mul_(1.5)
    again = make_tasks("bert", 3, 1)["two"]["train"]
    found["changed"] = extract(encoder, BERT, "mean", again, Words(), task="two", batch=8, device="cpu").values
    return found


def sums(group: Group) -> Found:
    """What closed forms are solved from, added up without any features being kept."""
    setting, models = make_setting(inputs=43), []
    for task in (None, "five"):
        encoder = _fresh()
        flat = setting.base if task is None else setting.tuned(task)
        encoder.load_state_dict(dict(setting.layout.views(flat)), strict=False)
        models.append(Merged(encoder, setting.heads, BERT, "mean"))
    examples = make_tasks("bert", 43, 0)["five"]["train"]
    merged, expert = models
    head = setting.heads["five"]
    found = stream_sums(merged, expert, examples, Words(), head, task="five", batch=8, device="cpu")
    parts = [tensor for part in found.parts for tensor in (part.sum_h, part.sum_t, part.C, part.S, part.tt)]
    return {"counts": [part.n for part in found.parts], "parts": parts}


def held(group: Group) -> Found:
    """Bytes that a mask, its moments and the encoder take in one process, after a step."""
    gc.collect()
    before = _storages()
    encoder: FlatEncoder | ShardedEncoder
    pool = partial(BERT.features, pooling="mean")
    if group.several:
        encoder = ShardedEncoder(_fresh(layers=6), pool, torch.device("cpu"), group)
    else:
        encoder = FlatEncoder(_fresh(layers=6), pool, torch.device("cpu"))
    base = encoder.weights.clone()
    mask = Mask(base, torch.full_like(base, 0.01), shards=encoder.shards)
    setting = make_setting()
    torch.autograd.backward(encoder.features(setting.inputs.batch(torch.arange(4))).square().sum())
    encoder.collect(Group())
    mask.step(encoder.gradient, encoder.weights, 1.0)
    del setting
    gc.collect()
    after = _storages()
    return {"bytes": sum(size for place, size in after.items() if place not in before), "elements": mask.size}


def _storages() -> dict[int, int]:
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # and not `isinstance`, of which some things of torch warn
        if issubclass(kind, torch.Tensor) and kind.__name__ != "DTensor":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            if isinstance(thing.grad, torch.Tensor) and type(thing.grad).__name__ != "DTensor":
                found[thing.grad.untyped_storage().data_ptr()] = thing.grad.untyped_storage().nbytes()
    return found


def talk(group: Group) -> Found:
    """What processes can say to each other; numbers that differ are found out."""
    tied = nn.Linear(3, 3)
    module = nn.Sequential(tied, nn.Linear(3, 3, bias=False))
    module[1].weight = tied.weight
    torch.manual_seed(group.rank)
    told: Any = group.broadcast({"module": module.requires_grad_(False), "rank": 0} if group.rank == 0 else None)
    there = told["module"]
    gathered = group.gather(torch.full((2 * group.rank, 3), float(group.rank)))
    group.agree(torch.ones(3), "ones")
    refused = False
    try:
        group.agree(torch.full((3,), float(group.rank)), "ranks")
    except NumericalError:
        refused = True
    return {
        "tied": there[0].weight is there[1].weight and isinstance(there[0].weight, nn.Parameter),
        "rows": [len(part) for part in gathered],
        "mine": group.mine(range(5)),
        "refused": group.exchange((group.rank, refused, told["rank"])),
        "sum": group.sum_(torch.tensor([1.0 + group.rank], dtype=torch.float64)),
    }


def passed(group: Group) -> Found:
    """The gradient of one batch of 5, and of one that not every process has an input of."""
    found: Found = {}
    for count in (5, 1):
        setting = replace(make_setting(), group=group)
        norms: dict[str, Any] = {"transform": "orthogonal", "norm": "l2", "penalty": "fro", "alpha": 1.0, "lr": 1e-3}
        objective = FeatureDistance(setting.heads, setting.inputs, **norms)
        with torch.no_grad():
            objective.A[1, 0, 1] = 0.5  # so that the penalty has a gradient
        rows = torch.stack([setting.inputs.rows[task][:count] for task in CLASSES])
        loss = Passes(setting, objective, setting.inputs)(rows)
        found[f"{count}, loss"], found[f"{count}, weights"] = loss, setting.encoder.gradient.clone()
        found[f"{count}, maps"] = objective.A.grad
    return found


STEPS: dict[str, Any] = {"steps": 6, "look": 2}
# Those that the first process starts by itself, and those that all are called to.
DRIVEN: dict[str, Callable[[Group], Found]] = {"features": features, "sums": sums}
SCENES: dict[str, Callable[[Group], Found]] = {
    "talk": talk,
    "statistics": statistics,
    "encoded": encoded_by_all,
    "passed": passed,
    "moma": _whole(Moma(**STEPS, batch=5)),
    "moma, pictures": _whole(Moma(**STEPS, batch=5, transform="similarity"), kind="vit"),
    "moma, one input": _whole(Moma(**STEPS, batch=1)),
    "realign": _whole(Realign(**STEPS, batch=5, copies=50, head_lr=1e-3), inputs=110),
    "realign, rows": _whole(Realign(**STEPS, batch=5, copies=0, gates="row")),
    "adamerging": _whole(AdaMerging(**STEPS, batch=3, hold_out=0.2)),
    "concrete_am": _whole(ConcreteAm(steps=2, adapt_steps=2, batch=3)),
    "lm_cocktail": _whole(LmCocktail(inputs=9)),
    "sharded moma": _sharded(Moma(**STEPS, batch=5)),
    "sharded moma, pictures": _sharded(Moma(**STEPS, batch=5, mask="hard"), kind="vit"),
    "sharded realign": _sharded(Realign(**STEPS, batch=5, copies=40, gates="mask")),
    "sharded realign, free": _sharded(Realign(**STEPS, batch=5, copies=0, gates="free")),
    "held": held,
}


def play(group: Group, name: str) -> Found:
    torch.set_num_threads(1)
    return SCENES[name](group)


def act() -> None:
    group = current_group()
    torch.set_num_threads(1)
    found = {name: scene(group) for name, scene in DRIVEN.items()}
    found |= {name: group.call(play, name, name) for name in SCENES}
    torch.save(found, sys.argv[1])


if __name__ == "__main__":
    launch(act)
