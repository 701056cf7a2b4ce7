"""The merge from its shards: the very same files by hard links, then heads, config, card and manifest."""

from __future__ import annotations

import json
from pathlib import Path

from orthomerge.checkpoints.shards import Written, plan_shards, write_index
from orthomerge.output import companions, complete_output, link_files
from orthomerge.pipeline import heads_of
from orthomerge.recipe import parse_size
from orthomerge.running.jobs.context import MODEL, Context
from orthomerge.running.jobs.kinds.merge_shard import ABOUT
from orthomerge.strict import build

__all__ = ["assemble"]


def assemble(context: Context, folder: Path) -> None:
    """Fill a folder as a merge in one go does, byte for byte."""
    job, model = context.merge_job(), folder / MODEL
    encoder = model / "encoder"
    encoder.mkdir(parents=True)
    written = []
    for place in context.needed("merge-shard"):
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        written.append(build(Written, about, where=str(place / ABOUT)))
        link_files(place, encoder, [written[-1].name])
    write_index(encoder, plan_shards(job.specs, parse_size(job.recipe.max_shard_size)))
    beside = companions(*(source.path for source in job.sources.values()))
    complete_output(job, heads_of(job), model, written, beside=beside, digest=context.plan.digest)
