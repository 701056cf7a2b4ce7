"""mergekit and orthomerge from the same mergekit config on the same random checkpoints, tensor by tensor.

    python benchmarks/parity.py [--keep]

Exit code 1 when a method that should agree (to 1e-6 of a tensor's largest magnitude) does not. Heads are not compared:
we keep them, one a task, and mergekit merges them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, ensure_mergekit, offline, table, write_result

from orthomerge.runs.models import write
from orthomerge.runs.recipe import read_recipe

HERE = ROOT / "runs" / "parity"
TOLERANCE = 1e-6
EXPERTS = {"a": 0.5, "b": 0.2, "c": 0.3}
NOTES = f"""\
A base and three experts (BERT, 256 wide, 4 layers, 5.3 M weights, random), merged by both tools from the same mergekit
YAML with weights 0.5, 0.2 and 0.3. The difference is taken tensor by tensor over the encoder; relative means divided by
the tensor's largest magnitude, and up to {TOLERANCE:g} counts as agreement. `dtype` is what mergekit calculates in;
both write float32 where it is given. *unrelated*: experts whose deltas are independent.

Ties: entries with exactly the magnitude of the last one that is kept. mergekit keeps some of them by an unstable sort,
we keep all; they are found here by a plain sort, counted, and left out of the difference. Not compared: heads (mergekit
merges them, we keep them) and DARE (random draws)."""
# All merges in one process: most of mergekit's time is its start.
DRIVER = """
import sys
from mergekit.scripts.run_yaml import main
for path in sys.argv[1:]:
    main([path, path.removesuffix(".yml") + ".mergekit", "--quiet"], standalone_mode=False)
"""

_SUMS = "mergekit sums the angle in float32, we in float64; with `dtype: float64` it does so too, and agrees"
_HALF = "mergekit calculates in the dtype of the weights, we in float32 and round once"
_NEGATIVE = (
    "where the experts point apart on average mergekit's ratio is negative and pushes the result past the base, "
    "away from the experts; we stop at the base"
)


@dataclass(frozen=True)
class Case:
    """One config for both tools. `reason`: why they may differ; without one they must not."""

    method: str
    own: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "float32"
    dtype: str | None = "float32"
    reason: str = ""

    @property
    def name(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in (*self.own.items(), *self.shared.items()))
        return f"{self.method}{f' ({options})' if options else ''}"

    @property
    def trims(self) -> bool:
        return "density" in self.own


_TRIMMED = {"density": 0.4}
_CRUMBS = {"density": 0.85}
_T = {"t": 0.3}
CASES = [
    Case("linear"),
    Case("linear", shared={"normalize": False}),
    Case("task_arithmetic"),
    Case("task_arithmetic", shared={"normalize": True, "lambda": 0.7}),
    Case("ties", _TRIMMED),
    Case("ties", _TRIMMED, {"normalize": False, "lambda": 1.3}),
    Case("breadcrumbs", _CRUMBS),
    Case("breadcrumbs", {"density": 0.5}),
    Case("slerp", shared=_T, dtype="float64"),
    Case("slerp", shared=_T, reason=_SUMS),
    Case("model_stock", dtype="float64"),
    Case("model_stock", reason=_SUMS),
    Case("linear", weights="bfloat16"),
    Case("task_arithmetic", weights="bfloat16"),
    Case("ties", _TRIMMED, weights="bfloat16"),
    Case("breadcrumbs", _CRUMBS, weights="bfloat16"),
    Case("slerp", shared=_T, weights="bfloat16", dtype="float64"),
    Case("model_stock", weights="bfloat16", dtype="float64"),
    Case("task_arithmetic", weights="bfloat16", dtype=None, reason=_HALF),
    Case("model_stock", weights="unrelated", reason=_NEGATIVE),
]


def make_checkpoints(folder: Path) -> None:
    """A base and three experts: in float32, the same in bfloat16, and in float32 with deltas that share nothing."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    config.architectures = ["BertForSequenceClassification"]
    # Stock initial values have biases of exactly zero and norms of exactly one; trained models do not.
    base = {name: tensor + torch.randn_like(tensor) * 0.02 for name, tensor in model.state_dict().items()}
    common = {name: torch.randn_like(tensor) * 0.001 for name, tensor in base.items()}
    own = {expert: {name: torch.randn_like(tensor) * 0.002 for name, tensor in base.items()} for expert in EXPERTS}
    for kind in ("float32", "bfloat16", "unrelated"):
        shared = 0 if kind == "unrelated" else 1
        models = {"base": base} | {
            expert: {name: tensor + deltas[name] + shared * common[name] for name, tensor in base.items()}
            for expert, deltas in own.items()
        }
        for name, tensors in models.items():
            target = folder / kind / name
            target.mkdir(parents=True)
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
            save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, target / "model.safetensors")
            config.save_pretrained(target)


