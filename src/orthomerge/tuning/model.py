"""Trainable models: an encoder with one head per task, LoRA through peft, and their files.

LoRA: Hu et al. 2022, arXiv 2106.09685; on the layers of KnOTS (Stoica et al. 2025, arXiv 2410.19735): query, key, value
and output, and the head trained whole. The adapter's names are those of the stock classifier.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from orthomerge.core.checks import parse_size
from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError, nearest
from orthomerge.core.version import VERSION
from orthomerge.files.documents import write_json
from orthomerge.files.folders import EXPERT, write_marker
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.replacing import os_errors, remove_file
from orthomerge.files.safetensors import write_shards
from orthomerge.models.families import family as find_family
from orthomerge.models.families import family_for
from orthomerge.models.family import Family, HeadLayout, classifier_config, named_tensors
from orthomerge.models.heads import Head, Linear
from orthomerge.models.networks import LinearisedEncoder
from orthomerge.models.problems import base_problems, check_problems
from orthomerge.models.processors import companions
from orthomerge.models.skeleton import Skeleton, encoder_config, quiet
from orthomerge.models.split import split_base
from orthomerge.models.tensors import FileTensors, MemoryTensors
from orthomerge.tuning.settings import Tuning

_SPREAD = 0.02  # standard deviation of a new head's weights, as in transformers; biases are zero
_ATTENTION = re.compile(r"(^|[._])(self_?)?att(entio)?n([._]|$)", re.IGNORECASE)


class OrdinaryEncoder(nn.Module):
    """An encoder with the interface of `LinearisedEncoder`."""

    def __init__(self, family: Family, pooling: str, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self._family, self._pooling = family, pooling

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._family.features(self.encoder, batch, self._pooling)

    def tuned(self) -> nn.Module:
        return self.encoder


class TrainableHead(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self._like = head
        self.layers = nn.ModuleList(_layer(linear) for linear in (head.hidden, head.output) if linear is not None)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self._like.normalise:
            features = nn.functional.normalize(features, dim=-1)
        *hidden, output = self.layers
        for layer in hidden:
            features = getattr(nn.functional, self._like.activation or "")(layer(features))
        logits: torch.Tensor = output(features)
        return logits

    def head(self, labels: tuple[str, ...]) -> Head:
        *hidden, output = [_linear(layer) for layer in self.layers]
        return Head(output, labels, hidden[0] if hidden else None, self._like.activation, self._like.normalise)


class Model(nn.Module):
    """An encoder, and the heads of its tasks in order."""

    def __init__(self, encoding: OrdinaryEncoder | LinearisedEncoder, heads: list[TrainableHead]) -> None:
        super().__init__()
        self.encoding = encoding
        self.heads = nn.ModuleList(heads)

    def forward(self, batch: Mapping[str, torch.Tensor], number: int = 0) -> torch.Tensor:
        """Logits of task `number`, [B, C]."""
        logits: torch.Tensor = self.heads[number](self.encoding(batch))
        return logits

    def head(self, number: int) -> TrainableHead:
        return cast("TrainableHead", self.heads[number])


def choose_family(base: Path, name: str | None, *, head: Head | None) -> Family:
    """Choose the family by name or by the base's config; CLIP without a head gets a linear one."""
    checkpoint = open_checkpoint(base)
    kind = (checkpoint.config or {}).get("model_type")
    if kind is None:
        raise CheckpointError(f"{base} must have a config.json with a 'model_type'; give the base as a folder")
    family = find_family(name) if name is not None else family_for(str(kind), checkpoint)
    if kind not in family.model_types:
        raise RecipeError(f"{base} is of model type {kind!r}, family {family.name!r} reads {family.model_types[0]!r}")
    return find_family("clip_classifier") if name is None and family.name == "clip" and head is None else family


def load_base(base: Path, family: Family, pooling: str) -> Skeleton:
    if pooling not in family.poolings:
        raise RecipeError(f"unknown pooling {pooling!r} for {family.name}; {nearest(pooling, family.poolings)}")
    checkpoint = family.adapted(open_checkpoint(base))
    split = split_base(checkpoint.specs, family)
    check_problems(base_problems(checkpoint, split))
    tensors = FileTensors({key: (checkpoint, name) for key, name in split.names.items()})
    specs = {key: spec.cast("F32") for key, spec in tensors.specs.items()}
    skeleton = Skeleton.build(family, encoder_config(checkpoint.config or {}, family), specs)
    skeleton.fill(tensors)
    return skeleton


