"""Find the weights in the content of a pickle: a state dict, one inside a training checkpoint, or a module.

Several candidates are an error unless one of them has a usual name, because a guess could merge wrong weights.
"""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Final

from orthomerge.core.errors import CheckpointError, some
from orthomerge.files.stand_ins import Global, Object, Tensor

if TYPE_CHECKING:
    from pathlib import Path


_PREFERRED = ("state_dict", "model_state_dict", "model", "module")
_USUAL = (
    *_PREFERRED, "net", "network", "ema", "model_ema", "ema_model", "ema_state_dict", "weights", "params",
)  # fmt: skip
_TRAINING = re.compile(
    r"(.*_)?(opt|optim|optimi[sz]ers?|(lr_?)?sched(uler)?s?|(grad_?)?scaler|amp|rng|callbacks?|loops?)(_.*)?",
    re.IGNORECASE,
)
_MAX_LEVELS: Final = 8  # wrappers around the state dict
_MAX_MODULES: Final = 1_000_000
_MAX_PREFIX: Final = 4_096
_NOTHING: dict[object, object] = {}
_AGAIN: Final = "again with torch.save(model.state_dict(), ...)"


def find_weights(path: Path, root: object) -> dict[str, Tensor]:
    """Return the tensors by name, in the order of the state dict."""
    value = root
    for _ in range(_MAX_LEVELS):
        mapping = _mapping(value)
        is_module = _parts(value) is not None
        if not is_module and (key := _inner(path, mapping)) is not None:
            value = mapping[key]
            continue
        named = {name: item for name, item in mapping.items() if isinstance(name, str) and isinstance(item, Tensor)}
        tensors = _flatten(path, value) if is_module else named
        if not tensors:
            raise CheckpointError(f"{path} holds {_describe(value)} with no tensors by name; save it {_AGAIN}")
        return tensors
    raise CheckpointError(f"{path} wraps its weights in more than {_MAX_LEVELS} mappings; save them {_AGAIN}")


def _inner(path: Path, mapping: dict[object, object]) -> str | None:
    memo: dict[int, bool] = {}
    items = {key: item for key, item in mapping.items() if isinstance(key, str) and not _TRAINING.fullmatch(key)}
    inner = [key for key, item in items.items() if _has_weights(item, memo)]
    if any(isinstance(item, Tensor) for item in items.values()):
        # Tensors beside a wrapped state dict are a loss or a step; a module may have extra state.
        unusual = [key for key in inner if key not in _USUAL and not key.endswith("_extra_state")]
        inner = [key for key in inner if key in _USUAL]
        if unusual and not inner:
            raise CheckpointError(
                f"{path} holds tensors by name and, beside them, mappings of more tensors ({some(unusual)}); "
                "it is unclear which are the weights: save the state dict alone"
            )
    if len(inner) <= 1:
        return inner[0] if inner else None
    for name in _PREFERRED:
        if name in inner:
            return name
    raise CheckpointError(
        f"{path} holds several sets of weights ({some(inner)}) and none has a usual name "
        f"({', '.join(_PREFERRED)}); save the one that is meant as a file of its own"
    )


def _has_weights(value: object, memo: dict[int, bool]) -> bool:
    if _parts(value) is not None:
        return True
    mapping = _mapping(value)
    if "state" in mapping and "param_groups" in mapping:  # an optimiser by another name
        return False
    if id(mapping) not in memo:
        memo[id(mapping)] = False  # a mapping inside itself adds nothing
        memo[id(mapping)] = any(
            isinstance(item, Tensor) or (not _TRAINING.fullmatch(key) and _has_weights(item, memo))
            for key, item in mapping.items()
            if isinstance(key, str)
        )
    return memo[id(mapping)]


def _mapping(value: object) -> dict[object, object]:
    items = value.content if isinstance(value, Object) else value
    return items if isinstance(items, dict) else _NOTHING


def _parts(value: object) -> dict[object, object] | None:
    state = value.state if isinstance(value, Object) else None
    if isinstance(state, dict) and all(isinstance(state.get(name), dict) for name in ("_parameters", "_modules")):
        return state
    return None


def _flatten(path: Path, module: object) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, named and ordered as by `module.state_dict()` (without hooks)."""
    tensors: dict[str, Tensor] = {}
    visited = 0
    pending = [("", module)]
    while pending:
        prefix, module = pending.pop()
        visited += 1
        if len(prefix) > _MAX_PREFIX or visited > _MAX_MODULES:
            raise CheckpointError(
                f"{path} holds a module that contains itself, or too many ({prefix[:60]!r}...); "
                "save its state dict instead"
            )
        parts = _parts(module)
        if parts is None:
            raise CheckpointError(
                f"{path}: sub-module {prefix[:-1]!r} is {_describe(module)}, whose weights cannot be read without "
                "running its code; save the state dict instead"
            )
        transient = parts.get("_non_persistent_buffers_set")
        transient = transient if isinstance(transient, list | tuple) else ()
        buffers = {name: item for name, item in _mapping(parts.get("_buffers")).items() if name not in transient}
        for name, item in (*_mapping(parts["_parameters"]).items(), *buffers.items()):
            if not isinstance(name, str):
                raise UnpicklingError("a parameter has a name that is not text")
            if item is not None:
                tensors[f"{prefix}{name}"] = item if isinstance(item, Tensor) else Tensor(refused=_describe(item))
        children = [(f"{prefix}{name}.", item) for name, item in _mapping(parts["_modules"]).items()]
        pending += [child for child in reversed(children) if child[1] is not None]
    return tensors


def _describe(value: object) -> str:
    if isinstance(value, Object):
        return value.maker.path if isinstance(value.maker, Global) else "an object of unknown class"
    if isinstance(value, Tensor):
        return "a single tensor"
    return "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}"