def write_config(case: Case, path: Path) -> None:
    """The mergekit config of a case."""
    models = HERE / case.weights
    experts = dict(list(EXPERTS.items())[:2]) if case.method == "slerp" else EXPERTS
    weighted = case.method not in ("slerp", "model_stock")
    document: dict[str, Any] = {
        "merge_method": case.method,
        "models": [
            {"model": str(models / expert), "parameters": {**({"weight": weight} if weighted else {}), **case.own}}
            for expert, weight in experts.items()
        ],
        "parameters": dict(case.shared),
    }
    if case.method != "linear":
        document["base_model"] = str(models / ("a" if case.method == "slerp" else "base"))
    if case.dtype:
        document |= {"dtype": case.dtype, "out_dtype": "float32"}
    path.write_text(yaml.safe_dump(document))


@dataclass
class Difference:
    """The largest over all tensors, without the elements that are `tied`.

    There some expert has one of several equal magnitudes at the threshold: mergekit keeps some of them by an unstable
    sort, we keep all.
    """

    absolute: float = 0.0
    relative: float = 0.0
    worst: str = ""
    tied: int = 0
    elements: int = 0


def compare(case: Case, theirs: Path, ours: Path) -> Difference:
    """Both results, over all tensors of the encoder; relative means to the tensor's largest magnitude."""
    prefix = "bert."
    expected = load_file(theirs / "model.safetensors")
    expected = {name: tensor for name, tensor in expected.items() if name.startswith(prefix)}
    found = load_file(ours / "encoder.safetensors")
    if found.keys() != expected.keys():
        raise SystemExit(f"the two do not hold the same tensors: {sorted(found.keys() ^ expected.keys())[:3]} ...")
    inputs = {name: load_file(HERE / case.weights / name / "model.safetensors") for name in ("base", *EXPERTS)}
    total = Difference()
    for name, tensor in expected.items():
        if found[name].dtype != tensor.dtype:
            raise SystemExit(f"{name} is {tensor.dtype} in mergekit's result and {found[name].dtype} in ours")
        difference = (found[name].double() - tensor.double()).abs()
        if case.trims:
            base = inputs["base"][name].float()
            tied = torch.stack([at_threshold(case, inputs[expert][name].float() - base) for expert in EXPERTS]).any(0)
            total.tied += int(tied.sum())
            difference[tied] = 0
        largest = float(difference.max())
        share = largest / float(tensor.double().abs().max())
        total.absolute = max(total.absolute, largest)
        total.elements += tensor.numel()
        if share > total.relative:
            total.relative, total.worst = share, name
    return total


def at_threshold(case: Case, delta: torch.Tensor) -> torch.Tensor:
    """Where |delta| is that of the smallest or the largest entry which is kept, if several entries have it."""
    magnitudes = delta.abs()
    ordered = magnitudes.reshape(-1).sort().values
    kept = max(1, int(case.own["density"] * len(ordered)))
    first = max(0, len(ordered) - kept - int(case.own.get("gamma", 0) * len(ordered)))
    tied = torch.zeros_like(magnitudes, dtype=torch.bool)
    for limit in {float(ordered[first]), float(ordered[first + kept - 1])}:
        equal = magnitudes == limit
        if int(equal.sum()) > 1:
            tied |= equal
    return tied


def verdict(case: Case, found: Difference) -> tuple[str, bool]:
    """In words, and whether that is a failure."""
    if found.relative > TOLERANCE:
        return (f"differs: {case.reason}", False) if case.reason else (f"DIFFERS, most in {found.worst}", True)
    if not found.tied:
        return "agrees", False
    share = 100 * found.tied / found.elements
    return f"agrees, but for ties in magnitude at the threshold ({share:.2g} % of the elements)", False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help=f"leave the models in {HERE.relative_to(ROOT)}")
    keep = parser.parse_args().keep
    mergekit = ensure_mergekit()
    described = describe_run(mergekit=mergekit)
    shutil.rmtree(HERE, ignore_errors=True)
    make_checkpoints(HERE)
    configs = [HERE / f"{number:02}-{case.method}.yml" for number, case in enumerate(CASES)]
    for case, path in zip(CASES, configs, strict=True):
        write_config(case, path)
    print(f"{len(CASES)} merges by mergekit, then by orthomerge", flush=True)
    command = [str(mergekit / "python"), "-c", DRIVER, *map(str, configs)]
    done = subprocess.run(command, env=offline(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"mergekit failed:\n{done.stderr[-3000:]}")

    rows, failed = [], False
    for case, path in zip(CASES, configs, strict=True):
        ours = path.with_suffix(".orthomerge")
        write(read_recipe(path), out=ours)
        found = compare(case, path.with_suffix(".mergekit"), ours)
        words, bad = verdict(case, found)
        failed |= bad
        arithmetic = case.dtype or "not given"
        rows.append((case.name, case.weights, arithmetic, f"{found.absolute:.1e}", f"{found.relative:.1e}", words))
    header = ("method", "weights", "`dtype`", "largest difference", "relative to the tensor", "verdict")
    shown = table(header, rows)
    print(shown)
    print(write_result("parity", {"# Parity with mergekit": NOTES, "## Run": described, "## Result": shown}))
    if not keep:
        shutil.rmtree(HERE)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
