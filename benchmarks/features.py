"""How much `extract` costs beside the bare model: the same batches, device and order, in one run.

    python benchmarks/features.py [--device auto] [--runs N] [--models minilm vit ...] [--precision float32 ...]

The bare model finds its batches ready on the device and throws its features away; `extract` is given raw texts or
images, and prepares, moves, checks and collects. They are run in turn, N times; what is told is the best run of each,
for others on the machine can only make one slower. Exit code 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import describe_run, table, write_result

from orthomerge.core.device import device_of
from orthomerge.data.task import Examples, Modality
from orthomerge.models.encoding import Encoding, Precision, extract
from orthomerge.models.families import family as find_family
from orthomerge.models.family import Family
from orthomerge.models.processing import PixelProcessor, Processor, batches
from orthomerge.models.processors import load_processor
from orthomerge.models.skeleton import quiet

BAR = 1.10
BATCH = 64
NOTES = f"""\
Inputs a second, best of the runs, which alternate (two of what the bar is not about). *bare*: the model's forward and
pooling on batches that lie ready on the device, in the order in which `extract` takes them, one after the other;
nothing is kept. *ready*: `extract` on the same batches, made before (it moves, checks, brings back and
collects). *raw*: `extract` from texts or images, tokenizer or resizing included. *preparing*: that part alone, without
a model. A ratio is the time of `extract` over that of the bare model; the bar,
on the same batches and so for *ready*, is {BAR}. Random weights, batches of {BATCH}; texts of 5 to 125 words (most of
them short), images 32 x 32."""


@dataclass(frozen=True)
class Case:
    """A model of a size that people use. `count`: how many inputs on a CPU and on an accelerator."""

    name: str
    family: str
    pooling: str
    sizes: Mapping[str, int]
    count: tuple[int, int]


_SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_TINY = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
_WORDS = {"vocab_size": 30522, "max_position_embeddings": 512}
CASES = {
    case.name: case
    for case in (
        Case("minilm", "bert", "mean", _SMALL | _WORDS, (320, 8192)),
        Case("bert-base", "bert", "cls", _BASE | _WORDS, (0, 4096)),
        Case("vit-192", "vit", "cls", _TINY | {"image_size": 32, "patch_size": 4}, (512, 8192)),
        Case("vit-base", "vit", "cls", _BASE | {"image_size": 224, "patch_size": 32}, (0, 4096)),
    )
}


class Ready:
    """A processor that has done its work before: gives the batches that it was made from, one after the other."""

    def __init__(self, made: list[dict[str, torch.Tensor]], modality: Modality) -> None:
        self.made, self.modality, self.next = made, modality, 0

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        self.next = (self.next + 1) % len(self.made)
        return self.made[self.next - 1]

    def digest(self) -> str:
        return "ready"


def encoder_of(case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    with quiet():
        import transformers

        kind = "Bert" if case.family == "bert" else "ViT"
        config = getattr(transformers, f"{kind}Config")(**case.sizes)
        model: torch.nn.Module = getattr(transformers, f"{kind}Model")(config, add_pooling_layer=False)
    return model.eval()


def inputs_of(case: Case, count: int) -> tuple[Examples, Processor]:
    random = np.random.default_rng(0)
    if case.family == "vit":
        images = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        return Examples(list(images), None, "test"), PixelProcessor(case.sizes["image_size"])
    words = [f"{a}{b}{c}" for a in ("ba", "ke", "li", "mo") for b in ("n", "rt", "s", "x") for c in ("a", "ing", "er")]
    lengths = np.clip(random.lognormal(3.2, 0.7, count).astype(int), 5, 125)
    texts = [" ".join(words[place] for place in random.integers(0, len(words), length)) for length in lengths]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
        Path(folder, "vocab.txt").write_text("\n".join(vocabulary) + "\n")
        Path(folder, "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
        Path(folder, "config.json").write_text(json.dumps({"model_type": "bert", "type_vocab_size": 2, **case.sizes}))
        return Examples(texts, None, "test"), load_processor(Path(folder), modality="text")


def seconds(act: Callable[[], object], device: torch.device) -> float:
    """How long it takes until the device is done."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    act()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def bare(
    encoder: torch.nn.Module, family: Family, case: Case, made: list[dict[str, torch.Tensor]], precision: Precision
) -> None:
    device = next(encoder.parameters()).device.type
    narrow = precision != "float32"
    mode = torch.no_grad if narrow else torch.inference_mode  # the faster one: see `extract`
    with mode(), torch.autocast(device, getattr(torch, precision) if narrow else None, enabled=narrow):
        for batch in made:
            family.features(encoder, batch, case.pooling)


def measure(case: Case, device: torch.device, precision: Precision, runs: int, count: int) -> dict[str, float]:
    """Seconds of each way, the best of some runs."""
    family, encoder = find_family(case.family), encoder_of(case).to(device)
    examples, processor = inputs_of(case, count)
    order = list(range(count))
    if processor.modality == "text":
        order.sort(key=lambda place: -len(examples.inputs[place]))
    made = list(batches(examples, processor, BATCH, order=order))
    there = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in made]

    def ours(arguments: Processor) -> Callable[[], object]:
        how = Encoding(None, str(device), precision, BATCH)
        return lambda: extract(encoder, family, case.pooling, examples, arguments, task=case.name, how=how)

    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(encoder, family, case, there, precision),
        "ready": ours(Ready(made, processor.modality)),
        "raw": ours(processor),
        "preparing": lambda: [None for _ in batches(examples, processor, BATCH, order=order)],
    }
    for name in _COMPARED:  # to warm up
        ways[name]()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(runs):
        for name, act in ways.items():
            if name in _COMPARED or number < _FEW:
                found[name].append(seconds(act, device))
    return {name: min(times) for name, times in found.items()}


def row(name: str, precision: str, count: int, times: Mapping[str, float]) -> tuple[list[str], bool]:
    ready, raw = times["ready"] / times["bare"], times["raw"] / times["bare"]
    speeds = [f"{count / times[way]:,.0f}" if way in times else "-" for way in _WAYS]
    verdict = "within" if ready <= BAR else "MISSED"
    return [name, precision, str(count), *speeds, f"{ready:.3f}", f"{raw:.3f}", verdict], ready <= BAR


_WAYS = ("bare", "ready", "raw", "preparing")
_COMPARED, _FEW = _WAYS[:2], 2  # what the bar is about; runs of all others


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--runs", type=int, default=9, help="runs of the two ways that are compared (9); others have two"
    )
    parser.add_argument("--models", nargs="+", choices=list(CASES), help="only these")
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=["float32"])
    parser.add_argument("--name", default="features", help="of the file under benchmarks/results (features)")
    arguments = parser.parse_args()
    device = device_of(arguments.device)
    on_cpu = device.type == "cpu"
    what = f"{torch.get_num_threads()} threads" if on_cpu else torch.cuda.get_device_name(device)
    described = f"{describe_run()}\n- device: {device.type}, {what}"
    rows, good = [], True
    for case in CASES.values():
        count = case.count[0 if on_cpu else 1]
        if not count or (arguments.models and case.name not in arguments.models):
            continue
        for precision in arguments.precision:
            times = measure(case, device, precision, arguments.runs, count)
            cells, within = row(case.name, precision, count, times)
            print("  ".join(cells), flush=True)
            rows.append(cells)
            good &= within
    result = table(["model", "precision", "inputs", *_WAYS, "ready / bare", "raw / bare", "verdict"], rows)
    print(result)
    sections = {"# Features beside the bare model": NOTES, "## Run": described, "## Result": result}
    print(write_result(arguments.name, sections))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
