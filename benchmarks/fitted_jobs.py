"""What `fitted.py` runs: one job a row of its tables and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from orthomerge.data.task import Split

STARTS = ("average", "task_arithmetic", "ties")
SPLITS: dict[str, Split] = {"inductive": "train", "transductive": "test"}
SCALES = "scales"  # the part in which a scale is chosen for MOMA
PARTS = ("inductive", "transductive", "few", "ablation", "masking", "efficiency", "variants")


@dataclass(frozen=True)
class Job:
    """One row and seed. `what`: alone, an aligner, or a fitted method; `shots`: inputs a class, or a share, or all."""

    part: str
    row: str
    what: str
    access: str = "inductive"
    start: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shots: float | None = None
    seed: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def jobs_of(
    parts: Sequence[str],
    seeds: int,
    steps: int | None,
    *,
    analyses: int | None = None,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
) -> list[Job]:
    """All jobs of some parts, one with each seed; `steps`: of every loop; `analyses`: their number of seeds.

    `only`: these methods, all if there are none; `without`: methods that are left out.
    """
    quick = {} if steps is None else {"steps": steps}
    wanted: list[Job] = []
    for part in parts:
        wanted += _main(part) if part in SPLITS else {"few": _few, "variants": _variants, **_ANALYSES}[part]()
    found = {}
    for job in wanted:
        if job.what in without or (only and job.what not in only):
            continue
        options = {**_SHORTER.get(job.what, {}), **(quick if job.what in _LOOPS else {}), **job.options}
        once = job.part == "masking" or (job.what in ("alone", "align:auto") and job.shots is None)
        own = seeds if analyses is None or job.part not in _ANALYSES else analyses
        for seed in range(1 if once else own):
            made = replace(job, options=options, seed=seed)
            found[made.key] = made
    return list(found.values())


_LOOPS = ("concrete_am", "concrete_ta", "adamerging", "moma", "realign")
_SHORTER: dict[str, dict[str, Any]] = {  # than published, for there are many rows
    "concrete_ta": {"steps": 500},
    "concrete_am": {"steps": 250},
    "fisher": {"inputs": 64},
}


def _main(access: str) -> list[Job]:
    """Tables 2 and 3 of the paper; the long ones first."""
    found = [
        Job(access, f"{start} w/ {title}", what, access=access, start=start)
        for start in STARTS
        for what, title in (("realign", "realign"), ("moma", "MOMA"))
    ]
    others: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("Concrete AdaMerging", "concrete_am", {}),
        ("Concrete TA", "concrete_ta", {}),
        ("Fisher", "fisher", {}),
        ("AdaMerging TW", "adamerging", {"by": "task"}),
        ("AdaMerging LW", "adamerging", {}),
        ("AdaMerging++ LW", "adamerging", {"vectors": "ties"}),
        ("RegMean", "regmean", {}),
        ("RegMean++", "regmean_pp", {}),
        ("LM-Cocktail", "lm_cocktail", {}),
        ("Model Tailor", "model_tailor", {"scale": 0.3}),
    )
    found += [Job(access, row, what, access=access, options=options) for row, what, options in others]
    for start in STARTS:
        found.append(Job(access, start, "alone", access=access, start=start))
        for aligner, title in (("surgery", "Surgery"), ("probsurgery", "ProbSurgery"), ("auto", "heads by auto")):
            found.append(Job(access, f"{start} w/ {title}", f"align:{aligner}", access=access, start=start))
    return found


def _few() -> list[Job]:
    ways = {
        "realign": "realign",
        "MOMA": "moma",
        "heads by auto": "align:auto",
        "Surgery": "align:surgery",
        "aligned-c": "align:aligned-c",
    }
    start, found = "task_arithmetic", []
    for shots in (20.0, 5.0, 1.0):
        found += [Job("few", f"{start} w/ {title}", what, start=start, shots=shots) for title, what in ways.items()]
        found += [Job("few", "AdaMerging LW", "adamerging", shots=shots), Job("few", "RegMean", "regmean", shots=shots)]
    return found


def _variants() -> list[Job]:
    """Of `realign`; more rows of the table with few inputs."""
    start = "task_arithmetic"
    variants: dict[str, dict[str, Any]] = {
        "no mixtures": {"copies": 0},
        "mask": {"gates": "mask"},
    }
    return [
        Job("few", f"{start} w/ realign: {title}", "realign", start=start, options=options, shots=20.0)
        for title, options in variants.items()
    ]


_PRINTED = 3  # rows of the ablation that the paper has


def _ablation() -> list[Job]:
    ours = {
        "realign: free": {"gates": "free"},
        "realign: mask": {"gates": "mask"},
        "realign: free, the experts' heads": {"read_by": "expert"},
    }
    theirs: dict[str, dict[str, Any]] = {
        "orthogonal": {"mask": "none"},
        "mask": {"transform": "none"},
        "orthogonal + mask (MOMA)": {},
        "similarity + mask": {"transform": "similarity"},
        "linear": {"mask": "none", "transform": "linear"},
        "linear + mask": {"transform": "linear"},
        "orthogonal + mask, not projected": {"project": False},
        "orthogonal + hard mask": {"mask": "hard"},
        "orthogonal + mask, cap 4": {"cap": 4.0},
    }
    found = [Job("ablation", row, "realign", start="task_arithmetic", options=dict(each)) for row, each in ours.items()]
    return found + [
        Job("ablation", row, "moma", access=access, start="task_arithmetic", options=dict(each))
        for number, (row, each) in enumerate(theirs.items())
        for access in (SPLITS if number < _PRINTED else ["inductive"])
    ]


def _masking() -> list[Job]:
    return [
        Job("masking", f"{decay:g}", "moma", start="task_arithmetic", options={"decay": decay})
        for decay in (0.0, 5e-9, 5e-8, 1e-7, 3e-7, 1e-6, 3e-6)
    ]


def _efficiency() -> list[Job]:
    return [
        Job("efficiency", what, what, access=access, start="task_arithmetic", shots=shots)
        for shots in (0.5, 0.1)
        for access in SPLITS
        for what in ("realign", "moma")
    ]


_ANALYSES = {"ablation": _ablation, "masking": _masking, "efficiency": _efficiency}

METHODS = tuple(dict.fromkeys(job.what for job in jobs_of(PARTS, 1, None)))
