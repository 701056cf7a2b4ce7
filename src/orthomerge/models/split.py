"""Where the encoder ends in a given checkpoint: every tensor named, none guessed.

A checkpoint may keep its encoder under any prefix (`bert.`, `module.model.`). The prefix is not guessed from a list: it
is the one under which *all* tensors of the base are found, with the same shapes. If there is no such prefix, or more
than one, that is an error that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from orthomerge.files.checkpoint import Spec
from orthomerge.models.family import Family, HeadLayout

# Put around a whole model by training loops.
_WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.")
TIED = "tied to "  # why a second name of the same weights is left out
_PARTS = {1: ("",), 2: ("hidden.", "")}


@dataclass(frozen=True)
class Split:
    """What each tensor of a checkpoint is.

    `names`: canonical encoder name -> name in the checkpoint. `head`: `weight`, `bias`, `hidden.weight`,
    `hidden.bias` -> name. `left_out`: name -> why. `unknown`: neither. `missing`: encoder tensors that are not there.
    `prefixes`: every prefix under which the whole encoder was found; exactly one is right.
    """

    names: dict[str, str]
    head: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ("",)


def split_base(
    specs: Mapping[str, Spec], family: Family, *, prefix: str | None = None, ignore: tuple[str, ...] = ()
) -> Split:
    """Split a base model, which defines the canonical names."""
    outer = _outer_wrapper(specs)
    if prefix is None:
        inner = outer + family.prefix
        prefix = inner if any(key.startswith(inner) for key in specs) else outer
    heads = set(family.head.names()) if family.head else set()
    names: dict[str, str] = {}
    left_out: dict[str, str] = {}
    unknown: list[str] = []
    for key in specs:
        bare, name = key.removeprefix(outer), key.removeprefix(prefix)
        if _matches(bare, ignore) or _matches(key, ignore):
            left_out[key] = "ignored as asked"
        elif bare in heads:
            left_out[key] = "the base's own head"
        elif _matches(bare, family.foreign):
            left_out[key] = "not part of the encoder"
        elif not key.startswith(prefix):
            unknown.append(key)
        elif (twin := family.tied.get(name, name)) in names or (prefix + twin in specs and twin != name):
            left_out[key] = f"{TIED}{twin}"
        else:
            names[twin] = key
    return Split(names, {}, left_out, tuple(unknown), (), (prefix,))


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
    """Split an expert against the base's canonical tensors."""
    needed = [key for key in reference if not family.may_lack(key, pooling)] or list(reference)
    if prefix is not None:
        candidates = [prefix if not prefix or prefix.endswith(".") else f"{prefix}."]
    else:
        candidates = _prefixes(specs, family, needed)
    scores = {
        candidate: sum(_found(specs, family, candidate, key) is not None for key in needed) for candidate in candidates
    }
    best = max(scores.values(), default=0)
    chosen = [candidate for candidate in candidates if scores[candidate] == best]
    # Among prefixes that hold the same number of names, shapes decide; what is still in doubt is for the user to say.
    fitting = [p for p in chosen if best and _shapes_fit(specs, family, p, reference, needed)]
    prefixes = tuple(fitting or chosen[:1])
    prefix = prefixes[0]

    names = {key: found for key in reference if (found := _found(specs, family, prefix, key)) is not None}
    outer = prefix.removesuffix(family.prefix)
    head = _head_names(specs, outer, layout or family.head)
    placed = {*names.values(), *head.values()}
    left_out: dict[str, str] = {}
    unknown: list[str] = []
    for key in specs:
        if key in placed:
            continue
        bare, name = key.removeprefix(outer), key.removeprefix(prefix)
        if _matches(bare, ignore) or _matches(key, ignore):
            left_out[key] = "ignored as asked"
        elif name in family.tied and family.tied[name] in names:
            left_out[key] = f"{TIED}{family.tied[name]}"
        elif _matches(bare, family.foreign) or _matches(key, family.foreign):
            left_out[key] = "not part of the encoder"
        elif family.may_lack(name, pooling):
            left_out[key] = "optional, and not in the base"
        else:
            unknown.append(key)
    missing = tuple(key for key in reference if key not in names)
    return Split(names, head, left_out, tuple(sorted(unknown)), missing, prefixes)


def _outer_wrapper(specs: Iterable[str]) -> str:
    """Wrappers that every tensor shares."""
    outer = ""
    keys = list(specs)
    while keys and (found := next((w for w in _WRAPPERS if all(key.startswith(outer + w) for key in keys)), None)):
        outer += found
    return outer


def _prefixes(specs: Mapping[str, Spec], family: Family, needed: list[str]) -> list[str]:
    """Every prefix under which some needed tensor lies, most plausible first, without judging yet."""
    anchors = needed[:1] + needed[len(needed) // 2 : len(needed) // 2 + 1] + needed[-1:]
    found = {family.prefix: None, "": None}
    for anchor in anchors:
        for name in (anchor, *(alias for alias, target in family.tied.items() if target == anchor)):
            for key in specs:
                if key == name or key.endswith("." + name):
                    found.setdefault(key.removesuffix(name), None)
    return list(found)


def _found(specs: Mapping[str, Spec], family: Family, prefix: str, key: str) -> str | None:
    """The name of canonical tensor `key` in the checkpoint; a tied twin will do."""
    if prefix + key in specs:
        return prefix + key
    return next(
        (prefix + alias for alias, target in family.tied.items() if target == key and prefix + alias in specs),
        None,
    )


def _shapes_fit(
    specs: Mapping[str, Spec], family: Family, prefix: str, reference: Mapping[str, Spec], needed: list[str]
) -> bool:
    found = {key: _found(specs, family, prefix, key) for key in needed}
    return all(name is None or specs[name].shape == reference[key].shape for key, name in found.items())


def _head_names(specs: Mapping[str, Spec], outer: str, layout: HeadLayout | None) -> dict[str, str]:
    if layout is None:
        return {}
    found: dict[str, str] = {}
    for layer, part in zip(layout.layers, _PARTS[len(layout.layers)], strict=True):
        place = f"{outer}{layer}" if f"{outer}{layer}.weight" in specs else layer
        found |= {part + piece: f"{place}.{piece}" for piece in ("weight", "bias") if f"{place}.{piece}" in specs}
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
