"""What is fuzzed: a valid folder for each format, how it is read, and what must be true if it was.

`read` gives what a user would get. It may raise an `OrthomergeError`; anything else is a defect. If it gives
something, `check` compares: with the reference library where there is one, else with what the types promise.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_reference
from safetensors.torch import save_file

from orthomerge.data.reading import read_task
from orthomerge.files.lora import Adapter
from orthomerge.files.opening import open_expert
from orthomerge.models.experts import Experts
from orthomerge.models.model import Model
from orthomerge.models.saved import read_model, verify_folder
from orthomerge.runs.recipe import Recipe, read_recipe

Content = dict[str, tuple[str, tuple[int, ...], bytes]]
_MOST = 1 << 26  # bytes of tensors that a reader may be asked for here


@dataclass(frozen=True)
class Target:
    """One format. `files`: those that are mutated. `share`: how many of a hundred mutations it gets.

    `memory`: bytes that reading may take. The length of a page in parquet has 31 bits, and pyarrow reserves that much.
    """

    name: str
    make: Callable[[Path], None]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    check: Callable[[Path, Any], str | None]
    share: int
    memory: int = 1 << 30


def _tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 4, generator=draw),
        "b.weight": torch.randn(5, generator=draw).half(),
        "c.ids": torch.arange(4)[None],
        "d.mask": torch.tensor([True, False, True]),
        "e.none": torch.zeros(0, 3),
        "f.one": torch.tensor(2.5),
        "g.narrow": torch.randn(2, 2, generator=draw).bfloat16(),
    }


def canonical(tensors: dict[str, torch.Tensor]) -> Content:
    return {
        name: (str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


def _read_weights(path: Path) -> Content:
    opened = open_expert(path)
    assert not isinstance(opened, Adapter)
    if opened.nbytes > _MOST:
        return {}
    return canonical({name: opened[name] for name in (*opened, *opened.aliases)})


def _same_as_reference(folder: Path, result: Content) -> str | None:
    """What we accept, the reference implementation must read alike."""
    theirs: Content = {}
    for file in sorted(folder.glob("*.safetensors")):
        theirs |= canonical(load_reference(file.read_bytes()))
    return None if result == theirs else "the tensors are not those of the reference implementation"


def _make_safetensors(folder: Path) -> None:
    save_file(_tensors(), folder / "model.safetensors", {"format": "pt"})


def _make_shards(folder: Path) -> None:
    shards = {"model-00001-of-00002.safetensors": "abc", "model-00002-of-00002.safetensors": "defg"}
    tensors = _tensors()
    places: dict[str, str] = {}
    for shard, letters in shards.items():
        held = {name: value for name, value in tensors.items() if name[0] in letters}
        save_file(held, folder / shard)
        places |= dict.fromkeys(held, shard)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_adapter(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "task_type": "SEQ_CLS", "modules_to_save": ["classifier"]}
    config |= {"rank_pattern": {"layer.1.q": 1}, "alpha_pattern": {"1.q": 3}, "use_rslora": True, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(0)
    tensors = {"base_model.model.classifier.weight": torch.randn(2, 4, generator=draw)}
    for layer, rank in ((0, 2), (1, 1)):
        tensors[f"base_model.model.layer.{layer}.q.lora_A.weight"] = torch.randn(rank, 4, generator=draw)
        tensors[f"base_model.model.layer.{layer}.q.lora_B.weight"] = torch.randn(4, rank, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")


def _read_adapter(folder: Path) -> dict[str, Any]:
    opened = open_expert(folder)
    assert isinstance(opened, Adapter)
    result = {}
    for name, factors in opened.products.items():
        count = int(np.prod(factors.shape)) if np.prod(factors.shape) < _MOST else 0
        result[name] = (factors.scaling, factors.shape, factors.transposed, factors.delta(0, count) if count else None)
    return result


def _check_adapter(folder: Path, result: dict[str, Any]) -> str | None:
    """Deltas are s B A, by the reference implementation's tensors and torch's product."""
    theirs = load_reference((folder / "adapter_model.safetensors").read_bytes())
    for name, (scaling, shape, transposed, delta) in result.items():
        stem = name.removesuffix(".weight")
        a, b = ([value for key, value in theirs.items() if f"{stem}.lora_{side}" in key] for side in "AB")
        if not np.isfinite(scaling):
            return "a scale is not a finite number"
        if delta is None or transposed or len(shape) != 2 or (len(a), len(b)) != (1, 1):
            continue
        product = (b[0].float().mul(scaling) @ a[0].float()).reshape(-1)
        same = torch.allclose(product, delta, rtol=1e-3, atol=1e-3, equal_nan=True)
        if not same and product.isfinite().all():
            return "the delta is not s B A"
    return None


def _make_zip(folder: Path) -> None:
    tied = _tensors() | {"h.tied": (shared := torch.ones(3)), "i.tied": shared}
    torch.save({"state_dict": tied, "epoch": 3}, folder / "pytorch_model.bin")


def _make_stream(folder: Path) -> None:
    torch.save(_tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def _same_as_torch(folder: Path, result: Content) -> str | None:
    """Where torch's own restricted reader reads it as well, the tensors must be the same."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 - it is free to refuse in any way
        return None
    for key in ("state_dict", "model_state_dict", "model", "module"):
        theirs = theirs[key] if isinstance(theirs, dict) and isinstance(theirs.get(key), dict) else theirs
    if not isinstance(theirs, dict) or not result:
        return None
    tensors = {n: t for n, t in theirs.items() if isinstance(t, torch.Tensor) and isinstance(n, str) and n in result}
    try:
        return None if canonical(tensors) == {n: result[n] for n in tensors} else "the tensors are not those of torch"
    except (RuntimeError, TypeError):  # kinds of tensors without bytes
        return None


