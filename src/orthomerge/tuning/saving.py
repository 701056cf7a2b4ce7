"""Write an expert as a stock transformers classifier or a PEFT adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from orthomerge.core.checks import parse_size
from orthomerge.core.version import VERSION
from orthomerge.files.documents import write_json
from orthomerge.files.folders import EXPERT, write_marker
from orthomerge.files.opening import open_checkpoint
from orthomerge.files.replacing import os_errors, remove_file
from orthomerge.files.safetensors import write_shards
from orthomerge.models.family import Family, classifier_config, named_tensors
from orthomerge.models.heads import Head
from orthomerge.models.processors import companions
from orthomerge.models.skeleton import encoder_config, quiet
from orthomerge.models.tensors import MemoryTensors


def write_expert(
    folder: Path,
    encoder: nn.Module,
    names: Mapping[str, str],
    head: Head,
    *,
    family: Family,
    base: Path,
    notes: Mapping[str, Any],
) -> None:
    """Write encoder, head (where the family can store one), tokenizer or processor, and config.

    `names`: name on disk, without the family's prefix -> name in the encoder's state dict.
    """
    state = encoder.state_dict()
    named = {family.prefix + key: state[name] for key, name in names.items()}
    named |= named_tensors(family, head) if family.head is not None else {}
    tensors = MemoryTensors(named)
    write_shards(folder, dict(tensors.specs), tensors.blocks(), max_bytes=parse_size("5GB"))
    _write_documents(folder, head.labels, family=family, base=base, notes=notes)


def write_adapter(
    folder: Path, adapted: Any, labels: tuple[str, ...], *, family: Family, base: Path, notes: Mapping[str, Any]
) -> None:
    """Write a PEFT adapter, and the config of the classifier that base and adapter form."""
    with quiet(), os_errors():
        import transformers

        adapted.save_pretrained(str(folder), save_embedding_layers=False)
    remove_file(folder / "README.md")  # an empty template
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    remove_file(path)
    class_name = family.architecture or family.encoder_class
    library = getattr(transformers, class_name).__module__
    config["auto_mapping"] = {"base_model_class": class_name, "parent_library": library}
    # Sorted, because sets have no order and the same run must write the same bytes.
    for key in ("target_modules", "modules_to_save"):
        config[key] = config[key] and sorted(config[key])
    write_json(path, dict(sorted(config.items())))
    _write_documents(folder, labels, family=family, base=base, notes=notes)


def _write_documents(
    folder: Path, labels: tuple[str, ...], *, family: Family, base: Path, notes: Mapping[str, Any]
) -> None:
    """Write the config, and last the marker that lists all files."""
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
