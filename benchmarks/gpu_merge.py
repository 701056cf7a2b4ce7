"""Methods that decompose matrices, on a GPU and on the CPU: the same experts, one after the other.

    python benchmarks/gpu_merge.py [--layers 4] [--experts 4] [--runs 2] [--methods tsv_m ...]

The experts have the width of ViT-L (1024, 4096 inside) and, unless `--layers` says 24, fewer of its layers: time is
made of matrices of these sizes. Exit code 1 where there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import describe_run, table, write_result

from orthomerge.files.opening import open_checkpoint
from orthomerge.models.skeleton import quiet
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

METHODS: Mapping[str, Mapping[str, Any]] = {
    "tsv_m": {},
    "iso_c": {},
    "iso_cts": {},
    "knots": {"merger": "ties"},
    "wudi": {"steps": 100},
}
NOTES = """\
Seconds of a whole `merge`, files read and written included, the best of the runs, which alternate. `--device cpu`
merges in as many threads as there are cores, at most eight; `--device cuda` sends every matrix to the GPU. *differs*:
the largest difference between two weights, as a share of the largest change that the merge makes. Experts are a random
ViT with changes that fall off along their singular values, as fine-tuning's do. wudi takes 100 steps."""


def write_models(folder: Path, *, layers: int, experts: int) -> None:
    with quiet():
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096, num_labels=10
        )
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
        model.save_pretrained(folder / "base")
        start = {name: value.clone() for name, value in model.state_dict().items()}
        for number in range(experts):
            generator = torch.Generator().manual_seed(1 + number)
            tuned = {name: value + _change(value, generator) for name, value in start.items()}
            model.load_state_dict(tuned)
            model.save_pretrained(folder / f"expert{number}")


def _change(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Small, and of falling singular values where it is a matrix."""
    if value.ndim != 2:
        return 1e-3 * torch.randn(value.shape, generator=generator)
    rank = min(value.shape)
    left, right = (torch.randn(size, rank, generator=generator) for size in value.shape)
    strength = 1e-3 * torch.arange(1, rank + 1).pow(-0.5) / rank**0.5
    change: torch.Tensor = left * strength @ right.T
    return change


def timed(recipe: Recipe, out: Path) -> float:
    started = time.perf_counter()
    write(recipe, out=out, force=True)
    return time.perf_counter() - started


def difference(one: Path, other: Path, base: Path) -> float:
    """See NOTES."""
    first, second, start = (open_checkpoint(str(path)) for path in (one, other, base))
    names = {name.removeprefix("vit."): name for name in start}
    apart = change = 0.0
    for name in first:
        count = first.spec(name).numel
        ours, theirs = first.read(name, 0, count), second.read(name, 0, count)
        apart = max(apart, float((ours - theirs).abs().max()))
        change = max(change, float((ours - start.read(names[name.removeprefix("vit.")], 0, count)).abs().max()))
    return apart / change


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="of ViT-L's 24 (4)")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here; run this where there is one")
        return 1
    described = f"{describe_run()}\n- GPU: {torch.cuda.get_device_name()}\n- runs: {arguments.runs}"
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, layers=arguments.layers, experts=arguments.experts)
        experts = {f"task{number}": str(folder / f"expert{number}") for number in range(arguments.experts)}
        for method in arguments.methods:
            times: dict[str, list[float]] = {"cpu": [], "cuda": []}
            for _ in range(arguments.runs):
                for device, found in times.items():
                    parameters = dict(METHODS[method])
                    recipe = Recipe(
                        experts, base=str(folder / "base"), method=method, parameters=parameters, device=device
                    )
                    found.append(timed(recipe, folder / device))
            here, there = min(times["cpu"]), min(times["cuda"])
            apart = difference(
                folder / "cpu" / "encoder.safetensors", folder / "cuda" / "encoder.safetensors", folder / "base"
            )
            rows.append([f"`{method}`", f"{here:.1f}", f"{there:.1f}", f"{here / there:.1f}", f"{apart:.1e}"])
            print("  ".join(rows[-1]), flush=True)
    result = table(["method", "CPU s", "GPU s", "times faster", "differs"], rows)
    about = f"{arguments.experts} experts of {arguments.layers} of ViT-L's 24 layers. {NOTES}"
    print(result)
    print(write_result("gpu-merge", {"# Merging on a GPU": about, "## Run": described, "## Result": result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
