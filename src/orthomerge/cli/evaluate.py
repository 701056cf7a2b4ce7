"""The command `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Columns, Compute, Display, Labelled, Moved, Suite, SuiteFolder
from orthomerge.cli.printing import print_json, print_progress, print_tables
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.evaluation.scores import Scores


@dataclass(frozen=True)
class Input:
    """Models and labelled data, or a suite."""

    models: Annotated[tuple[str, ...], Flag("Folders of merged models.", "MODEL...", positional=True)] = ()
    data: Labelled = field(default_factory=dict)
    suite: Suite = None
    folder: SuiteFolder = None
    method: Annotated[tuple[str, ...], Flag("Merge of a suite, as ties or 'ties: density: 0.3', repeated.", "NAME")] = (
        "average",
        "task_arithmetic",
        "ties",
    )


@dataclass(frozen=True)
class How:
    """Protocols, and what they may see."""

    protocol: Annotated[tuple[str, ...], Flag("See `list protocols`; repeated.", "NAME")] = (
        "current",
        "knn",
        "aligned-c",
    )
    aligner: Annotated[
        tuple[str, ...], Flag("Score with aligned heads too (`list aligners`), repeated.", "NAME", default="none")
    ] = ()
    shots: Annotated[tuple[str, ...], Flag("Inputs per class, a share such as 0.1, or all; repeated.", "N")] = ("all",)
    seeds: Annotated[int, Flag("Draws of few shots.", "N")] = 5
    access: Annotated[
        tuple[Literal["inductive", "transductive"], ...], Flag("Where these inputs come from; repeated.")
    ] = ("inductive",)
    references: Annotated[bool, Flag("Score the experts too.")] = True


@dataclass(frozen=True)
class Output:
    """Comparisons, and where everything is written."""

    out: Annotated[str, Flag("Run folder to write.", "FOLDER", short="-o")] = "runs/evaluation"
    against: Annotated[str | None, Flag("Compare every model with this one.", "NAME", default="the best")] = None
    margin: Annotated[float, Flag("Points below which two models may be called comparable.", "POINTS")] = 1.0


@command(
    usage=("evaluate MODEL... --data FOLDER [OPTIONS]", "evaluate --suite SUITE [OPTIONS]"),
    examples=(
        "evaluate merged aligned --data texts --out run",
        "evaluate merged --data topic=topic.csv --aligner ridge",
        "evaluate --suite digits --method 'ties: density: 0.3'",
    ),
)
def evaluate(
    given: Input, columns: Columns, how: How, output: Output, moved: Moved, compute: Compute, display: Display
) -> None:
    """Compare merged models with their experts.

    Every score says what it has seen: no data, inductive or transductive.
    """
    from orthomerge.api.evaluate import read_protocols
    from orthomerge.cli.progress import shown
    from orthomerge.evaluation.scores import check_run

    if not output.margin > 0:
        raise RecipeError(f"--margin must be a positive number of points, got {output.margin:g}")
    common: dict[str, Any] = {
        "protocols": read_protocols(how.protocol, how.aligner, shots=how.shots, seeds=how.seeds, access=how.access),
        "against": output.against,
        "margin": output.margin / 100,
    }
    check_run(Path(output.out))
    given = replace(given, data=columns.of(given.data))
    with shown(quiet=display.silent) as progress:
        if given.suite is None:
            scores = _own(given, how, moved, compute, progress=progress, **common)
        else:
            scores = _suite(given.suite, given, compute, progress=progress, **common)
        scores.write(output.out)
    if display.json:
        print_json(scores.as_dict())
        return
    print_tables(scores.tables())
    for note in scores.notes:
        click.echo(f"\nwarning: {note}")
    click.echo(f"\nrecords, predictions, comparisons and the tables are in {output.out}")


def _own(given: Input, how: How, moved: Moved, compute: Compute, **options: Any) -> Scores:
    """Scores of output folders on the user's data."""
    from orthomerge.api.evaluate import evaluate as score
    from orthomerge.models.encoding import Encoding

    if not given.models or not given.data:
        raise RecipeError("give a suite, or folders of merged models and --data TASK=PATH for each task")
    return score(
        given.models,
        given.data,
        experts=moved.expert,
        base=moved.base,
        references=("expert",) if how.references else (),
        encoding=Encoding(device=compute.device, batch=compute.batch),
        **options,
    )


def _suite(name: str, given: Input, compute: Compute, **options: Any) -> Scores:
    """Scores of merges of a suite's experts, beside its references."""
    from orthomerge.api.suite import evaluate_suite

    return evaluate_suite(
        name,
        given.method,
        batch=compute.batch,
        opened={
            "folder": given.folder,
            "data": given.data or None,
            "device": compute.device,
            "say": print_progress,
        },
        **options,
    )
