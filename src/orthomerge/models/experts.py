"""Experts as models, and the experts of a saved model, opened again from its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.core.schema import build
from orthomerge.models.heads import Extra, Head
from orthomerge.models.model import Model
from orthomerge.models.model_data import Encoder, Origin
from orthomerge.models.opening import Opening, live_models, reference
from orthomerge.models.sources import Opened
from orthomerge.models.tensors import Tensors, content_digest


class Experts(Opened):
    """A base and its experts, opened and compared; if there are problems, only `problems` and `notes` can be read."""

    @cached_property
    def base(self) -> Model:
        return self.model(self.tensors(""), {}, Origin({"method": {"name": "base", "parameters": {}}}))

    @cached_property
    def sources(self) -> dict[str, Model]:
        origin = Origin({"method": {"name": "expert", "parameters": {}}})
        return {task: self.model(self.tensors(task), {task: self.heads[task]}, origin) for task in self.tasks}

    def teacher(self, task: str) -> Model:
        """Return the expert that owns the head of a task."""
        return self.sources[task]

    def model(self, tensors: Tensors, heads: Mapping[str, Head | Extra], origin: Origin) -> Model:
        """Make a model of the same family, config and processor with other weights."""
        return Model(Encoder(self.family, self.config, tensors), heads, self.processor, origin)


def reopen_experts(
    model: Model,
    *,
    folder: Path | None = None,
    base: Any = None,
    experts: Mapping[str, Any] | None = None,
    tasks: Iterable[str] | None = None,
) -> Experts:
    """Open a model's experts again, at `base` and `experts` if they moved, and compare hashes with those recorded."""
    named, wanted = dict(experts or {}), tuple(model.tasks if tasks is None else tasks)
    for task in (*named, *wanted):
        model.head(task)
    if isinstance(model.origin.experts, Experts) and not named and base is None:
        return model.origin.experts
    record = model.origin.record
    if not record.get("opening"):
        raise RecipeError("this model has no record of how its experts were opened; merge again, or give open experts")
    recorded = record["opening"]
    fields = {task: recorded.get("experts", {}).get(task) or {} for task in wanted}
    places = {**named, "": base if recorded.get("base") else None}
    entries = {task: {**row, "path": _path_of(model, task, places.get(task))} for task, row in fields.items()}
    base_path = None
    if recorded.get("base"):
        # The base is needed if experts take tensors from it, or if its text tower makes their heads.
        makes_heads = any((row.get("head") or {}).get("classes") for row in fields.values())
        base_path = _path_of(model, "", base, needed=recorded.get("missing") == "base" or makes_heads)
    opening = build(
        Opening, {**recorded, "experts": entries, "base": base_path}, where=f"{folder or 'the model'}: opening"
    )
    opened = Experts(opening, live_models(places)).check()
    _check_same(opened, record["inputs"])
    return opened


def _path_of(model: Model, task: str, named: Any, *, needed: bool = True) -> str | None:
    """Present path of an expert, or of the base (task ""); None for a base that is neither found nor needed."""
    if named is not None:
        return reference(_role(task), named)
    place = model.origin.places.get(task)
    if place is not None and Path(place).exists():
        return reference(_role(task), Path(place))
    if not needed:
        return None
    recorded = "" if place is None else f" (it was at {place})"
    flag = f"--expert {task}=PATH" if task else "--base PATH"
    raise CheckpointError(f"{_role(task)} was not found{recorded}; give its path: {flag}")


def _check_same(experts: Experts, inputs: Mapping[str, Any]) -> None:
    for task, checkpoint in experts.checkpoints().items():
        entry = inputs["experts"].get(task) if task else inputs["base"]
        if entry is None or not (task or experts.has_base):
            continue
        if "content" in entry or checkpoint.in_memory:  # a live model has no files to hash
            same = content_digest(experts.tensors(task), experts.family.prefix) == entry.get("content")
        else:
            same = sorted(file.digest() for file in checkpoint.files) == sorted(file["hash"] for file in entry["files"])
        if not same:
            raise IncompatibleError(
                f"{_role(task)} at {checkpoint.path} is not the one that the model was made from: its hash differs; "
                "give the path of the right one, or merge again"
            )


def _role(task: str) -> str:
    return f"the expert of {task!r}" if task else "the base"
