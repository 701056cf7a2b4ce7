"""A merge of adapters written as one adapter: the merged delta of every adapted matrix, cut to a rank that is chosen.

delta = U diag(s) V^T, of which the first r directions are kept: B = U sqrt(s), A = sqrt(s) V^T. No matrix of rank r is
nearer (Eckart and Young 1936), and nothing is lost where delta has no higher rank, such as a sum of adapters whose
ranks add up to r. The manifest says for every layer what was lost.

OUT/adapter/   a PEFT folder, which `PeftModel.from_pretrained` puts on the stock classifier that the experts adapted
OUT/heads, OUT/README.md, OUT/orthomerge.json   as of any other output

Letters: delta [m, k]; U [m, r], s [r], V [k, r]; B [m, r], A [r, k]. With fewer directions than r, the rest is zero.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from orthomerge.checkpoints.checkpoint import Spec, torch_dtype
from orthomerge.checkpoints.lora import Adapter
from orthomerge.checkpoints.lora_options import CONFIG
from orthomerge.checkpoints.publish import publish, write_json
from orthomerge.checkpoints.shards import write_shards
from orthomerge.classifiers import write_classifier
from orthomerge.errors import IncompatibleError, NumericalError, some
from orthomerge.output import companions, finish_output, manifest_of
from orthomerge.problems import Problem
from orthomerge.recipe import DTYPE_NAMES

if TYPE_CHECKING:
    import torch

    from orthomerge.heads import Head
    from orthomerge.merging.kinds import SurveyMethod, TensorMethod
    from orthomerge.merging.vectors import TaskVectors
    from orthomerge.models.family import Family
    from orthomerge.planning import ExpertPlan, Job
    from orthomerge.recipe import Recipe

__all__ = ["FOLDER", "adapter_problems", "load_adapted", "truncate", "write_adapter_output"]

FOLDER = "adapter"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WAY_OUT = "leave 'adapter_rank' out: a full model can hold any merge"


def adapter_problems(recipe: Recipe, experts: Mapping[str, ExpertPlan]) -> Iterator[Problem]:
    """Why these experts cannot be merged into one adapter of linear layers."""
    if recipe.adapter_rank is None:
        return
    for task, expert in experts.items():
        where, source = f"expert {task!r} ({expert.source.path})", expert.source
        if not isinstance(source, Adapter):
            yield Problem(where, "it is a full model, and only adapters merge into an adapter", _WAY_OUT)
            continue
        whole = [name for name in expert.split.names.values() if name in source.replaced]
        if whole:
            yield Problem(where, f"it stores {some(whole)} of the encoder whole, which has no factors", _WAY_OUT)
        odd = [name for name, each in source.factors.items() if each.kind != "linear" or each.transposed]
        if odd:
            yield Problem(where, f"it adapts {some(odd)}, which is no linear layer stored as [out, in]", _WAY_OUT)
    prefixes = {expert.split.prefixes[0]: task for task, expert in experts.items()}
    if len(prefixes) > 1:
        what = f"the experts adapt models that keep the encoder in different places ({some(prefixes)})"
        yield Problem("adapter_rank", what, _WAY_OUT)


def write_adapter_output(
    job: Job,
    method: TensorMethod | SurveyMethod,
    heads: dict[str, Head],
    vectors: TaskVectors,
    *,
    out: Path,
    force: bool,
) -> dict[str, Any]:
    """Merge every adapted layer, write the output folder and return its manifest."""
    from orthomerge.merging.stream import prepare

    rank, modules = cast("int", job.recipe.adapter_rank), _modules(job)
    dtype = DTYPE_NAMES.get(job.recipe.dtype, "F32")
    specs: dict[str, Spec] = {}
    for key, module in modules.items():
        m, k = job.merged[key].shape
        specs[f"{_PREFIX}{module}.lora_A.weight"] = Spec((rank, k), dtype)
        specs[f"{_PREFIX}{module}.lora_B.weight"] = Spec((m, rank), dtype)
    paths = [source.path for source in job.sources.values()]
    beside = companions(*paths)
    need = sum(spec.nbytes for spec in specs.values())
    with publish(out, force=force, need=need, inputs=paths) as partial:
        folder, errors = partial / FOLDER, dict[str, float]()
        folder.mkdir()
        blocks = _blocks(job, prepare(method, vectors), vectors, modules, errors)
        (written,) = write_shards(folder, specs, blocks, most=1 << 62)
        (folder / written.name).rename(folder / _WEIGHTS)
        for task, head in heads.items():
            write_classifier(partial / "heads" / task, head)
        for path in beside:
            shutil.copyfile(path, folder / path.name)
        write_json(folder / CONFIG, _config(job, rank, modules))
        for source in job.sources.values():
            for file in source.files:
                file.check_unchanged()
        about = {"rank": rank, "error": {module: errors[key] for key, module in modules.items()}}
        known = {f"{FOLDER}/{_WEIGHTS}": {"size": written.size, "hash": written.digest}}
        return finish_output(partial, {**manifest_of(job, heads), "adapter": about}, known)


def truncate(
    delta: torch.Tensor, rank: int, *, dtype: torch.dtype, key: str
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """B [m, rank] and A [rank, k] in `dtype`, and |delta - B A| / |delta| as it then is; `key` names delta."""
    from orthomerge.merging.polar import svd

    U, s, Vh = svd(delta, key=key, top=rank)
    root = s.sqrt()
    B, A = delta.new_zeros(len(delta), rank, dtype=dtype), delta.new_zeros(rank, delta.shape[1], dtype=dtype)
    B[:, : len(s)] = (U * root).to(dtype)
    A[: len(s)] = (root[:, None] * Vh).to(dtype)
    whole = delta.double()
    size = float(whole.norm())
    return B, A, float((whole - B.double() @ A.double()).norm()) / size if size else 0.0


def load_adapted(folder: Path, family: Family) -> torch.nn.Module:
    """The base's encoder with an output's adapter added; the base is where the adapter's config says."""
    import torch

    from orthomerge.checkpoints.lora import read_adapter
    from orthomerge.checkpoints.opening import open_checkpoint
    from orthomerge.models.load import load_encoder

    adapter = read_adapter(folder / FOLDER)
    encoder = load_encoder(open_checkpoint(str(adapter.config["base_model_name_or_path"])).path, family)
    weights = dict(encoder.named_parameters())
    for name, factors in adapter.factors.items():
        parameter = weights.get(name.removeprefix(family.prefix))
        if parameter is None or tuple(parameter.shape) != factors.shape:
            raise IncompatibleError(
                f"{folder / FOLDER} adapts {name!r}, which its base does not have; give the right base"
            )
        with torch.no_grad():
            left, right = factors.pair()
            parameter.add_((left @ right).to(parameter.dtype))
    return encoder


