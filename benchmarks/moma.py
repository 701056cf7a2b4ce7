"""What a step of MOMA costs beside plain fine-tuning, and beside the loop that rebuilds the weights for every task.

    python benchmarks/moma.py [--device cuda] [--steps 30] [--shapes vit-b32 bert-base]

Random encoders of real sizes, eight tasks, the same inputs for all. *Plain*: one forward and backward pass over the
batches of all tasks, then fused AdamW over all weights. *Ours*: `Loop.run` of the method `moma`, objective and all.
*Straightforward*: for every task, theta_b + sigma(S) * delta through `torch.func.functional_call` under autograd, a
pass over its own batch, its loss; then Adam over S and the maps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, table

from orthomerge.data.task import Examples
from orthomerge.fitting.gates import Mask
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.fitting.loop import Loop
from orthomerge.fitting.moma import FeatureDistance, Moma
from orthomerge.fitting.setting import Setting, prepare
from orthomerge.models.family import cls, mean
from orthomerge.models.heads import Head, Linear
from orthomerge.models.skeleton import quiet

TASKS, CLASSES, LENGTH = 8, 10, 128
BARS = {"plain": 1.25, "straightforward": 4.0}
ABOUT = f"""\
Seconds a step, median of the steps after a warm-up; eight tasks, bfloat16 autocast on a GPU; random weights and inputs.
*Plain* is the least that a step over the same encoder and batch can cost, and the bar is {BARS["plain"]:g} of it; the
straightforward loop, which rebuilds the weights for every task, is to cost at least {BARS["straightforward"]:g} times
ours. Memory: the most that torch had allocated, and by the formula 4 bytes times P for each of base, delta, weights,
gradient, S and Adam's two moments."""


class Random:
    """A processor that makes an input of a number: the same every time."""

    def __init__(self, kind: str) -> None:
        self.modality = "text" if kind.startswith("bert") else "image"
        self._text = self.modality == "text"

    def __call__(self, inputs: list[int]) -> dict[str, torch.Tensor]:
        seeds = [torch.Generator().manual_seed(int(number)) for number in inputs]
        if self._text:
            ids = torch.stack([torch.randint(1000, 20000, (LENGTH,), generator=seed) for seed in seeds])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {"pixel_values": torch.stack([torch.randn(3, 224, 224, generator=seed) for seed in seeds])}

    def digest(self) -> str:
        return "random"


def encoder_of(kind: str) -> tuple[Any, Callable[..., torch.Tensor]]:
    with quiet():
        from transformers import BertConfig, BertModel, ViTConfig, ViTModel

        torch.manual_seed(0)
        if kind == "bert-base":
            return BertModel(BertConfig(), add_pooling_layer=False), mean
        if kind == "vit-b32":
            return ViTModel(ViTConfig(patch_size=32), add_pooling_layer=False), cls
        tiny = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        if kind == "bert-tiny":
            return BertModel(BertConfig(**tiny), add_pooling_layer=False), mean
        return ViTModel(ViTConfig(patch_size=32, **tiny), add_pooling_layer=False), cls


def setting_of(kind: str, device: torch.device, batch: int) -> tuple[Setting, torch.Tensor]:
    module, pool = encoder_of(kind)
    encoder = FlatEncoder(module, pool, device)
    width = module.config.hidden_size
    base = encoder.weights.cpu().clone()
    delta = 0.01 * torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    tasks = [f"task{number}" for number in range(TASKS)]
    heads = {task: Head(Linear(torch.randn(CLASSES, width)), tuple(map(str, range(CLASSES)))) for task in tasks}
    count = 2 * batch
    examples = {
        task: Examples([number * count + place for place in range(count)], None, "train")
        for number, task in enumerate(tasks)
    }
    teacher = {task: torch.randn(count, width) for task in tasks}
    inputs = prepare(examples, dict.fromkeys(tasks, Random(kind)), teacher, device=device)  # type: ignore[arg-type]
    half = device.type == "cuda"
    setting = Setting(encoder, base, lambda task: base, lambda method, options: base, heads, inputs, half=half)
    return setting, delta.to(device)