_RECIPE = """\
base: ./base
experts:
  a: {path: ./a, labels: [x, y], prefix: bert.}
  b: org/name
method: ties
parameters: {density: 0.2, scale: [0.3, 1e-1]}
vector: a + 0.5 * b
out: ./out
dtype: float16
max_shard_size: 2GB
seed: 7
ignore: ['*.pooler.*']
align: {data: {a: ./a.csv}, aligner: ridge, options: {strength: 1.0}}
"""
_MERGEKIT = """\
merge_method: dare_ties
base_model: ./base
models:
  - model: ./a
    parameters: {weight: 0.5, density: 0.3}
  - model: ./b
    parameters: {weight: 0.7, density: 0.3}
dtype: bfloat16
parameters: {normalize: true}
"""


def _make_recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(_RECIPE)
    (folder / "mergekit.yaml").write_text(_MERGEKIT)


def _read_recipe(folder: Path) -> list[Recipe]:
    return [read_recipe(folder / name) for name in ("mergekit.yaml", "recipe.yaml")]


def _check_recipe(folder: Path, result: list[Recipe]) -> str | None:
    sound = all(recipe.tasks and isinstance(hash(recipe.method), int) for recipe in result)
    return None if sound else "a recipe without experts"


def _rows() -> list[tuple[str, str, str]]:
    return [(f"text {n}, with\tmore", f"class {n % 2}", ("train", "train", "test")[n % 3]) for n in range(12)]


def _make_csv(folder: Path) -> None:
    lines = ["text,label,split", *(f'"{text}",{label},{split}' for text, label, split in _rows())]
    (folder / "task.csv").write_text("\n".join(lines) + "\n")


def _make_jsonl(folder: Path) -> None:
    lines = [json.dumps({"text": text, "label": label, "split": split}) for text, label, split in _rows()]
    (folder / "task.jsonl").write_text("\n".join(lines) + "\n")


def _make_npz(folder: Path) -> None:
    images = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4)
    labels, names = np.arange(6) % 2, np.array(["a", "b"])
    np.savez(folder / "task.npz", x_train=images, y_train=labels, x_test=images, y_test=labels, label_names=names)


def _make_parquet(folder: Path) -> None:
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # others reserve a gigabyte, as if it were used
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, label, split = zip(*_rows(), strict=True)
    table = pa.table({"text": list(text), "label": list(label), "split": list(split)})
    pq.write_table(table, folder / "task.parquet")


def _make_pictures(folder: Path) -> None:
    from PIL import Image

    for kind in ("cat", "dog"):
        (folder / "task" / "train" / kind).mkdir(parents=True)
        picture = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
        picture.save(folder / "task" / "train" / kind / "1.png")


def _read_task(folder: Path) -> Any:
    task = read_task(next(folder.iterdir()))
    return task, {split: [part.inputs[place] for place in range(len(part))] for split, part in task.splits.items()}


def _check_task(folder: Path, result: Any) -> str | None:
    task, inputs = result
    for split, part in task.splits.items():
        if len(inputs[split]) != len(part) or (part.labels is not None and len(part.labels) != len(part)):
            return f"the {split} split has not as many labels as inputs"
        odd = [item for item in inputs[split] if not isinstance(item, str) and item.dtype != np.uint8]
        if odd:
            return f"the {split} split has inputs of {odd[0].dtype}"
    return None


def _make_output(folder: Path) -> None:
    """What a merge writes, made by a merge."""
    import orthomerge

    draw = torch.Generator().manual_seed(0)
    body = {"body.w": torch.randn(4, 4, generator=draw)}
    save_file(body, folder / "base.safetensors")
    tuned = {"body.w": body["body.w"] + 0.1 * torch.randn(4, 4, generator=draw), "fc.weight": torch.ones(2, 4)}
    save_file(tuned, folder / "a.safetensors")
    paths, heads = {"a": folder / "a.safetensors"}, {"a": {"layers": ("fc",)}}
    experts = orthomerge.open(paths, base=folder / "base.safetensors", family="generic", prefix="body", heads=heads)
    orthomerge.merge(experts, method="average").save(folder / "out")


