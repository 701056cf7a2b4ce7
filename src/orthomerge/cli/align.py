from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import orthomerge as om
from orthomerge.cli.flags import How, Input, Parts, command
from orthomerge.cli.options import Columns, Force, Limit, Out, Saved, SavedModel, Split, Unlabelled
from orthomerge.cli.printing import alignment_lines
from orthomerge.core.progress import Progress


@command("align merged --data texts --out aligned", "align merged --data topic=topic.csv --aligner ridge -o aligned")
def align(
    *,
    model: SavedModel,
    data: Unlabelled,
    split: Annotated[Split, Input("Split of the data; `test` makes later scores on it transductive.")] = "train",
    limit: Limit = None,
    columns: Columns,
    aligner: Annotated[str, How("Aligner (`list aligners`).", "NAME")] = "auto",
    settings: Annotated[
        Mapping[str, str] | None,
        How("Option of the aligner (`list aligners NAME`), repeated.", "KEY=VALUE", name="--set"),
    ] = None,
    seed: Annotated[int, How("Random seed of --limit and of random aligners.", "N")] = 0,
    out: Out,
    force: Force = False,
    saved: Saved,
    progress: Progress,
) -> Parts:
    """Fit the heads of a merged model to its encoder.

    Inputs need no labels: the targets are the outputs of the experts. The encoder does not change, and most aligners
    add no parameters.
    """
    from orthomerge.api.request import read_options
    from orthomerge.data.reading import sources_of
    from orthomerge.files.publish import check_target
    from orthomerge.models.writing import write_model
    from orthomerge.runs.models import existing

    how = {"options": read_options(settings), **saved.options()}
    sources = sources_of(columns.of(data), om.load(model).tasks)
    inputs = existing([model, *sources.values(), *(saved.expert or {}).values(), saved.base])
    check_target(Path(out), force=force, inputs=inputs)
    aligned = om.align(model, sources, aligner=aligner, split=split, limit=limit, seed=seed, progress=progress, **how)
    manifest = write_model(aligned, Path(out), force=force, inputs=inputs, progress=progress)
    yield {"out": out, "manifest": manifest}
    yield from alignment_lines(manifest)
    yield f"wrote {out}, verified"