def timed(device: torch.device, steps: int, step: Callable[[], None]) -> float:
    """Median seconds of a step."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    found = []
    for number in range(steps + 5):
        wait()
        started = time.perf_counter()
        step()
        wait()
        if number >= 5:
            found.append(time.perf_counter() - started)
    return float(np.median(found))


def plain_step(setting: Setting, batch: int) -> Callable[[], None]:
    encoder, inputs = setting.encoder, setting.inputs
    parameters = list(encoder.module.parameters())
    for parameter in parameters:
        parameter.grad = None
    optimiser = torch.optim.AdamW(parameters, lr=1e-5, fused=setting.device.type == "cuda")
    few = inputs.at(dict.fromkeys(setting.tasks, slice(batch)))
    teacher, rows = (torch.cat([getattr(each, name) for each in few.targets.values()]) for name in ("features", "rows"))

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=setting.half):
            features = encoder.features(inputs.pool.batch(rows))
        loss = (features.float() - teacher).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def objective_of(setting: Setting) -> FeatureDistance:
    return FeatureDistance(setting.heads, setting.inputs, Moma())


def our_steps(setting: Setting, delta: torch.Tensor, batch: int, steps: int) -> float:
    """Median seconds of a step of the loop; a look at a clock a step, through the gates that it calls."""
    objective, device = objective_of(setting), setting.device
    gates = Mask(setting.base.to(device), delta, penalty=5e-9)
    marks: list[float] = []
    write = gates.write

    def marked(weights: torch.Tensor, step: int = 0) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        write(weights, step)

    gates.write = marked  # type: ignore[method-assign]
    Loop(steps=steps + 6, batch=batch, look=10**9).run(setting, gates, objective, setting.inputs, None)
    return float(np.median(np.diff(marks)[5:]))


def straightforward_step(setting: Setting, delta: torch.Tensor, batch: int) -> Callable[[], None]:
    encoder, inputs, device = setting.encoder, setting.inputs, setting.device
    names = list(setting.layout.shapes)
    base = {name: value.clone() for name, value in setting.layout.views(setting.base.to(device))}
    vector = dict(setting.layout.views(delta))
    logits = {name: torch.zeros_like(vector[name]).requires_grad_() for name in names}
    width = inputs.targets[setting.tasks[0]].features.shape[1]
    maps = {task: torch.eye(width, device=device).requires_grad_() for task in setting.tasks}
    eye = torch.eye(width, device=device)
    optimiser = torch.optim.Adam([{"params": logits.values(), "lr": 0.1}, {"params": maps.values(), "lr": 1e-3}])
    for parameter in encoder.module.parameters():
        parameter.grad = None
        parameter.requires_grad_(False)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        for task in setting.tasks:
            targets = inputs.targets[task].at(slice(batch))
            weights = {name: base[name] + torch.sigmoid(logits[name]) * vector[name] for name in names}

            def called(**arguments: torch.Tensor) -> object:
                return torch.func.functional_call(encoder.module, weights, (), arguments)  # noqa: B023

            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=setting.half):
                features = encoder._pool(called, inputs.pool.batch(targets.rows)).float()  # type: ignore[arg-type]  # noqa: SLF001
            loss = (features @ maps[task].T - targets.features).norm(dim=1).mean()
            loss = loss + (maps[task].T @ maps[task] - eye).norm()
            loss.backward()
        decay = torch.stack([torch.sigmoid(values).square().sum() for values in logits.values()]).sum()
        (5e-9 * decay).backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return step


def measure(kind: str, device: torch.device, batch: int, steps: int) -> list[str]:
    def fresh() -> tuple[Setting, torch.Tensor]:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return setting_of(kind, device, batch)

    setting, delta = fresh()
    ours = our_steps(setting, delta, batch, steps)
    size = setting.layout.size
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    del setting, delta
    setting, delta = fresh()
    plain = timed(device, steps, plain_step(setting, batch))
    peak_plain = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    del setting, delta
    setting, delta = fresh()
    naive = timed(device, max(steps // 3, 5), straightforward_step(setting, delta, batch))
    peak_naive = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    verdict = "holds" if ours <= BARS["plain"] * plain and naive >= BARS["straightforward"] * ours else "MISSED"
    memory = [f"{value / 2**30:.2f}" if value else "" for value in (peak_plain, peak, peak_naive)]
    return [
        kind,
        f"{size / 1e6:.1f}",
        str(batch * TASKS),
        f"{1e3 * plain:.1f}",
        f"{1e3 * ours:.1f}",
        f"{1e3 * naive:.1f}",
        f"{ours / plain:.2f}",
        f"{naive / ours:.1f}",
        verdict,
        *memory,
        f"{4 * 7 * size / 2**30:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64], help="inputs a task")
    parser.add_argument("--shapes", nargs="+", default=["vit-b32", "bert-base"])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    for kind in arguments.shapes:
        for batch in arguments.batch:
            rows.append(measure(kind, device, batch, arguments.steps))
            print(rows[-1], flush=True)
    titles = ["encoder", "P, M", "inputs", "plain ms", "ours ms", "straightforward ms", "ours / plain"]
    titles += ["straightforward / ours", "bars", "plain GiB", "ours GiB", "straightforward GiB", "formula GiB"]
    text = f"# MOMA: what a step costs\n\n{ABOUT}\n\n{describe_run()}\n\n## Result\n\n{table(titles, rows)}\n"
    print(text, flush=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "moma-step.md").write_text(text)


if __name__ == "__main__":
    main()
