"""Where the encoder ends in a checkpoint: every tensor is named, none is guessed.

A checkpoint may keep its encoder under any prefix (`bert.`, `module.model.`). The right one is that under which *all*
tensors of the base are, with the same shapes. If there is no such prefix, or more than one, that is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orthomerge.core.errors import IncompatibleError, some
from orthomerge.files.checkpoint import Checkpoint, Spec
from orthomerge.files.documents import read_json
from orthomerge.files.folders import contained
from orthomerge.files.lora import Adapter
from orthomerge.models.family import Family, HeadLayout, matches
from orthomerge.models.opening import Expert

# Put around a whole model by training loops.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.")
TIED = "tied to "  # why a second name of the same weights is left out
OWN_HEAD = "the base's own head"
_IGNORED = "ignored as asked"
_FOREIGN = "not part of the encoder"


@dataclass(frozen=True)
class Split:
    """What each tensor of a checkpoint is.

    `names`: canonical encoder name -> name in the checkpoint. `head`: part (`weight`, `hidden.bias`, ...) -> name.
    `left_out`: name -> why. `unknown`: neither. `prefixes`: every prefix under which the whole encoder is.
    """

    names: dict[str, str]
    head: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Source:
    """One expert, opened and split; `labels` are in the order of the head's rows."""

    expert: Expert
    checkpoint: Checkpoint | Adapter
    specs: Mapping[str, Spec]
    config: Mapping[str, Any]
    split: Split
    layout: HeadLayout | None
    labels: tuple[str, ...]
    pooling: str
    max_length: int | None = None


def split_base(
    specs: Mapping[str, Spec], family: Family, *, prefix: str | None = None, ignore: tuple[str, ...] = ()
) -> Split:
    """Split a base model, which defines the canonical names."""
    outer = _outer_wrapper(specs)
    if prefix is None:
        inner = outer + family.prefix
        prefix = inner if any(key.startswith(inner) for key in specs) else outer
    heads = set(family.head.parts().values()) if family.head else set()
    names: dict[str, str] = {}
    left_out: dict[str, str] = {}
    unknown: list[str] = []
    for key in specs:
        bare, name = key.removeprefix(outer), key.removeprefix(prefix)
        target = family.tied.get(name, name)
        if matches(bare, ignore) or matches(key, ignore):
            left_out[key] = _IGNORED
        elif bare in heads:
            left_out[key] = OWN_HEAD
        elif matches(bare, family.foreign):
            left_out[key] = _FOREIGN
        elif not key.startswith(prefix):
            unknown.append(key)
        elif target in names or (target != name and prefix + target in specs):
            left_out[key] = f"{TIED}{target}"
        else:
            names[target] = key
    return Split(names, {}, left_out, tuple(unknown), (prefix,))


def split_expert(
    specs: Mapping[str, Spec],
    family: Family,
    reference: Mapping[str, Spec],
    *,
    pooling: str,
    prefix: str | None = None,
    layout: HeadLayout | None = None,
    ignore: tuple[str, ...] = (),
) -> Split:
    """Split an expert. `reference`: the base's tensors by canonical name."""
    prefixes = _fitting_prefixes(specs, family, reference, pooling=pooling, prefix=prefix)
    prefix = prefixes[0]
    names = _encoder_names(specs, family, prefix, reference)
    outer = prefix.removesuffix(family.prefix)
    head = _head_names(specs, outer, layout or family.head)
    left_out: dict[str, str] = {}
    unknown: list[str] = []
    placed = {*names.values(), *head.values()}
    for key in (key for key in specs if key not in placed):
        bare, name = key.removeprefix(outer), key.removeprefix(prefix)
        if matches(bare, ignore) or matches(key, ignore):
            left_out[key] = _IGNORED
        elif family.tied.get(name) in names:
            left_out[key] = f"{TIED}{family.tied[name]}"
        elif matches(bare, family.foreign) or matches(key, family.foreign):
            left_out[key] = _FOREIGN
        elif family.may_lack(name, pooling):
            left_out[key] = "optional, and not in the base"
        else:
            unknown.append(key)
    return Split(names, head, left_out, tuple(sorted(unknown)), prefixes)


def with_stock_names(source: Checkpoint | Adapter, family: Family) -> Checkpoint | Adapter:
    """The same tensors under the names of stock transformers."""
    if isinstance(source, Checkpoint):
        return family.adapted(source)
    # Adapters name modules, which transformers 5 renamed without renaming what it saves: use the saved names.
    entries = {**{name: factors.b for name, factors in source.products.items()}, **source.replaced}
    return source.under(dict(zip(family.adapted(Checkpoint(source.path, entries)), entries, strict=True)))