def _read_output(folder: Path) -> tuple[list[str], Model, Content]:
    """Verified or not, every byte of it is read; only what was verified becomes a model."""
    problems = verify_folder(folder / "out")
    model = read_model(folder / "out")
    return problems, model, canonical(dict(model.weights.blocks()))


def _check_output(folder: Path, result: tuple[list[str], Model, Content]) -> str | None:
    """The files are a merge of one expert by average: what is read and verified must be that expert."""
    _, model, tensors = result
    theirs = canonical(load_reference((folder / "a.safetensors").read_bytes()))
    if [entry[2] for entry in tensors.values()] != [theirs["body.w"][2]]:
        return "the encoder is not what was written"
    labels = [model.head(task).labels for task in model.tasks]
    return None if labels and all(labels) else "a model without heads or labels"


def _make_experts(folder: Path) -> None:
    """A base and an expert of a tiny BERT without transformers: only names and shapes count."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 4, "max_position_embeddings": 6, "num_hidden_layers": 1}
    encoder = {
        "embeddings.word_embeddings.weight": torch.randn(9, 4, generator=draw),
        "encoder.layer.0.attention.self.query.weight": torch.randn(4, 4, generator=draw),
        "encoder.layer.0.attention.self.query.bias": torch.randn(4, generator=draw),
        "pooler.dense.weight": torch.randn(4, 4, generator=draw),
        "pooler.dense.bias": torch.randn(4, generator=draw),
    }
    head = {"classifier.weight": torch.randn(2, 4, generator=draw), "classifier.bias": torch.randn(2, generator=draw)}
    for name, more in (("base", {}), ("expert", {"id2label": {"0": "a", "1": "b"}})):
        (folder / name).mkdir()
        config = {"model_type": "bert", "architectures": ["BertModel"], **sizes, **more}
        (folder / name / "config.json").write_text(json.dumps(config))
        words = {"type": "WordPiece", "vocab": {"a": 0, "b": 1}}
        tokenizer = {"model": words, "added_tokens": [{"id": 2, "content": "c"}], "padding": name}
        (folder / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        prefix = "" if name == "base" else "bert."
        tensors = {prefix + key: value + 0.01 * len(prefix) for key, value in encoder.items()}
        save_file(tensors | (head if prefix else {}), folder / name / "model.safetensors")


def _read_experts(folder: Path) -> Experts:
    experts = Experts(Recipe({"a": str(folder / "expert")}, base=str(folder / "base")).opening)
    assert all(problem.what and problem.fix for problem in experts.problems)
    return experts.check()


def _check_experts(folder: Path, experts: Experts) -> str | None:
    return None if experts.parts.merged and experts.parts.sources["a"].labels else "experts without weights or labels"


# fmt: off
_ROWS = (
    Target("safetensors", _make_safetensors, ("model.safetensors",), _read_weights, _same_as_reference, 22),
    Target("shards", _make_shards,
           ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
           _read_weights, _same_as_reference, 12),
    Target("adapter", _make_adapter, ("adapter_config.json", "adapter_model.safetensors"),
           _read_adapter, _check_adapter, 10),
    Target("pickle (zip)", _make_zip, ("pytorch_model.bin",), _read_weights, _same_as_torch, 14),
    Target("pickle (stream)", _make_stream, ("pytorch_model.bin",), _read_weights, _same_as_torch, 10),
    Target("recipe", _make_recipe, ("recipe.yaml", "mergekit.yaml"), _read_recipe, _check_recipe, 8),
    Target("csv", _make_csv, ("task.csv",), _read_task, _check_task, 5),
    Target("jsonl", _make_jsonl, ("task.jsonl",), _read_task, _check_task, 4),
    Target("npz", _make_npz, ("task.npz",), _read_task, _check_task, 3),
    Target("parquet", _make_parquet, ("task.parquet",), _read_task, _check_task, 3, 3 << 30),
    Target("pictures", _make_pictures, ("task/train/cat/1.png",), _read_task, _check_task, 3),
    Target("output", _make_output,
           ("out/orthomerge.json", "out/orthomerge.local.json", "out/a/head.safetensors", "out/encoder.safetensors"),
           _read_output, _check_output, 3),
    Target("experts", _make_experts,
           ("expert/config.json", "base/config.json", "expert/tokenizer.json", "expert/model.safetensors"),
           _read_experts, _check_experts, 3),
)
# fmt: on
TARGETS = {target.name: target for target in _ROWS}
