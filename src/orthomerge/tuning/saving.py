"""Writing an expert as everybody else would: a stock transformers classifier, or a PEFT adapter.

Modules of transformers 5 have other names than the tensors it saves, so the encoder is saved by transformers itself
and read back; what is written are those names under the family's prefix, the head's beside them, and the config.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from orthomerge.checkpoints.checkpoint import DTYPES, Spec
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.checkpoints.publish import write_json
from orthomerge.checkpoints.replacing import os_errors
from orthomerge.checkpoints.shards import write_shards
from orthomerge.models.config import classifier_config, encoder_config
from orthomerge.models.load import quiet
from orthomerge.output import companions
from orthomerge.recipe import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from orthomerge.heads import Head
    from orthomerge.models.family import Family

__all__ = ["write_adapter", "write_expert"]

_PARTS = {1: ("",), 2: ("hidden.", "")}


def write_expert(
    folder: Path, encoder: nn.Module, head: Head, *, family: Family, base: Path, notes: Mapping[str, Any]
) -> None:
    """Fill a folder with encoder, head (where the family can keep one), tokenizer or processor, and config."""
    heads = _head_tensors(head, family)
    names = {getattr(torch, name): short for short, (_, name) in DTYPES.items()}
    with TemporaryDirectory(dir=folder) as place:
        with quiet(), os_errors():
            encoder.save_pretrained(place)  # type: ignore[operator]
        saved = open_checkpoint(Path(place))
        saved = family.adapt(saved) if family.adapt else saved
        specs = {family.prefix + key: saved.spec(key) for key in saved}
        specs |= {name: Spec(tuple(tensor.shape), names[tensor.dtype]) for name, tensor in heads.items()}
        # Wide elements first, so that all are aligned.
        order = sorted(specs, key=lambda name: -DTYPES[specs[name].dtype][0])

        def blocks() -> Iterator[tuple[str, torch.Tensor]]:
            for name in order:
                yield name, heads[name] if name in heads else saved[name.removeprefix(family.prefix)]

        write_shards(folder, {name: specs[name] for name in order}, blocks(), most=parse_size("5GB"))
    _write_documents(folder, head.labels, family=family, base=base, notes=notes)


def write_adapter(
    folder: Path, adapted: Any, labels: tuple[str, ...], *, family: Family, base: Path, notes: Mapping[str, Any]
) -> None:
    """Fill a folder with a PEFT adapter, and with the config of the classifier that it makes of the base."""
    with quiet(), os_errors():
        import transformers

        adapted.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody filled in
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    class_name = family.architecture or family.encoder_class
    config["auto_mapping"] = {
        "base_model_class": class_name,
        "parent_library": getattr(transformers, class_name).__module__,
    }
    # Sets come in any order; the same run must give the same bytes.
    write_json(path, {key: sorted(item) if _is_names(item) else item for key, item in sorted(config.items())})
    _write_documents(folder, labels, family=family, base=base, notes=notes)


def _write_documents(
    folder: Path, labels: tuple[str, ...], *, family: Family, base: Path, notes: Mapping[str, Any]
) -> None:
    """Config last: without it the folder is no model to anybody."""
    for path in companions(base):
        shutil.copyfile(path, folder / path.name)
    config = encoder_config(open_checkpoint(base).config or {}, family, "float32")
    if family.head is not None:
        config = classifier_config(config, family, labels)
        if family.architecture is None:
            del config["architectures"]
    write_json(folder / "config.json", {**config, "orthomerge": {"labels": list(labels), **notes}})


def _head_tensors(head: Head, family: Family) -> dict[str, torch.Tensor]:
    """The head's tensors by their names in a stock checkpoint; none where the family makes its head from text."""
    if family.head is None:
        return {}
    tensors = head.tensors()
    return {
        f"{layer}.{piece}": tensors[part + piece]
        for layer, part in zip(family.head.layers, _PARTS[len(family.head.layers)], strict=True)
        for piece in ("weight", "bias")
        if part + piece in tensors
    }


def _is_names(item: object) -> bool:
    return isinstance(item, list) and all(isinstance(name, str) for name in item)
