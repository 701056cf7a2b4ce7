"""Looking at the merge of a run: what it lost against its experts, and what an aligner wins back.

Where the recipe aligns, it is the merge before that which is looked at: the diagnosis says what aligning is worth.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from orthomerge.analysis.diagnosis import FILE, write_diagnosis
from orthomerge.blocks import Diagnose
from orthomerge.diagnosing import Looks, diagnose
from orthomerge.errors import RecipeError
from orthomerge.evaluation.scale import search_scale
from orthomerge.evaluation.subjects import output_subject
from orthomerge.recipe import Recipe
from orthomerge.records import read_records
from orthomerge.running.digests import Digests, digest_of
from orthomerge.running.evaluation import RECORDS, bench_of, evaluate_key
from orthomerge.running.models import Places

__all__ = ["diagnose_key", "diagnose_model", "looks_of"]

_GRID = [step / 10 for step in range(1, 11)]


def looks_of(recipe: Recipe) -> Looks:
    """How closely to look, by the block `diagnose`."""
    given = _block(recipe)
    if given.scales and recipe.base is None:
        raise RecipeError("'scales' merges anew, which needs a base; give 'base', or leave 'scales' out")
    return Looks(
        aligner=given.aligner or ("auto" if recipe.align is None else recipe.align.aligner),
        points=given.points,
        layers=given.layers,
        maps=given.maps,
        probe=given.probe,
        limit=given.limit,
        seed=recipe.seed % 2**32,
    )


def diagnose_key(recipe: Recipe, places: Places, run: Path, digests: Digests) -> str:
    """What the diagnosis depends on: what the records depend on, themselves, and how closely to look."""
    looks = [asdict(looks_of(recipe)), _block(recipe).scales]
    return digest_of([evaluate_key(recipe, places, digests), digests.file(run / RECORDS), looks])


def diagnose_model(
    recipe: Recipe, places: Places, run: Path, *, say: Callable[[str], None] = lambda text: None
) -> list[Path]:
    """Look, and write the diagnosis; what was written."""
    bench, search = bench_of(recipe, places, say=say), None
    if _block(recipe).scales:
        plain = replace(recipe.merging, method="task_arithmetic", parameters={}, vector=None, align=None, fit=None)
        search = search_scale(plain, bench, grid=_GRID, say=say)
    found = diagnose(
        bench,
        output_subject(places.merged, bench.tasks),
        base=places.base,
        records=read_records(run / RECORDS),
        looks=looks_of(recipe),
        search=search,
        commands=_commands(recipe, places),
        say=say,
    )
    write_diagnosis(run / FILE, found)
    return [run / FILE]


def _block(recipe: Recipe) -> Diagnose:
    return recipe.diagnose if isinstance(recipe.diagnose, Diagnose) else Diagnose()


def _commands(recipe: Recipe, places: Places) -> dict[str, str]:
    """What the verdict may advise, as command lines; none where an expert or its data has no path of its own."""
    data = recipe.evaluate.data if recipe.evaluate is not None else {}
    if not all(isinstance(source, str) for source in data.values()):
        return {}
    told = [f"--data {shlex.quote(f'{task}={source}')}" for task, source in data.items()]
    told += [f"--expert {shlex.quote(f'{task}={recipe.tasks[task].path}')}" for task in data]
    where, arguments = shlex.quote(str(places.merged)), " ".join(told)
    base = [] if recipe.base is None else [f"--base {shlex.quote(recipe.base)}"]
    commands = {
        "align": f"orthomerge align {where} {' '.join((*base, arguments))} --out {where}-aligned",
        "probe": f"orthomerge evaluate {where} {arguments} --protocol current --protocol probe",
    }
    if base:
        commands["refit"] = f"orthomerge merge --method realign {base[0]} {arguments} --out {where}-realigned"
    return commands
