"""Two experts that `finetune` makes in a moment, their merge, and their tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.calling import call

WORDS = {"mood": ("bad", "good"), "kind": ("film", "it", "not")}
COUNTS = {"train": 30, "val": 12, "test": 19}


@pytest.fixture(scope="session")
def word_tables(once: Callable[..., Path]) -> Path:
    """A folder with mood.csv and kind.csv: which word is in the text?"""
    return once("word-tables", write_word_tables)


@pytest.fixture(scope="session")
def tuned(once: Callable[..., Path], berts: Path, word_tables: Path) -> Path:
    """A folder with the experts `mood` and `kind` and their merge `merged`."""

    def make(folder: Path) -> None:
        for name, words in WORDS.items():
            result = call(
                "finetune", "--base", berts / "base", "--data", word_tables / f"{name}.csv", "--out", folder / name,
                "--set", "steps=2", "--set", "device=cpu", "--set", "lr=1e-3", "--json", "--quiet",
            )  # fmt: skip
            document = json.loads(result.stdout)
            assert document["out"] == str(folder / name)
            assert all(isinstance(value, int | float) for value in document["metrics"].values())
            labels = json.loads((folder / name / "config.json").read_text())["id2label"]
            assert list(labels.values()) == [f"{word}-label" for word in sorted(words)]
        experts = [folder / name for name in WORDS]
        scale = ("--method", "task_arithmetic", "--set", "scale=0.5")
        call("merge", *experts, "--base", berts / "base", *scale, "--out", folder / "merged", "--quiet")

    return once("tuned", make)


def write_word_tables(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name, words in WORDS.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label", "split"))
            for split, count in COUNTS.items():
                for number in range(count):
                    label = number % len(words)
                    texts = [words[label], *random.choice(["a", "very", "was"], random.integers(1, 5))]
                    writer.writerow((" ".join(random.permutation(texts)), f"{words[label]}-label", split))