def start_head(
    head: Head | None, layout: HeadLayout | None, labels: tuple[str, ...], *, width: int, generator: torch.Generator
) -> TrainableHead:
    """Make the initial head: `head` in the task's order of labels, or a new one."""
    if head is None:
        if layout is None:
            raise RecipeError("this family has no head; give one as `head` (CLIP: zero_shot_head)")
        *hidden, output = [
            Linear(torch.empty(size, width).normal_(0, _SPREAD, generator=generator), torch.zeros(size))
            for size in [width] * (len(layout.layers) - 1) + [len(labels)]
        ]
        return TrainableHead(Head(output, labels, hidden[0] if hidden else None, layout.activation))
    if head.width != width:
        raise IncompatibleError(f"the head reads {head.width} features, the encoder gives {width}; check the pooling")
    if layout is not None and not layout.fits(head):
        raise IncompatibleError(
            f"the layers of the head differ from the family's own ({', '.join(layout.layers)}), so no checkpoint can "
            "store it; give a head with these layers, or none"
        )
    return TrainableHead(head.reordered(labels))


def add_adapter(model: Model, family: Family, *, base: Path, settings: Tuning) -> Any:
    """Add a LoRA adapter to the model's encoder, and return the peft model, which can save it."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RecipeError("mode 'lora' needs peft: pip install peft") from error
    stock = _stock_layout(model, family)
    linear = [name for name, module in stock.named_modules() if isinstance(module, nn.Linear)]
    targets = sorted(name for name in linear if _ATTENTION.search(name) is not None)
    if not targets:
        raise RecipeError(
            f"no attention projections were found in {family.encoder_class}; use another mode than 'lora'"
        )
    layers = list(family.head.layers) if family.head else []
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets,
        modules_to_save=layers or None,
        base_model_name_or_path=str(base),
    )
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.name_or_path = str(base)  # type: ignore[assignment]
        adapted = get_peft_model(stock, config)
    if layers:
        model.head(0).layers = nn.ModuleList(stock.get_submodule(layer) for layer in layers)
    return adapted


def _stock_layout(model: Model, family: Family) -> nn.Module:
    encoder = model.encoding.tuned()
    if family.head is None:  # CLIP without a head: the encoder is the stock class
        return encoder
    stock = nn.Module()
    # CLIP's classifier has no prefix before its vision tower.
    place, inner = family.prefix.removesuffix("."), encoder
    if not place:
        place, inner = "vision_model", getattr(encoder, "vision_model", encoder)
    stock.add_module(place, inner)
    for name, layer in zip(family.head.layers, model.head(0).layers, strict=True):
        parent, _, last = name.rpartition(".")
        if parent and parent not in dict(stock.named_children()):
            stock.add_module(parent, nn.Module())
        stock.get_submodule(parent).add_module(last, layer)
    return stock


def write_weights(folder: Path, encoder: nn.Module, names: Mapping[str, str], head: Head, family: Family) -> None:
    """Write encoder and head (where the family can store one). `names`: on disk, without prefix -> in the module."""
    state = encoder.state_dict()
    named = {family.prefix + key: state[name] for key, name in names.items()}
    named |= named_tensors(family, head) if family.head is not None else {}
    tensors = MemoryTensors(named)
    write_shards(folder, dict(tensors.specs), tensors.blocks(), max_bytes=parse_size("5GB"))


def write_adapter(folder: Path, adapted: Any, family: Family) -> None:
    with quiet(), os_errors():
        import transformers

        adapted.save_pretrained(str(folder), save_embedding_layers=False)
    remove_file(folder / "README.md")  # an empty template
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    remove_file(path)
    class_name = family.architecture or family.encoder_class
    config["auto_mapping"] = {
        "base_model_class": class_name,
        "parent_library": getattr(transformers, class_name).__module__,
    }
    # Sorted, because sets have no order and the same run must write the same bytes.
    for key in ("target_modules", "modules_to_save"):
        config[key] = config[key] and sorted(config[key])
    write_json(path, dict(sorted(config.items())))


def write_documents(
    folder: Path, labels: tuple[str, ...], *, family: Family, base: Path, notes: Mapping[str, Any]
) -> None:
    """Write tokenizer or processor, the config of the classifier, and last the marker that lists all files."""
    for path in companions(base):
        shutil.copyfile(path, folder / path.name)
    config = encoder_config(open_checkpoint(base).config or {}, family)
    if family.head is None:
        config |= {"architectures": [family.encoder_class], "dtype": "float32"}
    else:
        config = classifier_config(config, family, labels, "float32")
        if family.architecture is None:
            del config["architectures"]
    write_json(folder / "config.json", {**config, "orthomerge": {"labels": list(labels), **notes}})
    write_marker(folder, EXPERT, orthomerge=VERSION, notes=dict(notes))


def _layer(linear: Linear) -> nn.Linear:
    size, width = linear.weight.shape
    layer = nn.Linear(width, size, bias=linear.bias is not None)
    layer.load_state_dict({name: tensor for name, tensor in vars(linear).items() if tensor is not None})
    return layer


def _linear(layer: nn.Module) -> Linear:
    weight, bias = layer.get_parameter("weight"), getattr(layer, "bias", None)
    return Linear(weight.detach().cpu().clone(), None if bias is None else bias.detach().cpu().clone())
