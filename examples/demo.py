"""Merge three small classifiers with 2, 3 and 5 classes that are made on the spot; shows each command as it runs.

python examples/demo.py [FOLDER]        (default: runs/demo)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TASKS = {"sentiment": ["bad", "good"], "topic": ["sport", "money", "art"], "stars": ["1", "2", "3", "4", "5"]}


def make_experts(folder: Path) -> None:
    """A tiny BERT and three classifiers that differ from it a little, as fine-tuned ones do."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    from orthomerge.models.load import quiet

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    with quiet():
        torch.manual_seed(0)
        base = BertModel(BertConfig(vocab_size=1000, **sizes))
        base.save_pretrained(folder / "base")
        for task, labels in TASKS.items():
            config = BertConfig(vocab_size=1000, id2label=dict(enumerate(labels)), **sizes)
            expert = BertForSequenceClassification(config)
            tuned = {key: value + 0.005 * torch.randn(value.shape) for key, value in base.state_dict().items()}
            expert.bert.load_state_dict(tuned)
            expert.save_pretrained(folder / task)


def run(*arguments: str | Path) -> None:
    """Show a command, then run it."""
    print("\n$ orthomerge", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "orthomerge.cli.app", *map(str, arguments)], check=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(
        f"making a base and experts with {', '.join(str(len(labels)) for labels in TASKS.values())} classes in {folder}"
    )
    make_experts(folder)
    experts = [part for task in TASKS for part in ("--expert", f"{task}={folder / task}")]
    run("plan", "--base", folder / "base", *experts, "--method", "ties", "--out", folder / "merged")
    run("merge", "--base", folder / "base", *experts, "--method", "ties", "--out", folder / "merged")
    run("verify", folder / "merged")
    run("export", folder / "merged", "--task", "topic", "--to", folder / "topic-classifier")

    import torch
    from transformers import AutoModelForSequenceClassification

    import orthomerge
    from orthomerge.models.load import quiet

    batch = {"input_ids": torch.arange(24).reshape(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    with quiet(), torch.no_grad():
        stock = AutoModelForSequenceClassification.from_pretrained(folder / "topic-classifier")
        difference = stock.eval()(**batch).logits - orthomerge.load(folder / "merged").logits("topic", batch)
    largest = float(difference.abs().max())
    print(f"\nstock transformers and orthomerge.load agree: largest difference of logits {largest:.1e}")
    print(f"everything is in {folder}; try `orthomerge methods`, or the same merge with --method tsv_m")


if __name__ == "__main__":
    main()
