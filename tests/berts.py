"""Tiny BERT experts, tables of inputs for them, and their merge: the files that most tests read."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orthomerge.models.skeleton import quiet
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

HEADS = {"two": 2, "three": 3, "five": 5}  # expert -> number of classes
COUNTS = {"train": 60, "val": 20, "test": 30}  # inputs per split
WORDS = ("a", "good", "bad", "film", "very", "not", "it", "was")


def write_berts(
    folder: Path,
    heads: Mapping[str, int] = HEADS,
    *,
    width: int = 32,
    layers: int = 2,
    vocabulary: int = 99,
    shard: str = "1GB",
) -> None:
    """Write a `base` with its tokenizer, and an expert per entry of `heads`; their order changes no byte."""
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
        "vocab_size": vocabulary,
        "max_position_embeddings": 40,
    }
    with quiet():
        from transformers import BertConfig, BertForSequenceClassification, BertModel

        torch.manual_seed(0)
        base = BertModel(BertConfig(**sizes))
        base.save_pretrained(folder / "base", max_shard_size=shard)
        for name, classes in heads.items():
            torch.manual_seed(classes)
            labels = {number: f"{name}-{number}" for number in range(classes)}
            config = BertConfig(**sizes, id2label=labels, label2id={label: n for n, label in labels.items()})
            expert = BertForSequenceClassification(config)
            tuned = {key: value + 0.02 * torch.randn_like(value) for key, value in base.state_dict().items()}
            expert.bert.load_state_dict(tuned)
            expert.save_pretrained(folder / name, max_shard_size=shard)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    words += [f"[unused{number}]" for number in range(vocabulary - len(words))]
    (folder / "base" / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "base" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


def write_tables(folder: Path, heads: Mapping[str, int] = HEADS, counts: Mapping[str, int] = COUNTS) -> Path:
    """Write TASK.csv for every expert: random words, labels that mean nothing."""
    random = np.random.default_rng(0)
    for name, classes in heads.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label", "split"))
            for split, count in counts.items():
                for number in range(count):
                    text = " ".join(random.choice(WORDS, random.integers(2, 9)))
                    writer.writerow((text, f"{name}-{number % classes}", split))
    return folder


def merge_berts(berts: Path, out: Path, names: tuple[str, ...] = tuple(HEADS), **more: Any) -> Path:
    """Merge experts of a folder that `write_berts` filled."""
    options: dict[str, Any] = {"method": "task_arithmetic", "parameters": {"scale": 0.5}, **more}
    experts: Any = {name: str(berts / name) for name in names}
    return write(Recipe(experts=experts, base=str(berts / "base"), **options), out=out)


def contents(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