def model_config(source: Checkpoint | Adapter) -> Mapping[str, Any]:
    """The config of a model; `finetune` writes that of an adapter's classifier beside the adapter."""
    if isinstance(source, Checkpoint):
        return source.config or {}
    path = source.path / "config.json"
    return read_json(contained(path, source.path)) if path.is_file() else {}


def stored_labels(config: Mapping[str, Any], specs: Mapping[str, Spec], split: Split) -> tuple[str, ...]:
    """Class names in the order of the head's rows; `LABEL_0`, ... where the checkpoint has none."""
    rows = next(iter(specs[split.head["weight"]].shape), 0) if "weight" in split.head else 0
    numbered = tuple(f"LABEL_{number}" for number in range(rows))
    stored = config.get("id2label")
    if not stored:
        return numbered
    names = {str(key): str(name) for key, name in stored.items()} if isinstance(stored, dict) else {}
    keys = [str(number) for number in range(len(names))]  # a live model's config counts in numbers
    if not names or names.keys() != set(keys):
        shown = some(stored) if isinstance(stored, dict | list) else repr(stored)[:60]
        raise IncompatibleError(f"'id2label' must number the classes from 0 on, it has {shown}; give 'labels'")
    only_numbers = all(name == f"LABEL_{key}" for key, name in names.items())
    return numbered if only_numbers and len(names) != rows else tuple(names[key] for key in keys)


def _outer_wrapper(specs: Iterable[str]) -> str:
    outer, keys = "", list(specs)
    while keys and (next_ := next((w for w in _WRAPPERS if all(key.startswith(outer + w) for key in keys)), None)):
        outer += next_
    return outer


def _fitting_prefixes(
    specs: Mapping[str, Spec], family: Family, reference: Mapping[str, Spec], *, pooling: str, prefix: str | None
) -> tuple[str, ...]:
    """The prefixes under which most of the needed tensors are; of these, those with the right shapes, if any."""
    needed = {key: spec for key, spec in reference.items() if not family.may_lack(key, pooling)} or dict(reference)
    if prefix is not None:
        return (prefix if not prefix or prefix.endswith(".") else f"{prefix}.",)
    under = {each: _encoder_names(specs, family, each, needed) for each in _possible_prefixes(specs, family, needed)}
    most = max(map(len, under.values()))
    best = {each: names for each, names in under.items() if len(names) == most}
    fitting = [
        each
        for each, names in best.items()
        if names and all(specs[name].shape == needed[key].shape for key, name in names.items())
    ]
    return tuple(fitting or list(best)[:1])  # what is still in doubt is for the user to say


def _possible_prefixes(specs: Mapping[str, Spec], family: Family, needed: Iterable[str]) -> list[str]:
    """Every prefix under which some needed tensor is, most plausible first."""
    keys = list(needed)
    anchors = [*keys[:1], *keys[len(keys) // 2 : len(keys) // 2 + 1], *keys[-1:]]
    names = [name for anchor in anchors for name in (anchor, *_ties(family, anchor))]
    ends = [(key, name) for name in names for key in specs if key == name or key.endswith("." + name)]
    return list(dict.fromkeys((family.prefix, "", *(key.removesuffix(name) for key, name in ends))))


def _encoder_names(specs: Mapping[str, Spec], family: Family, prefix: str, wanted: Iterable[str]) -> dict[str, str]:
    """Canonical name -> name in the checkpoint, for wanted tensors that are there, maybe under a tied name."""
    names = {key: [prefix + each for each in (key, *_ties(family, key)) if prefix + each in specs] for key in wanted}
    return {key: present[0] for key, present in names.items() if present}


def _head_names(specs: Mapping[str, Spec], outer: str, layout: HeadLayout | None) -> dict[str, str]:
    """Part of a head -> name; weight and bias of a layer are both under the wrapper, or both without it."""
    names = {}
    for part, name in (layout.parts() if layout else {}).items():
        wrapped = f"{outer}{name.rpartition('.')[0]}.weight" in specs
        names[part] = outer + name if wrapped else name
    return {part: name for part, name in names.items() if name in specs}


def _ties(family: Family, key: str) -> list[str]:
    return [alias for alias, target in family.tied.items() if target == key]