def _modules(job: Job) -> dict[str, str]:
    """The adapted layers: canonical name of the weight to the name that peft knows the layer by."""
    found: dict[str, str] = {}
    for expert in job.experts.values():
        adapter = cast("Adapter", expert.source)
        for key in job.merged:
            factors = adapter.factors.get(expert.split.names.get(key, ""))
            if factors is not None:
                stored = next(name for name, entry in adapter.stored.items() if entry is factors.b)
                module = stored.removeprefix(_PREFIX).partition(".lora_B")[0]
                if found.setdefault(key, module) != module:
                    raise IncompatibleError(
                        f"two experts know {key!r} as {found[key]!r} and {module!r}: they were made by different "
                        f"versions of transformers; {_WAY_OUT}"
                    )
    return {key: found[key] for key in job.merged if key in found}


def _blocks(
    job: Job, method: TensorMethod, vectors: TaskVectors, modules: Mapping[str, str], errors: dict[str, float]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors of one layer after the other; only one merged matrix is in memory at a time."""
    import torch

    from orthomerge.merging.stream import single_threaded

    dtype = torch_dtype(DTYPE_NAMES.get(job.recipe.dtype, "F32"))
    for key, module in modules.items():
        with single_threaded():
            runs = [
                method.merge(block.base, block.deltas, site=block.site).reshape(-1)
                for block in vectors.blocks(keys=(key,), scope=method.scope)
            ]
            delta = torch.cat(runs).reshape(job.merged[key].shape)
            if not torch.isfinite(delta).all():
                raise NumericalError(f"{key!r} holds NaN or infinity after the merge; find a sound adapter")
            B, A, errors[key] = truncate(delta, cast("int", job.recipe.adapter_rank), dtype=dtype, key=key)
        yield f"{_PREFIX}{module}.lora_A.weight", A
        yield f"{_PREFIX}{module}.lora_B.weight", B


def _config(job: Job, rank: int, modules: Mapping[str, str]) -> dict[str, Any]:
    """What peft must know. alpha = r: the scale is within the factors. No head: there is one a task beside it."""
    base, revision = job.recipe.base or "", job.base.revision
    configs = [expert.source.config or {} for expert in job.experts.values()]
    return {
        "alpha_pattern": {},
        "auto_mapping": next((config["auto_mapping"] for config in configs if config.get("auto_mapping")), None),
        "base_model_name_or_path": base.partition("@")[0] if revision else str(Path(base).expanduser().absolute()),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "revision": revision,
        "target_modules": sorted(modules.values()),
        "task_type": None,
        "use_rslora": False,
    }
