"""Opening the experts of a saved model again, exactly as the merge did, without being told how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.core.schema import build
from orthomerge.files.hashing import algorithm_of
from orthomerge.files.paths import RawFile
from orthomerge.models.experts import Experts, open_experts
from orthomerge.models.live import Live, as_live
from orthomerge.models.opening import Opening, reference
from orthomerge.models.tensors import content_digest

if TYPE_CHECKING:
    from orthomerge.models.model import Model


def reopen_experts(
    model: Model,
    *,
    folder: Path | None = None,
    base: Any = None,
    experts: Mapping[str, Any] | None = None,
    tasks: Iterable[str] | None = None,
) -> Experts:
    """The experts of a model. `base` and `experts` only say where they are now; the recorded hashes decide.

    `folder`: where the model was read, for messages. `tasks`: whose experts are needed, all by default.
    """
    named, wanted = dict(experts or {}), tuple(model.tasks if tasks is None else tasks)
    for task in (*named, *wanted):
        model.head(task)
    if model.origin.experts is not None and not named and base is None:
        return model.origin.experts
    record = model.origin.record
    if not record.get("opening"):
        raise RecipeError("this model does not say how its experts were opened; merge again, or give open experts")
    live: dict[str, Live] = {}
    places = {task: _place(model, task, named.get(task), live) for task in wanted}
    where = None
    if record["opening"].get("base"):
        where = _place(model, "", base, live, needed=_needs_base(record["opening"], wanted))
    opening = _opening(record["opening"], places, where, source=f"{folder or 'the model'}: how it was made")
    opened = open_experts(opening, live).check()
    _compare(opened, record["inputs"], wanted)
    return opened


def _place(model: Model, task: str, named: Any, live: dict[str, Live], *, needed: bool = True) -> str | None:
    """Where an expert, or the base (task ""), is now; None for a base that was not found and is not needed."""
    role = f"the expert of {task!r}" if task else "the base"
    if named is not None:
        if (memory := as_live(named)) is not None:
            live[task] = memory
        return reference(role, named)
    place = model.origin.places.get(task)
    if place is not None and Path(place).exists():
        return reference(role, Path(place))
    if not needed:
        return None
    was = "" if place is None else f" (it was at {place})"
    flag = f"--expert {task}=PATH" if task else "--base PATH"
    raise CheckpointError(f"{role} was not found{was}; say where it is: {flag}")


def _needs_base(recorded: Mapping[str, Any], tasks: Iterable[str]) -> bool:
    """Whether experts cannot be read without the base: it has their tensors, or makes their heads."""
    read = recorded.get("experts", {})
    return recorded.get("missing") == "base" or any(
        ((read.get(task) or {}).get("head") or {}).get("classes") for task in tasks
    )


def _opening(
    recorded: Mapping[str, Any], places: Mapping[str, str | None], base: str | None, *, source: str
) -> Opening:
    """The recorded way of opening, with base and experts where they are now."""
    read = recorded.get("experts", {})
    experts = {task: {**(read.get(task) or {}), "path": path} for task, path in places.items()}
    return build(Opening, {**recorded, "experts": experts, "base": base}, where=source)


def _compare(experts: Experts, inputs: Mapping[str, Any], tasks: Iterable[str]) -> None:
    """Whether base and experts are, byte for byte, those that the model was made from."""
    sources = experts.parts.sources
    opened = {
        task: (f"the expert of {task!r}", sources[task].checkpoint, inputs["experts"].get(task)) for task in tasks
    }
    if experts.has_base:
        opened[""] = ("the base", experts.parts.base, inputs["base"])
    for task, (who, checkpoint, entry) in opened.items():
        if entry is None:
            continue
        if "content" in entry or checkpoint.in_memory:  # of a live model, only its tensors can be recognised
            here = experts.base if task == "" else experts.teacher(task)
            same = content_digest(here.weights, experts.family.prefix) == entry.get("content")
        else:
            hashes = [file["hash"] for file in entry["files"]]
            files = (
                [RawFile(file.path, algorithm=algorithm_of(hashes[0])) for file in checkpoint.files] if hashes else []
            )
            same = sorted(file.digest() for file in files) == sorted(hashes)
        if not same:
            raise IncompatibleError(
                f"{who} at {checkpoint.path} is not the one that the model was made from: its hash differs; "
                "say where the right one is, or merge again"
            )
