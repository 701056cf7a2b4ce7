"""What tests of alignment share: tables of words for the tiny BERT experts, and their merge."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

HEADS = {"two": 2, "three": 3, "five": 5}
COUNTS = {"train": 60, "val": 20, "test": 30}
WORDS = ("a", "good", "bad", "film", "very", "not", "it", "was")


def write_tables(folder: Path) -> Path:
    """TASK.csv for every expert: random words, labels that mean nothing."""
    random = np.random.default_rng(0)
    for name, classes in HEADS.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label", "split"))
            for split, count in COUNTS.items():
                for number in range(count):
                    text = " ".join(random.choice(WORDS, random.integers(2, 9)))
                    writer.writerow((text, f"{name}-{number % classes}", split))
    return folder


def merge_berts(berts: Path, out: Path, names: tuple[str, ...] = tuple(HEADS), **more: Any) -> Path:
    """The merge of the tiny experts."""
    options: dict[str, Any] = {"method": "task_arithmetic", "parameters": {"scale": 0.5}, **more}
    experts: Any = {name: str(berts / name) for name in names}
    return write(Recipe(experts=experts, base=str(berts / "base"), **options), out=out).out


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
