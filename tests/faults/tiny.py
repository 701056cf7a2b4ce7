"""The smallest BERT experts that every command takes, and the commands that crash points are looked for in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orthomerge.models.skeleton import quiet
from orthomerge.runs.recipe import Recipe

TASKS = {"two": 2, "three": 3}
_WORDS = ("a", "good", "bad", "film", "very", "not", "it", "was")


def write_experts(folder: Path, *, width: int = 8, rows: int = 16, shard: str = "1GB", backwards: bool = False) -> Path:
    """`base`, an expert a task, and TASK.csv with inputs. `backwards`: the same files, made in another order."""
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": width,
        "vocab_size": max(width * width // 6, 16),
        "max_position_embeddings": 40,
    }
    order = sorted(TASKS.items(), reverse=backwards)
    with quiet():
        from transformers import BertConfig, BertForSequenceClassification, BertModel

        torch.manual_seed(0)
        base = BertModel(BertConfig(**sizes))
        base.save_pretrained(folder / "base", max_shard_size=shard)
        for name, classes in order:
            torch.manual_seed(classes)
            labels = {number: f"{name}-{number}" for number in range(classes)}
            expert = BertForSequenceClassification(
                BertConfig(**sizes, id2label=labels, label2id={label: number for number, label in labels.items()})
            )
            moved = {key: value + 0.02 * torch.randn_like(value) for key, value in base.state_dict().items()}
            expert.bert.load_state_dict(moved)
            expert.save_pretrained(folder / name, max_shard_size=shard)
            texts = [" ".join(_WORDS[(row * step + step) % 8] for step in range(2 + row % 30)) for row in range(rows)]
            lines = [f"{text},{name}-{row % classes},train" for row, text in enumerate(texts)]
            lines += [f"{text} a,{name}-{row % classes},test" for row, text in enumerate(texts)]
            (folder / f"{name}.csv").write_text("\n".join(("text,label,split", *lines)) + "\n")
    vocabulary = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS, "[x]", "[y]", "[z]")
    (folder / "base" / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (folder / "base" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return folder


def recipe_for(folder: Path, method: str = "average", **options: Any) -> Recipe:
    """A merge of the experts of a folder."""
    return Recipe({task: str(folder / task) for task in TASKS}, base=str(folder / "base"), method=method, **options)


def data_words(folder: Path) -> list[str]:
    """The option `--data` of every task."""
    return [word for task in TASKS for word in ("--data", f"{task}={folder / task}.csv")]


def evaluation(folder: Path, merged: Path) -> list[str]:
    """The evaluation of a merge by two protocols, without `--out`."""
    protocols = ["--protocol", "current", "--protocol", "knn"]
    return ["evaluate", str(merged), *data_words(folder), "--device", "cpu", *protocols]


def commands(folder: Path, merged: Path, *, seed: int = 0) -> dict[str, list[str]]:
    """A merge, an align and a fitted merge, without `--out`; those of another seed give other bytes."""
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
