"""Every method on three BERT-base-sized experts with 2, 3 and 5 classes: merged, exported, loaded by transformers.

    python benchmarks/every_method.py [--methods ties wudi ...]

The logits of each exported folder must agree with those of `orthomerge.load` to 1e-5.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.environments import ROOT, describe_run, measure, table, write_result
from benchmarks.experts import CLASSES, FOLDER, make_experts

from orthomerge.merging.methods import METHODS

BAR = 1e-5


def largest_difference(out: Path, scratch: Path) -> float:
    """Between `orthomerge.load` and stock transformers, over all tasks, on one batch of random tokens."""
    import torch
    from transformers import AutoModelForSequenceClassification

    import orthomerge
    from orthomerge.models.skeleton import quiet

    ids = torch.randint(1000, 30000, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = orthomerge.load(out)
    module, worst = model.module("cpu"), 0.0
    for task in model.tasks:
        orthomerge.export(out, scratch, task=task, force=True)
        with quiet(), torch.no_grad():
            stock = AutoModelForSequenceClassification.from_pretrained(scratch).eval()
            worst = max(worst, float((stock(**batch).logits - module(**batch)[task]).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    arguments = parser.parse_args()
    make_experts()
    experts = FOLDER / "ours"
    scratch = ROOT / "runs" / "every-method"
    rows, failed = [], False
    for name in arguments.methods:
        command = [sys.executable, "-m", "orthomerge", "merge", "--base", experts / "base", "--method", name]
        for task in list(CLASSES)[: METHODS[name].experts[1]]:
            command += [f"{task}={experts / task}"]
        usage = measure([*command, "--out", scratch / "out", "--force", "--quiet"])
        difference = largest_difference(scratch / "out", scratch / "stock")
        failed = failed or difference > BAR
        rows.append([name, f"{usage.cpu:.1f}", f"{difference:.1e}"])
        print(*rows[-1], flush=True)
    shutil.rmtree(scratch)
    text = table(["method", "CPU s", "largest difference of logits"], rows)
    print(text)
    about = (
        "Three experts of BERT-base's size with heads of 2, 3 and 5 classes (slerp: the first two), each method with "
        "its defaults: CPU time of the whole command, and the largest difference between the logits of "
        "`orthomerge.load` and of the exported folders in stock transformers (bar 1e-5)."
    )
    write_result("every_method", {"# Every method": about, "## Run": describe_run(), "## Result": text})
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
