"""The command `diagnose`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import click

from orthomerge.cli.flags import Flag, command
from orthomerge.cli.options import Columns, Compute, Display, Labelled, Limit, Moved, Suite, SuiteFolder
from orthomerge.cli.printing import print_json, print_progress
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis


@dataclass(frozen=True)
class Input:
    """A model and labelled data, or a suite."""

    model: Annotated[str | None, Flag("Folder of a merged model.", "MODEL", positional=True)] = None
    data: Labelled = field(default_factory=dict)
    suite: Suite = None
    folder: SuiteFolder = None
    method: Annotated[str, Flag("Merge of a suite, where no MODEL is given.", "NAME")] = "task_arithmetic"


@dataclass(frozen=True)
class How:
    """How closely to look."""

    aligner: Annotated[str, Flag("See `list aligners`.", "NAME")] = "auto"
    points: Annotated[int, Flag("Inputs per task for t-SNE; 0 for none.", "N")] = 400
    layers: Annotated[int, Flag("Inputs per task for CKA; 0 for none.", "N")] = 512
    limit: Limit = None
    scales: Annotated[bool, Flag("Also merge at scales from 0.1 to 1 (slow).")] = False
    seed: Annotated[int, Flag("Of all that is drawn.", "N")] = 0


@dataclass(frozen=True)
class Output:
    """What is written."""

    out: Annotated[str, Flag("Run folder: its records are used, diagnosis.json is written.", "FOLDER", short="-o")] = (
        "runs/evaluation"
    )


@command(
    usage=("diagnose MODEL --data FOLDER [OPTIONS]", "diagnose [MODEL] --suite SUITE [OPTIONS]"),
    examples=("diagnose merged --data texts --out run", "diagnose --suite digits --method ties --scales"),
)
def diagnose(
    given: Input, columns: Columns, how: How, output: Output, moved: Moved, compute: Compute, display: Display
) -> None:
    """Explain what a merge lost, and what to try next.

    How much is misalignment that new heads recover, how much is gone, and which experts conflict.
    """
    from orthomerge.analysis.detail import Detail
    from orthomerge.cli.progress import shown

    detail = Detail(aligner=how.aligner, points=how.points, layers=how.layers, limit=how.limit, seed=how.seed)
    given = replace(given, data=columns.of(given.data))
    with shown(quiet=display.silent) as progress:
        options: dict[str, Any] = {"detail": detail, "scales": how.scales, "out": output.out, "progress": progress}
        diagnosis = _diagnosis(given, how, moved, compute, options)
    if display.json:
        verdict = [vars(finding) for finding in diagnosis.verdict]
        print_json({"method": diagnosis.method, "verdict": verdict, "run": output.out})
        return
    print_verdict(diagnosis)
    click.echo(f"{len(diagnosis.figures)} figures and their numbers are in {output.out}/diagnosis.json")


def _diagnosis(given: Input, how: How, moved: Moved, compute: Compute, options: dict[str, Any]) -> Diagnosis:
    from orthomerge.api.diagnose import diagnose as compare
    from orthomerge.api.suite import diagnose_suite
    from orthomerge.models.encoding import Encoding

    if given.suite is not None:
        opened = {
            "folder": given.folder,
            "data": given.data or None,
            "device": compute.device,
            "say": print_progress,
        }
        return diagnose_suite(
            given.suite,
            given.model,
            method=given.method,
            aligner=how.aligner,
            batch=compute.batch,
            opened=opened,
            **options,
        )
    if given.model is None or not given.data:
        raise RecipeError("give a suite, or the folder of a merged model with --data TASK=PATH of each task")
    encoding = Encoding(device=compute.device, batch=compute.batch)
    return compare(given.model, given.data, experts=moved.expert, base=moved.base, encoding=encoding, **options)


def print_verdict(diagnosis: Diagnosis) -> None:
    """Every finding under its title."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    for finding in diagnosis.verdict:
        console.print(Text(finding.title, style="bold"))
        console.print(Padding(Text(finding.text), (0, 0, 1, 2)))
