"""A task's classifier on disk: a head with its labels and, where an aligner needed more than a head, its tensors.

FOLDER/head.safetensors    weight, bias, hidden.weight, hidden.bias: those that the head has
FOLDER/labels.json         labels in the order of the rows, how the head reads features, and the kind of the extra
FOLDER/extra.safetensors   what comes before the head; only with aligners whose classifier is not a head
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from orthomerge.checkpoints.checkpoint import DTYPES, Spec
from orthomerge.checkpoints.documents import read_json
from orthomerge.checkpoints.publish import write_json
from orthomerge.checkpoints.safetensors import read_safetensors
from orthomerge.checkpoints.shards import write_shards
from orthomerge.errors import CheckpointError, RecipeError, nearest, some
from orthomerge.heads import Activation, Head, Linear
from orthomerge.manifest import is_labels

if TYPE_CHECKING:
    import torch

    from orthomerge.alignment.aligner import Extra

__all__ = ["EXTRA", "HEAD", "load_classifier", "load_head", "rebuilt", "write_classifier"]

HEAD = "head.safetensors"
EXTRA = "extra.safetensors"
_LABELS = "labels.json"


def write_classifier(folder: Path, classifier: Head | Extra) -> None:
    """One task's classifier and its labels, verified."""
    head = classifier if isinstance(classifier, Head) else classifier.head
    folder.mkdir(parents=True)
    about: dict[str, Any] = {"labels": list(head.labels), "activation": head.activation, "normalise": head.normalise}
    _write_tensors(folder, HEAD, head.tensors())
    if not isinstance(classifier, Head):
        _write_tensors(folder, EXTRA, classifier.extra_tensors())
        about["extra"] = classifier.kind
    write_json(folder / _LABELS, about)


def load_classifier(folder: Path) -> Head | Extra:
    """One task's classifier: a head, or a head behind the module of an aligner."""
    labels, activation, normalise, kind = _read_labels(folder / _LABELS)
    path, extra = folder / HEAD, folder / EXTRA
    parts = _read_tensors(path)
    _check_parts(parts, path, rows=len(labels), activation=activation)
    hidden = Linear(parts["hidden.weight"], parts.get("hidden.bias")) if "hidden.weight" in parts else None
    head = Head(Linear(parts["weight"], parts.get("bias")), labels, hidden, activation, normalise)
    if kind is not None:
        return rebuilt(kind, head, _read_tensors(extra), where=extra)
    if extra.exists():
        raise CheckpointError(
            f"{extra} belongs to no aligner that {_LABELS} names; fetch the folder again, or align again"
        )
    return head


def load_head(folder: Path) -> Head:
    """One task's head; a classifier that is more than a head is refused, for its head alone would say other things."""
    found = load_classifier(folder)
    if not isinstance(found, Head):
        raise RecipeError(
            f"the classifier in {folder} is a head behind a module of {found.kind!r}, not a head; "
            "use orthomerge.load, or align the merge with an aligner that gives a head, such as auto"
        )
    return found


def rebuilt(kind: str, head: Head, tensors: Mapping[str, torch.Tensor], *, where: Path) -> Extra:
    """The classifier of an aligner of the table that gives more than a head; `where` is for messages."""
    from orthomerge.alignment.aligners import aligners

    known = {name: row for name, row in aligners().items() if row.extra}
    if kind not in known:
        raise CheckpointError(
            f"{where} belongs to the aligner {kind!r:.80}, which this version does not know ({nearest(kind, known)}); "
            "update orthomerge, or align again"
        )
    odd = [name for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if odd:
        raise CheckpointError(f"{where}: {some(odd)} must be in floating point; fetch the folder again, or align again")
    module = import_module(known[kind].maker.partition(":")[0])
    return cast("Extra", module.rebuild(head, tensors))


def _write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    import torch

    names = {getattr(torch, dtype): short for short, (_, dtype) in DTYPES.items()}
    specs = {key: Spec(tuple(tensor.shape), names[tensor.dtype]) for key, tensor in tensors.items()}
    written = write_shards(folder, specs, tensors.items(), most=2**62)
    (folder / written[0].name).rename(folder / name)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    entries = read_safetensors(path)
    return {name: entry.read(0, entry.spec.numel).reshape(entry.spec.shape) for name, entry in entries.items()}


def _read_labels(path: Path) -> tuple[tuple[str, ...], Activation | None, bool, str | None]:
    """Labels, activation, whether features are scaled to unit length, and the aligner whose module comes first."""
    document = read_json(path)
    way_out = "the file is damaged: fetch the folder again, or merge again"
    labels, activation, normalise, extra = (
        document.get(part) for part in ("labels", "activation", "normalise", "extra")
    )
    if labels is None or not is_labels(labels):
        raise CheckpointError(f"{path}: 'labels' must be a list of strings, got {labels!r:.80}; {way_out}")
    if "activation" not in document or (activation is not None and activation not in get_args(Activation)):
        known = ", ".join(get_args(Activation))
        raise CheckpointError(f"{path}: 'activation' must be null or one of {known}, got {activation!r:.80}; {way_out}")
    if not isinstance(normalise, bool):
        raise CheckpointError(f"{path}: 'normalise' must be true or false, got {normalise!r:.80}; {way_out}")
    if extra is not None and not isinstance(extra, str):
        raise CheckpointError(f"{path}: 'extra' must be the name of an aligner, got {extra!r:.80}; {way_out}")
    return tuple(labels), activation, normalise, extra


def _check_parts(parts: Mapping[str, torch.Tensor], path: Path, *, rows: int, activation: str | None) -> None:
    """A head's tensors must be those of one or two linear layers that fit each other and the labels."""
    way_out = "fetch the folder again, or merge again"
    if "weight" not in parts:
        raise CheckpointError(f"{path} has no 'weight', without which it is no head; {way_out}")
    odd = sorted(set(parts) - {"weight", "bias", "hidden.weight", "hidden.bias"})
    if odd or ("hidden.bias" in parts and "hidden.weight" not in parts):
        raise CheckpointError(f"{path} holds {some(odd or ['hidden.bias'])}, which is no part of this head; {way_out}")
    if ("hidden.weight" in parts) != (activation is not None):
        raise CheckpointError(
            f"{path} has {'a' if 'hidden.weight' in parts else 'no'} hidden layer, but the activation in labels.json "
            f"is {activation or 'null'}; they go together: {way_out}"
        )
    for name, tensor in parts.items():
        if tensor.dim() != (2 if name.endswith("weight") else 1) or not tensor.is_floating_point():
            shape = tuple(tensor.shape)
            raise CheckpointError(f"{path}: {name!r} is {shape} {tensor.dtype}, not that of a linear layer; {way_out}")
    if len(parts["weight"]) != rows:
        raise CheckpointError(f"{path} has {len(parts['weight'])} rows, but labels.json has {rows} labels; {way_out}")
    hidden = parts.get("hidden.weight")
    bias, hidden_bias = parts.get("bias"), parts.get("hidden.bias")
    if (
        (hidden is not None and len(hidden) != parts["weight"].shape[1])
        or (bias is not None and len(bias) != rows)
        or (hidden is not None and hidden_bias is not None and len(hidden_bias) != len(hidden))
    ):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in parts.items())
        raise CheckpointError(f"{path} has layers that do not fit together ({shapes}); {way_out}")
