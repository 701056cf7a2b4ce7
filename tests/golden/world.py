"""A small deterministic world for golden values: a text base with three experts, an image base with two, and tables.

Weights are whole numbers over a power of two, drawn with `torch.randint`: exact in float32, and the same on every CPU.
Labels are what the expert itself says of an input, so that scores, alignment and diagnosis have something to find.
No file of orthomerge is imported here: the same world serves two versions of the source.
"""

from __future__ import annotations

import csv
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Row = tuple[str, Any, int]  # split, input, label

TEXTS = {"two": 2, "three": 3, "four": 4}  # expert -> number of classes; `four` is an adapter
IMAGES = {"dark": 2, "shape": 3}
WIDTH, WIDE, LAYERS, VOCABULARY, RANK = 32, 64, 2, 96, 2
COUNTS = {"train": 48, "val": 18, "test": 30}  # inputs per split
WORDS = tuple(f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u", "ai"))
GRID = 2**-14
BERT = {
    "model_type": "bert", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": WIDE, "vocab_size": VOCABULARY, "max_position_embeddings": 24, "type_vocab_size": 2,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0, "torch_dtype": "float32",
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
VIT = {
    "model_type": "vit", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": WIDE, "image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "qkv_bias": True, "torch_dtype": "float32",
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 8, "width": 8},
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
}  # fmt: skip


def make_world(place: Path) -> None:
    """Write the world into a new folder `place`."""
    place.mkdir(parents=True)
    _make_texts(place)
    _make_images(place)
    _write_recipes(place)


def _make_texts(place: Path) -> None:
    base = _weights(_bert_shapes(), seed=1)
    _write_folder(place / "base", base, {**BERT, "architectures": ["BertModel"]}, _write_tokenizer)
    for seed, (name, classes) in enumerate(TEXTS.items(), 10):
        labels = {n: f"LABEL_{n}" if name == "four" else f"{name}-{n}" for n in range(classes)}
        config = {**BERT, "architectures": ["BertForSequenceClassification"], **_labels(labels)}
        encoder = _product_moved(base, seed) if name == "four" else _moved(base, seed)
        full = {f"bert.{key}": value for key, value in encoder.items()} | _head(classes, seed)
        chance = random.Random(seed)
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(3, 10))) for _ in range(900)]
        rows, full["classifier.bias"] = _labelled(texts, full, config)
        with (place / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerow(("text", "label", "split"))
            csv.writer(file).writerows((text, labels[label], split) for split, text, label in rows)
        if name == "four":
            _write_adapter(place / name, seed, full)
            continue
        _write_folder(place / name, full, config, _write_tokenizer)
        if name == "three":
            torch.save(full, place / "three.pth")
            continue
        # What needs `ignore`, what needs `missing: base`, and what has no tokenizer.
        _write_folder(place / "two-extra", {**full, "bert.translation.weight": torch.ones(4, 4)}, config)
        fewer = {key: value for key, value in full.items() if "layer.1.output.LayerNorm" not in key}
        _write_folder(place / "two-gap", fewer, config)
        _write_folder(place / "two-plain", full, config)


def _make_images(place: Path) -> None:
    base = _weights(_vit_shapes(), seed=2)
    _write_folder(place / "vit", base, {**VIT, "architectures": ["ViTModel"]}, _write_preprocessor)
    for seed, (name, classes) in enumerate(IMAGES.items(), 20):
        labels = {n: f"{name}-{n}" for n in range(classes)}
        config = {**VIT, "architectures": ["ViTForImageClassification"], **_labels(labels)}
        full = {f"vit.{key}": value for key, value in _moved(base, seed).items()} | _head(classes, seed)
        chance = np.random.Generator(np.random.PCG64(seed))
        # Patches of one colour each, and noise.
        coarse = chance.integers(0, 256, (900, 2, 2, 3)).repeat(4, axis=1).repeat(4, axis=2)
        images = np.clip(coarse + chance.integers(-20, 21, coarse.shape), 0, 255).astype(np.uint8)
        rows, full["classifier.bias"] = _labelled(list(images), full, config)
        arrays: dict[str, Any] = {"label_names": np.array(list(labels.values()))}
        for split in COUNTS:
            arrays[f"x_{split}"] = np.stack([image for part, image, _ in rows if part == split])
            arrays[f"y_{split}"] = np.array([label for part, _, label in rows if part == split])
        np.savez_compressed(place / f"{name}.npz", **arrays)
        _write_folder(place / name, full, config, _write_preprocessor)


def _write_recipes(place: Path) -> None:
    """Recipes that `run`, `sweep` and `merge` read; paths start from the world."""
    shared = "base: base\nexperts: {two: two, three: three}\n"
    data = "{two: two.csv, three: three.csv}"
    (place / "line.yaml").write_text(
        f"{shared}method: task_arithmetic\nparameters: {{scale: 0.5}}\nalign: {{data: {data}, aligner: ridge}}\n"
        f"evaluate: {{data: {data}, protocols: [current, knn], device: cpu}}\n"
        "diagnose: {points: 0, layers: 24}\nout: ../line\n"
    )
    (place / "sweep.yaml").write_text(
        f"{shared}evaluate: {{data: {data}, device: cpu}}\n"
        "sweep: {methods: [average, task_arithmetic], scales: [0.3, 0.6], aligners: [none, ridge]}\n"
    )
    (place / "mergekit.yaml").write_text(
        "merge_method: ties\nbase_model: ./base\nmodels:\n"
        "  - {model: ./two, parameters: {weight: 0.5, density: 0.4}}\n"
        "  - {model: ./three, parameters: {weight: 0.2, density: 0.4}}\n"
        "parameters: {normalize: false, int8_mask: true, lambda: 1.5}\ndtype: float32\n"
    )
    (place / "twice.yaml").write_text(f"{shared}method: ties\nmethod: average\n")
    (place / "unlabelled.csv").write_text("text,split\nba be,train\nbi bo,test\n")
    (place / "two-broken").mkdir()
    (place / "two-broken" / "config.json").write_bytes((place / "two" / "config.json").read_bytes())
    (place / "two-broken" / "model.safetensors").write_bytes((place / "two" / "model.safetensors").read_bytes()[:9000])
    (place / "vector.yaml").write_text(
        "base: base\nexperts: {two: two, three: three, four: four}\nmethod: task_arithmetic\n"
        'parameters: {scale: 1.0}\nvector: "three + 0.5 * (four - two)"\n'
    )


# --- weights ----------------------------------------------------------------------------------------------------------


def _draw(shape: tuple[int, ...], chance: torch.Generator, reach: float, grid: float = GRID) -> torch.Tensor:
    """Whole multiples of `grid` in [-reach, reach]."""
    most = int(reach / grid)
    return torch.randint(-most, most + 1, shape, generator=chance).to(torch.float32) * grid


def _weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Tensors:
    chance = torch.Generator().manual_seed(seed)
    drawn = {key: _draw(shape, chance, 0.25) for key, shape in shapes.items()}
    for key, value in drawn.items():
        if key.lower().endswith("norm.weight") or ("layernorm" in key and key.endswith("weight")):
            drawn[key] = 1.0 + value * 0.25
        elif "embeddings" in key and key.endswith(("weight", "token", "embeddings")):
            drawn[key] = value * 4
    return drawn


def _moved(base: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """The base after "fine-tuning": every entry a little elsewhere, some much further than others."""
    chance = torch.Generator().manual_seed(seed)
    moved = {}
    for key, value in base.items():
        step = _draw(tuple(value.shape), chance, 0.03125)
        far = torch.randint(0, 16, tuple(value.shape), generator=chance) == 0
        moved[key] = value + torch.where(far, step * 4, step)
    return moved


def _factors(base: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of every query and value matrix, on a grid so coarse that base + B A is exact in float32."""
    chance = torch.Generator().manual_seed(seed)
    keys = [key for key in base if key.endswith(("query.weight", "value.weight"))]
    return {
        key: (_draw((RANK, base[key][1]), chance, 0.25, 2**-7), _draw((base[key][0], RANK), chance, 0.25, 2**-7))
        for key in keys
    }


def _product_moved(base: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """The base with the adapter's products added."""
    pairs = _factors(_bert_shapes(), seed)
    return {key: value + pairs[key][1] @ pairs[key][0] if key in pairs else value for key, value in base.items()}


def _head(classes: int, seed: int) -> Tensors:
    chance = torch.Generator().manual_seed(1000 + seed)
    return {"classifier.weight": _draw((classes, WIDTH), chance, 1.0), "classifier.bias": torch.zeros(classes)}


def _bert_shapes() -> dict[str, tuple[int, ...]]:
    import transformers

    model = transformers.BertModel(transformers.BertConfig(**BERT))
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _vit_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes by the names on disk, which are not those in memory."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.cls_token": (1, 1, WIDTH),
        "embeddings.position_embeddings": (1, 5, WIDTH),
        "embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 4, 4),
        "embeddings.patch_embeddings.projection.bias": (WIDTH,),
    }
    square = ("attention.query", "attention.key", "attention.value", "output.dense")
    parts = {f"attention.{part}": (WIDTH, WIDTH) for part in square}
    parts |= {"intermediate.dense": (WIDE, WIDTH), "output.dense": (WIDTH, WIDE)}
    layer: dict[str, tuple[int, ...]] = {**parts, "layernorm_before": (WIDTH,), "layernorm_after": (WIDTH,)}
    modules = {f"encoder.layer.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    for name, shape in {**modules, "layernorm": (WIDTH,)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


# --- inputs -----------------------------------------------------------------------------------------------------------


def _labelled(inputs: list[Any], tensors: Tensors, config: Mapping[str, Any]) -> tuple[list[Row], torch.Tensor]:
    """Inputs with the labels that the expert itself gives them, split by split, and the bias of its head.

    Only inputs of which the expert is sure are kept, as many of each class as there are, class by class in turn.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        _write_folder(Path(name) / "expert", tensors, config)
        loaded = getattr(transformers, config["architectures"][0]).from_pretrained(Path(name) / "expert").eval()
    with torch.no_grad():
        logits = loaded(**(_pixels(inputs) if config["model_type"] == "vit" else _tokens(inputs))).logits
    # A bias on a coarse grid makes the classes about equally frequent; it is the same on every CPU.
    bias = -torch.round(logits.median(dim=0).values * 16) / 16
    best = (logits + bias).topk(2, dim=1)
    sure = best.values[:, 0] - best.values[:, 1] > 0.05
    of_class: dict[int, list[Any]] = {}
    for item, top, clear in zip(inputs, best.indices[:, 0].tolist(), sure.tolist(), strict=True):
        if clear:
            of_class.setdefault(top, []).append(item)
    classes, rows = len(config["id2label"]), list[Row]()
    for split, count in COUNTS.items():
        for number in range(count):
            # Every ninth label is wrong, so that no score is 100 %.
            label = (number + (number % 9 == 8)) % classes
            rows.append((split, of_class[number % classes].pop(), label))
    return rows, bias


def _tokens(texts: list[str]) -> Tensors:
    ids = torch.zeros(len(texts), 12, dtype=torch.int64)
    for row, text in enumerate(texts):
        numbers = [2, *(5 + WORDS.index(word) for word in text.split()), 3]
        ids[row, : len(numbers)] = torch.tensor(numbers)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def _pixels(images: list[Any]) -> Tensors:
    return {"pixel_values": torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1}


# --- files ------------------------------------------------------------------------------------------------------------


def _write_folder(
    folder: Path, tensors: Tensors, config: Mapping[str, Any], beside: Callable[[Path], None] | None = None
) -> None:
    folder.mkdir()
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if beside is not None:
        beside(folder)


def _write_preprocessor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def _write_tokenizer(folder: Path) -> None:
    unused = [f"[unused{n}]" for n in range(VOCABULARY - 5 - len(WORDS))]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *unused]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')


def _write_adapter(folder: Path, seed: int, full: Tensors) -> None:
    """Write an adapter as peft does: two factors per matrix, and the head whole."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": "base", "r": RANK, "lora_alpha": RANK,
        "target_modules": ["query", "value"], "modules_to_save": ["classifier", "score"], "bias": "none",
        "lora_dropout": 0.0, "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
    tensors = {f"base_model.model.{key}": full[key] for key in ("classifier.weight", "classifier.bias")}
    for key, (a, b) in _factors(_bert_shapes(), seed).items():
        at = f"base_model.model.bert.{key.removesuffix('.weight')}"
        tensors |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _labels(labels: Mapping[int, str]) -> dict[str, Any]:
    return {"id2label": {str(n): label for n, label in labels.items()}, "label2id": {v: n for n, v in labels.items()}}
