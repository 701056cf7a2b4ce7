from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orthomerge as om
from orthomerge.cli.flags import Input, Output, Parts, command
from orthomerge.cli.printing import verdict_lines
from orthomerge.core.errors import OrthomergeError
from orthomerge.core.progress import Progress

if TYPE_CHECKING:
    from orthomerge.runs.run import Ran
    from orthomerge.runs.sweep import Swept

_SHOWN = 10  # reasons of failures that are printed


@command("run recipe.yaml --out run", "run sweep.yaml --on process:2", "run sweep.yaml --list")
def run(
    *,
    recipe: Annotated[str, Input("A recipe with a section `evaluate`.", "RECIPE.yaml", positional=True)],
    on: Annotated[
        str | None,
        Input("Engine: process:N, ray, ray:N or module:function (an Executor).", "WHERE", default="this process"),
    ] = None,
    listed: Annotated[bool, Input("Print the cells of a sweep; run nothing.", name="--list")] = False,
    out: Annotated[str | None, Output("Run folder to write.", "FOLDER", short="-o", default="runs/RECIPE")] = None,
    force: Annotated[bool, Output("Compute everything again, and replace an earlier output.")] = False,
    progress: Progress,
) -> Parts:
    """Carry out a recipe: merge, align, evaluate, report.

    With a section `sweep`, many merges are made and scored. Finished results are kept, so that the same command
    continues after an interruption.
    """
    from orthomerge.runs.variants import check_sweep

    if listed:
        cells = [(cell.title, cell.seed) for cell in check_sweep(om.read_recipe(Path(recipe)))[0]]
        yield [{"cell": title, "seed": seed} for title, seed in cells]
        yield "\n".join((*(f"{title}, seed {seed}" for title, seed in cells), f"{len(cells)} cells"))
        return
    words = [word for flag, value in (("--out", out), ("--on", on)) if value is not None for word in (flag, value)]
    ran = om.run(
        recipe, out=out, on=on, force=force, watch=progress, command=shlex.join(["orthomerge", "run", recipe, *words])
    )
    yield ran.as_dict()
    yield from _results(ran)
    if ran.swept is not None and ran.swept.failures:
        raise OrthomergeError(_failures(ran.folder, ran.swept))


def _results(ran: Ran) -> Parts:
    """Yield tables and verdict, if there are any, then the paths of results."""
    from orthomerge.analysis.diagnosis import FILE, read_diagnosis
    from orthomerge.evaluation.records import read_records
    from orthomerge.evaluation.tables import accuracy_tables
    from orthomerge.runs.choosing import best_table

    if ran.swept is not None:
        yield best_table(ran.swept.best, ran.swept.references)
        yield f"\n{ran.swept.cells} cells; {ran.swept.done} models scored, {ran.swept.found} already done"
        yield f"all cells: {ran.folder / 'sweep.csv'}"
    if "evaluate" in ran.stages:
        yield from accuracy_tables(read_records(ran.folder / "records.jsonl"))
        yield ""
    if "diagnose" in ran.stages:
        yield from verdict_lines(read_diagnosis(ran.folder / FILE))
    done = [name for name, state in ran.stages.items() if state == "done"]
    kept = [name for name, state in ran.stages.items() if state == "found"]
    if not done:
        yield "nothing to do: everything is done, and its inputs have not changed (--force repeats it)"
    elif ran.swept is None:
        seconds = sum(ran.seconds[name] for name in done)
        tail = f"; already done: {', '.join(kept)}" if kept else ""
        yield f"done in {seconds:.1f} s: {', '.join(done)}{tail}"
    if ran.out is not None:
        yield f"model: {ran.out}"
    if ran.page is not None:
        yield f"report: {ran.page}"


def _failures(folder: Path, swept: Swept) -> str:
    from orthomerge.runs.choosing import failure_lines

    reasons = failure_lines(swept.failures)
    lines = [f"  {reason}" for reason in reasons[:_SHOWN]]
    if len(reasons) > _SHOWN:
        lines.append(f"  and {len(reasons) - _SHOWN} other reasons: {folder / 'sweep.md'}")
    count = len({(failure.name, failure.way) for failure in swept.failures})
    return "\n".join((f"{count} cells failed, the others are done:", *lines))
