"""Two experts that `finetune` makes in a moment, their merge, and their tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.calling import call

# Names of tables; the word in a text and its label.
WORDS = {
    "mood": {"bad": "bad-label", "good": "good-label"},
    "kind": {"film": "film-label", "it": "it-label", "not": "not-label"},
}
COUNTS = {"train": 40, "val": 24, "test": 19}


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


def write_word_tables(folder: Path, tables: Mapping[str, Mapping[str, str]] = WORDS) -> None:
    random = np.random.default_rng(0)
    for name, labels in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label", "split"))
            for split, count in COUNTS.items():
                for number in range(count):
                    word = list(labels)[number % len(labels)]
                    text = " ".join([word] * 3 + list(random.choice(["a", "very", "was"], 2)))
                    writer.writerow((text, labels[word], split))
