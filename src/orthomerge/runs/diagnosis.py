"""Looking at the merge of a run: what it lost against its experts, and what an aligner wins back.

If the recipe aligns heads, the merge before that is looked at: the diagnosis says what aligning is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from orthomerge.analysis.commands import suggested_commands
from orthomerge.api.diagnose import diagnose
from orthomerge.api.scale import search_scale
from orthomerge.core.progress import Progress
from orthomerge.evaluation.records import Record
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.runs.digests import digest_of
from orthomerge.runs.evaluation import section_of
from orthomerge.runs.looks_of import looks_of, wants_scales
from orthomerge.runs.recipe import Recipe

if TYPE_CHECKING:
    from orthomerge.analysis.diagnosis import Diagnosis


_GRID = [step / 10 for step in range(1, 11)]


def diagnose_key(recipe: Recipe, scored: str, records: str) -> str:
    """What the diagnosis depends on: what the records depend on, themselves, and how closely to look."""
    return digest_of([scored, records, [asdict(looks_of(recipe)), wants_scales(recipe)]])


def diagnose_model(
    recipe: Recipe, model: Model, experts: Experts, records: Sequence[Record], *, at: Path, progress: Progress
) -> Diagnosis:
    """Look at a model. `at`: where it lies, for the commands that the verdict suggests."""
    section, search = section_of(recipe), None
    encoding = Encoding(device=section.device, batch=section.batch)
    if wants_scales(recipe):
        search = search_scale(
            experts,
            "task_arithmetic",
            section.data,
            grid=_GRID,
            criterion="accuracy",
            seed=recipe.seed,
            encoding=encoding,
            progress=progress,
        )
    sources, commands = section.data, {}
    if all(isinstance(source, str) for source in sources.values()):
        commands = suggested_commands(str(at), sources, experts, aligner=looks_of(recipe).aligner)
    return diagnose(
        model,
        section.data,
        experts=experts,
        looks=looks_of(recipe),
        records=records,
        search=search,
        commands=commands,
        encoding=encoding,
        progress=progress,
    )
