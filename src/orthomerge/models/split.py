"""Splitting of a checkpoint into encoder, head and other tensors; every tensor is assigned by its name.

A checkpoint may keep its encoder under any prefix (`bert.`, `module.model.`). The right one has *all* tensors of the
base under it, with the same shapes. If there is no such prefix, or more than one, that is an error.
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

# Prefixes that training loops add to all names.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.")
TIED = "tied to "  # reason to leave out a second name of the same weights
OWN_HEAD = "the base's own head"
_IGNORED = "ignored as asked"
_FOREIGN = "not part of the encoder"


@dataclass(frozen=True)
class Split:
    """Assignment of a checkpoint's tensors to encoder and head.

    `names`: canonical encoder name -> name in the checkpoint. `head`: part (`weight`, `hidden.bias`, ...) -> name.
    `left_out`: name -> reason. `unknown`: all other names. `prefixes`: all prefixes that have the whole encoder.
    """

    names: dict[str, str]
    head: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class Source:
    """One expert, opened and split. `labels`: in the order of the head's rows."""

    expert: Expert
    checkpoint: Checkpoint | Adapter
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
    by_prefix = _names_by_prefix(specs, family, reference)
    if prefix is None:
        required = {key: spec for key, spec in reference.items() if not family.may_lack(key, pooling)}
        prefixes = _fitting_prefixes(by_prefix, specs, required or reference)
    else:
        prefixes = (prefix if not prefix or prefix.endswith(".") else f"{prefix}.",)
    prefix = prefixes[0]
    names = by_prefix.get(prefix, {})
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
    """Rename the tensors of a checkpoint or adapter to the names of stock transformers."""
    if isinstance(source, Checkpoint):
        return family.adapted(source)
    # Adapters have module names, which transformers 5 changed, unlike the names that it saves: use the saved names.
    entries = {**{name: factors.b for name, factors in source.products.items()}, **source.replaced}
    return source.under(dict(zip(family.adapted(Checkpoint(source.path, entries)), entries, strict=True)))


def model_config(source: Checkpoint | Adapter) -> Mapping[str, Any]:
    """Return the config of a model; for an adapter, the config.json that `finetune` writes beside it."""
    if isinstance(source, Checkpoint):
        return source.config or {}
    path = source.path / "config.json"
    return read_json(contained(path, source.path)) if path.is_file() else {}


def stored_labels(config: Mapping[str, Any], specs: Mapping[str, Spec], split: Split) -> tuple[str, ...]:
    """Read the class names in the order of the head's rows; `LABEL_0`, ... if the checkpoint has none."""
    rows = next(iter(specs[split.head["weight"]].shape), 0) if "weight" in split.head else 0
    numbered = tuple(f"LABEL_{number}" for number in range(rows))
    stored = config.get("id2label")
    if not stored:
        return numbered
    names = {str(key): str(name) for key, name in stored.items()} if isinstance(stored, dict) else {}
    keys = [str(number) for number in range(len(names))]  # the keys of a live model's config are numbers
    if not names or names.keys() != set(keys):
        shown = some(stored) if isinstance(stored, dict | list) else repr(stored)[:60]
        raise IncompatibleError(f"'id2label' must number the classes from 0, got {shown}; give 'labels'")
    only_numbers = all(name == f"LABEL_{key}" for key, name in names.items())
    return numbered if only_numbers and len(names) != rows else tuple(names[key] for key in keys)


def _outer_wrapper(specs: Iterable[str]) -> str:
    keys = list(specs)
    for wrapper in _WRAPPERS:
        if keys and all(key.startswith(wrapper) for key in keys):
            return wrapper + _outer_wrapper(key.removeprefix(wrapper) for key in keys)
    return ""


def _names_by_prefix(specs: Iterable[str], family: Family, reference: Mapping[str, Spec]) -> dict[str, dict[str, str]]:
    """Map each prefix with tensors of the base under it to their names, by canonical name; the family's comes first."""
    by_prefix: dict[str, dict[str, str]] = {family.prefix: {}, "": {}}
    for name in specs:
        prefix, rest = "", name
        while rest:
            key = family.tied.get(rest, rest)
            if key in reference:
                names = by_prefix.setdefault(prefix, {})
                if rest == key or key not in names:
                    names[key] = name
            first, _, rest = rest.partition(".")
            prefix += f"{first}."
    return {prefix: {key: names[key] for key in reference if key in names} for prefix, names in by_prefix.items()}


def _fitting_prefixes(
    by_prefix: Mapping[str, Mapping[str, str]], specs: Mapping[str, Spec], required: Mapping[str, Spec]
) -> tuple[str, ...]:
    """Find the prefixes that have most of the required tensors; of these, those with the right shapes, if any."""
    counts = {prefix: len(required.keys() & names) for prefix, names in by_prefix.items()}
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    fitting = [
        prefix
        for prefix in best
        if counts[prefix]
        and all(specs[name].shape == required[key].shape for key, name in by_prefix[prefix].items() if key in required)
    ]
    return tuple(fitting or best[:1])  # several are a problem that asks the user for 'prefix'


def _head_names(specs: Mapping[str, Spec], outer: str, layout: HeadLayout | None) -> dict[str, str]:
    """Map parts of a head to names; weight and bias of a layer both have the wrapper's prefix, or both lack it."""
    names = {}
    for part, name in (layout.parts() if layout else {}).items():
        names[part] = outer + name if f"{outer}{name.rpartition('.')[0]}.weight" in specs else name
    return {part: name for part, name in names.items() if name in specs}
