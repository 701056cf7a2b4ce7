"""The smallest BERT experts that every command takes, and the commands that crash points are looked for in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.berts import write_berts, write_tables

from orthomerge.runs.recipe import Recipe

TASKS = {"two": 2, "three": 3}


def write_experts(folder: Path, tasks: Mapping[str, int] = TASKS, *, width: int = 8, shard: str = "1GB") -> Path:
    """Write `base`, an expert per task, and TASK.csv with 16 inputs per split."""
    write_berts(folder, tasks, width=width, layers=1, vocabulary=max(width * width // 6, 16), shard=shard)
    return write_tables(folder, TASKS, {"train": 16, "test": 16})


def recipe_for(folder: Path, method: str = "average", **options: Any) -> Recipe:
    """Describe a merge of the experts of a folder."""
    return Recipe({task: str(folder / task) for task in TASKS}, base=str(folder / "base"), method=method, **options)


def data_words(folder: Path) -> list[str]:
    """Give the option `--data` for every task."""
    return [word for task in TASKS for word in ("--data", f"{task}={folder / task}.csv")]


def evaluation(folder: Path, merged: Path) -> list[str]:
    """Evaluate a merge by two protocols; without `--out`."""
    protocols = ["--protocol", "current", "--protocol", "knn"]
    return ["evaluate", str(merged), *data_words(folder), "--device", "cpu", *protocols]


def commands(folder: Path, merged: Path, *, seed: int = 0) -> dict[str, list[str]]:
    """A merge, an alignment and a fitted merge, without `--out`; those of another seed give other bytes."""
    places = [word for task in TASKS for word in ("--expert", f"{task}={folder / task}")]
    experts = [f"{task}={folder / task}" for task in TASKS]
    data = data_words(folder)
    base, quick = ["--base", str(folder / "base")], ["--device", "cpu", "--limit", "8", "--quiet"]
    steps = ["--set", "steps=2", "--set", "look=1", "--set", "batch=4"]
    plain = ["--method", "task_arithmetic", "--set", f"scale={0.5 + seed}", "--set", f"seed={seed}"]
    return {
        "merge": ["merge", *experts, *base, *plain, "--quiet", "--max-shard-size", "2KB"],
        "align": ["align", str(merged), *places, *data, "--aligner", "ridge", "--seed", str(seed), *quick],
        "fit": ["merge", *experts, *base, *data, "--method", "moma", *steps, "--set", f"seed={seed}", *quick],
    }
