"""The kinds of jobs: by name, where the function is that fills a job's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from orthomerge.errors import CheckpointError, nearest
from orthomerge.running.jobs.context import Context

__all__ = ["KINDS", "Kind", "find_kind"]

Fill = Callable[[Context, Path], None]
_HERE = "orthomerge.running.jobs.kinds"


@dataclass(frozen=True)
class Kind:
    """`stage`: what of a run it is a part of; `computes`: whether torch works in it, with a fixed number of threads."""

    maker: str
    title: str
    stage: str
    computes: bool = True

    def load(self) -> Fill:
        module, _, name = self.maker.partition(":")
        return cast("Fill", getattr(import_module(module), name))


KINDS: dict[str, Kind] = {
    "survey": Kind(f"{_HERE}.survey:survey", "what a method must know of all tensors before it merges one", "merge"),
    "merge-shard": Kind(f"{_HERE}.merge_shard:merge_shard", "one file of the merged encoder", "merge"),
    "assemble": Kind(f"{_HERE}.assemble:assemble", "the merge, from its shards", "merge"),
    "merge": Kind(f"{_HERE}.whole:whole", "a merge that cannot be cut", "merge"),
    "fit": Kind(f"{_HERE}.whole:fit", "a merge that is fitted to inputs", "merge"),
    "expert": Kind(f"{_HERE}.references:expert", "an expert, read as the merge is", "references"),
    "base": Kind(f"{_HERE}.references:base", "the base under the experts' heads", "references"),
    "solve": Kind(f"{_HERE}.solve:solve", "the aligned head of a task", "align"),
    "align": Kind(f"{_HERE}.align:align", "the merge with its heads aligned", "align"),
    "evaluate": Kind(f"{_HERE}.evaluate:evaluate", "one model on one task with one seed", "evaluate"),
    "finish": Kind(f"{_HERE}.finish:finish", "models and records in their places, card, diagnosis, report", "report"),
    "sweep-base": Kind(f"{_HERE}.sweep_models:base", "the base under the experts' heads", "sweep"),
    "sweep-expert": Kind(f"{_HERE}.sweep_models:expert", "an expert, read as the merges are", "sweep"),
    "sweep-merge": Kind(f"{_HERE}.sweep_models:variant", "one merge of a sweep", "sweep"),
    "sweep-encode": Kind(f"{_HERE}.sweep_scores:encode", "features of a model on a task", "sweep"),
    "sweep-score": Kind(f"{_HERE}.sweep_scores:score", "a model on a task, read in one way", "sweep"),
    "sweep-joint": Kind(f"{_HERE}.sweep_scores:joint", "a model on all labels at once", "sweep"),
    "sweep-notes": Kind(f"{_HERE}.sweep_scores:notes", "what would make a reader doubt the numbers", "sweep"),
    "sweep-finish": Kind(f"{_HERE}.sweep_finish:finish", "records, tables and report of a sweep", "sweep"),
    "nothing": Kind(f"{_HERE}.nothing:nothing", "what a job costs that does nothing", "", computes=False),
}  # fmt: skip


def find_kind(name: str) -> Kind:
    """A row of the table; an unknown name is an error that offers the nearest."""
    if name not in KINDS:
        raise CheckpointError(f"the plan has a job of unknown kind {name!r}; {nearest(name, KINDS)}")
    return KINDS[name]
