"""Opened checkpoints as parts of a merge: which tensors are encoder and head, and how a head reads the encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import IncompatibleError, NumericalError, RecipeError, some
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.documents import read_json
from orthomerge.files.links import contained
from orthomerge.files.lora import Adapter
from orthomerge.models.families import family as find_family
from orthomerge.models.families import family_for, generic
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.heads import Head
from orthomerge.models.opening import Expert, HeadNames, Opening
from orthomerge.models.split import Split

if TYPE_CHECKING:
    import torch


_LINEARISED = ("linearised", "tau_jp")


@dataclass(frozen=True)
class Source:
    """One expert, opened and split. `labels` are in the order of the head's rows."""

    expert: Expert
    checkpoint: Checkpoint | Adapter
    split: Split
    layout: HeadLayout | None
    labels: tuple[str, ...]
    pooling: str
    max_length: int | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        return model_config(self.checkpoint)


@dataclass(frozen=True)
class Parts:
    """Base and experts, split. `merged` and `copied` are the encoder's tensors by canonical name."""

    family: Family
    base: Checkpoint
    base_split: Split
    sources: Mapping[str, Source]
    merged: Mapping[str, Spec]
    copied: Mapping[str, Spec]


def model_config(source: Checkpoint | Adapter) -> Mapping[str, Any]:
    """What a model says of itself; beside an adapter, its classifier's config.json may lie, as `finetune` writes it."""
    if isinstance(source, Checkpoint):
        return source.config or {}
    path = source.path / "config.json"
    return read_json(contained(path, source.path)) if path.is_file() else {}


def choose_family(opening: Opening, base: Checkpoint, opened: Mapping[str, Checkpoint | Adapter]) -> Family:
    """The family as named, else by the first config that has a model type."""
    if opening.family == "generic" or (opening.family is None and opening.encoder_prefix is not None):
        return generic(opening.encoder_prefix or "")
    if opening.family is not None:
        return find_family(opening.family)
    full = [source for source in (base, *opened.values()) if isinstance(source, Checkpoint)]
    configs = [source.config for source in full if source.config and "model_type" in source.config]
    if not configs:
        raise RecipeError(
            "no config.json says what kind of model this is; "
            "name it as 'family' (bert, vit, ... or generic with 'encoder_prefix')"
        )
    # Which of two families with one model type it is shows in an expert, not in the base.
    keys = [name for source in opened.values() for name in specs_of(source)]
    return family_for(str(configs[0]["model_type"]), keys or list(base))


def with_stock_names(source: Checkpoint | Adapter, family: Family) -> Checkpoint | Adapter:
    """The same tensors under the names of stock transformers."""
    if isinstance(source, Checkpoint):
        return family.adapted(source)
    if family.adapt is None:
        return source
    # Adapters name modules, which transformers 5 renamed without renaming what it saves: use the saved names.
    entries = {**{name: factors.b for name, factors in source.products.items()}, **source.replaced}
    names = dict(zip(family.adapt(Checkpoint(source.path, entries)), entries, strict=True))
    return source.under(names)


def specs_of(source: Checkpoint | Adapter) -> dict[str, Spec]:
    """Every tensor of a model, second names included."""
    if isinstance(source, Adapter):
        return dict(source.specs)
    return {key: source.spec(key) for key in (*source, *source.aliases)}


def head_layout(expert: Expert, family: Family) -> HeadLayout | None:
    """The layers of an expert's head: as named, else the family's."""
    if expert.head is not None and expert.head.layers:
        return HeadLayout(expert.head.layers, expert.head.activation, bool(family.head and family.head.normalise))
    return family.head


def stored_labels(source: Checkpoint | Adapter, specs: Mapping[str, Spec], split: Split) -> tuple[str, ...]:
    """Class names in the order of the rows; numbered, as transformers does, when the checkpoint has none."""
    rows = next(iter(specs[split.head["weight"]].shape), 0) if "weight" in split.head else 0
    named = model_config(source).get("id2label")
    if isinstance(named, dict):
        named = {str(key): value for key, value in named.items()}  # a live model's config counts in numbers
    if named and (not isinstance(named, dict) or set(named) != {str(number) for number in range(len(named))}):
        keys = some(named) if isinstance(named, dict | list) else repr(named)[:60]
        raise IncompatibleError(f"'id2label' must number the classes from 0 on, it has {keys}; give 'labels'")
    numbered = all(str(value) == f"LABEL_{key}" for key, value in (named or {}).items())
    if named and (len(named) == rows or not numbered):
        return tuple(str(named[str(number)]) for number in range(len(named)))
    return tuple(f"LABEL_{number}" for number in range(rows))


def merged_and_copied(
    sources: Mapping[str, Source], reference: Mapping[str, Spec]
) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """Which tensors are merged, and which are copied from the base."""
    held = {key for source in sources.values() for key in source.split.names}
    if any(isinstance(source.checkpoint, Adapter) for source in sources.values()):
        held |= reference.keys()  # an adapter leaves the rest as it is: zero deltas, which count as such in a trim
    merged = {key: spec for key, spec in reference.items() if is_float(spec.dtype) and key in held}
    return merged, {key: spec for key, spec in reference.items() if key not in merged}


def shared_checkpoints(opened: Mapping[str, Checkpoint | Adapter]) -> list[str]:
    """Experts that are one and the same file: fine for a model of several heads, else a slip of the pen."""
    tasks: dict[str, list[str]] = {}
    for task, source in opened.items():
        tasks.setdefault(str(source.path), []).append(task)
    return [f"{some(same)} are one model, {path}" for path, same in tasks.items() if len(same) > 1]


def linearised_experts(opened: Mapping[str, Checkpoint | Adapter]) -> list[str]:
    """The experts that say of themselves that they are tangent models."""
    notes = {task: (source.config or {}).get("orthomerge") for task, source in opened.items()}
    return [task for task, note in notes.items() if isinstance(note, dict) and note.get("mode") in _LINEARISED]


def read_head(base: Checkpoint, source: Source) -> Head:
    """The head of an expert, in the dtype in which it is stored; a zero-shot head is made from class names."""
    layout = source.layout
    if layout is None:
        from orthomerge.models.zero_shot import zero_shot_head

        templates = (source.expert.head or HeadNames()).templates
        head = zero_shot_head(base.path, source.labels, templates)
        return Head(head.output, head.labels, normalise=head.normalise, pooling=source.pooling)
    return Head.of(
        {part: _head_tensor(source.checkpoint, name) for part, name in source.split.head.items()},
        source.labels,
        activation=layout.activation,
        normalise=layout.normalise,
        pooling=source.pooling,
        max_length=source.max_length,
    )


def _head_tensor(checkpoint: Checkpoint | Adapter, name: str) -> torch.Tensor:
    import torch

    entry = checkpoint.entry(name) if isinstance(checkpoint, Checkpoint) else checkpoint.replaced[name]
    tensor = entry.read(0, entry.spec.numel).reshape(entry.spec.shape)
    if not torch.isfinite(tensor.float()).all():
        raise NumericalError(f"{entry.file.path}: the head's {name!r} holds NaN or infinity; find a sound checkpoint")
    return tensor
