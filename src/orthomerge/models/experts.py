"""Experts as models, opened and compared; and those of a saved model, opened again from its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.core.schema import build
from orthomerge.files.raw_file import RawFile, algorithm_of
from orthomerge.models.heads import Extra, Head
from orthomerge.models.model import Model
from orthomerge.models.model_data import Encoder, Origin
from orthomerge.models.opening import Live, Opening, as_live, reference
from orthomerge.models.sources import Opened
from orthomerge.models.tensors import Tensors, content_digest


class Experts(Opened):
    """A base and source models; where there are problems, only `problems` and `notes` can be used."""

    @cached_property
    def base(self) -> Model:
        return self.model(self.tensors(""), {}, Origin({"method": {"name": "base", "parameters": {}}}))

    @cached_property
    def sources(self) -> dict[str, Model]:
        """Every expert as a model: its own bytes, its own head."""
        origin = Origin({"method": {"name": "expert", "parameters": {}}})
        return {task: self.model(self.tensors(task), {task: self.heads[task]}, origin) for task in self.tasks}

    def teacher(self, task: str) -> Model:
        """The model that owns the head of a task."""
        return self.sources[task]

    def model(self, tensors: Tensors, heads: Mapping[str, Head | Extra], origin: Origin) -> Model:
        """A model of the same family, config and processor, with other weights."""
        return Model(Encoder(self.family, self.config, tensors), heads, self.processor, origin)


def reopen_experts(
    model: Model,
    *,
    folder: Path | None = None,
    base: Any = None,
    experts: Mapping[str, Any] | None = None,
    tasks: Iterable[str] | None = None,
) -> Experts:
    """Open the experts of a model again and compare their hashes with those recorded.

    `base`, `experts`: where they are now. `folder`: where the model was read, for messages. `tasks`: all by default.
    """
    named, wanted = dict(experts or {}), tuple(model.tasks if tasks is None else tasks)
    for task in (*named, *wanted):
        model.head(task)
    if isinstance(model.origin.experts, Experts) and not named and base is None:
        return model.origin.experts
    record = model.origin.record
    if not record.get("opening"):
        raise RecipeError("this model does not say how its experts were opened; merge again, or give open experts")
    recorded = record["opening"]
    ways = {task: recorded.get("experts", {}).get(task) or {} for task in wanted}
    live: dict[str, Live] = {}
    places = {task: {**way, "path": _place(model, task, named.get(task), live)} for task, way in ways.items()}
    where = None
    if recorded.get("base"):
        # Experts cannot be read without the base where it has their tensors, or makes their heads.
        makes_heads = any((way.get("head") or {}).get("classes") for way in ways.values())
        where = _place(model, "", base, live, needed=recorded.get("missing") == "base" or makes_heads)
    source = f"{folder or 'the model'}: how it was made"
    opened = Experts(build(Opening, {**recorded, "experts": places, "base": where}, where=source), live).check()
    _check_same(opened, record["inputs"])
    return opened


def _place(model: Model, task: str, named: Any, live: dict[str, Live], *, needed: bool = True) -> str | None:
    """Where an expert, or the base (task ""), is now; None for a base that was not found and is not needed."""
    if named is not None:
        if (memory := as_live(named)) is not None:
            live[task] = memory
        return reference(_role(task), named)
    place = model.origin.places.get(task)
    if place is not None and Path(place).exists():
        return reference(_role(task), Path(place))
    if not needed:
        return None
    was = "" if place is None else f" (it was at {place})"
    flag = f"--expert {task}=PATH" if task else "--base PATH"
    raise CheckpointError(f"{_role(task)} was not found{was}; say where it is: {flag}")


def _check_same(experts: Experts, inputs: Mapping[str, Any]) -> None:
    """Base and experts must be, byte for byte, those that the model was made from."""
    for task, checkpoint in experts.checkpoints().items():
        entry = inputs["experts"].get(task) if task else inputs["base"]
        if entry is None or not (task or experts.has_base):
            continue
        if "content" in entry or checkpoint.in_memory:  # of a live model, only its tensors can be recognised
            same = content_digest(experts.tensors(task), experts.family.prefix) == entry.get("content")
        else:
            hashes = [file["hash"] for file in entry["files"]]
            paths = [file.path for file in checkpoint.files] if hashes else []
            digests = [RawFile(path, algorithm=algorithm_of(hashes[0])).digest() for path in paths]
            same = sorted(digests) == sorted(hashes)
        if not same:
            raise IncompatibleError(
                f"{_role(task)} at {checkpoint.path} is not the one that the model was made from: its hash differs; "
                "say where the right one is, or merge again"
            )


def _role(task: str) -> str:
    return f"the expert of {task!r}" if task else "the base"
