"""One file of the merged encoder: only its own tensors are read, and its bytes are those of a merge in one go."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from orthomerge.checkpoints.publish import write_json
from orthomerge.checkpoints.shards import Written, plan_shards, shard_name, write_shard
from orthomerge.errors import OrthomergeError
from orthomerge.recipe import parse_size
from orthomerge.running.jobs.context import Context

if TYPE_CHECKING:
    from orthomerge.merging.kinds import SurveyMethod, TensorMethod
    from orthomerge.merging.vectors import TaskVectors
    from orthomerge.planning import Job as Merge

__all__ = ["ABOUT", "merge_shard"]

ABOUT = "shard.json"


def merge_shard(context: Context, folder: Path) -> None:
    """Merge shard `shard` of `shards`; what its file is, is told beside it."""
    from orthomerge.merging.stream import MEMORY, is_out_of_memory
    from orthomerge.merging.vectors import TILE
    from orthomerge.pipeline import SHARES, task_vectors

    job, number, count = context.merge_job(), int(context.job.spec["shard"]), int(context.job.spec["shards"])
    path, vectors = folder / shard_name(number, count), task_vectors(job)
    method = _method(context, job, vectors)
    for share in SHARES:
        tiles = replace(vectors, tile=max(TILE // share, 1))
        try:
            written = _write(job, tiles, method, path, number, memory=MEMORY // share)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            path.unlink(missing_ok=True)
        else:
            break
    else:
        raise OrthomergeError(
            f"there is not enough memory to merge {path.name}, even in blocks an eighth as large; close other "
            "programs, start fewer workers, or use a method that does not need whole matrices"
        )
    for source in job.sources.values():
        for file in source.files:
            file.check_unchanged()
    write_json(folder / ABOUT, asdict(written))


def _write(job: Merge, vectors: TaskVectors, method: TensorMethod, path: Path, number: int, *, memory: int) -> Written:
    from orthomerge.pipeline import encoder_blocks

    specs = plan_shards(job.specs, parse_size(job.recipe.max_shard_size))[number - 1]
    with closing(encoder_blocks(job, vectors, method, memory=memory, keys=specs)) as blocks:
        return write_shard(path, specs, blocks)


def _method(context: Context, job: Merge, vectors: TaskVectors) -> TensorMethod:
    for folder in context.needed("survey"):
        from orthomerge.pipeline import prepared
        from orthomerge.running.jobs.kinds.survey import read_survey

        return read_survey(folder, cast("SurveyMethod", job.method), lambda: prepared(job, vectors))
    return cast("TensorMethod", job.method)
