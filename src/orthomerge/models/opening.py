"""How experts and their base are named and read: plain data, which is saved with every output.

A live `PreTrainedModel`, with its tokenizer or image processor if it has one, may be given instead of a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import build
from orthomerge.files.checkpoint import Checkpoint, Entry
from orthomerge.files.raw_file import MemoryFile
from orthomerge.models.tensors import spec_of

Named = Mapping[str, Any] | Sequence[str | Path]

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
# Names of files and folders that an output has beside those of its tasks.
_RESERVED = ("readme.md", "orthomerge.json", "orthomerge.local.json")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class HeadNames:
    """Where a head is, if not where its family keeps it; or what a CLIP head is made of.

    `layers`: names of the layers, first to last (`[fc]`, or `[head.dense, head.out]` with an `activation` between).
    `classes` and `templates`: a zero-shot head, through the base's text tower.
    """

    layers: tuple[str, ...] | None = None
    activation: Literal["tanh", "relu", "gelu"] | None = None
    classes: tuple[str, ...] | None = None
    templates: tuple[str, ...] = ("a photo of a {}.",)

    def __post_init__(self) -> None:
        count = 1 if self.layers is None else len(self.layers)
        if count not in (1, 2):
            raise RecipeError(f"a head has one or two 'layers', got {count}")
        if (count == 2) != (self.activation is not None):
            raise RecipeError("a head of two 'layers' has an 'activation' between them, and only such a head has one")


@dataclass(frozen=True)
class Expert:
    """One fine-tuned classifier: a folder, a file, an adapter or a hub id."""

    path: str
    prefix: str | None = None
    labels: tuple[str, ...] | None = None
    head: HeadNames | None = None

    def __post_init__(self) -> None:
        if self.labels == () or (self.head is not None and self.head.classes == ()):
            raise RecipeError(f"the expert {self.path} has an empty list of labels; name at least one, or leave it out")


@dataclass(frozen=True)
class Opening:
    """Base and experts as a user names them, and how each is read.

    `pooling`: how all heads read the encoder; None: as each expert says, else the family's default. `ignore`: patterns
    of tensors to leave out. `missing`: what to do where an expert lacks a tensor of the base.
    """

    experts: Mapping[str, Expert]
    base: str | None = None
    family: str | None = None
    encoder_prefix: str | None = None
    pooling: str | None = None
    ignore: tuple[str, ...] = ()
    missing: Literal["error", "base"] = "error"
    check_base: bool = True

    def __post_init__(self) -> None:
        check_task_names(self.experts)


@dataclass(frozen=True, eq=False)
class Live:
    """A model in memory; `processor`: its tokenizer or image processor, if one was given."""

    model: Any
    processor: Any = None


def opening_of(
    experts: Named,
    *,
    base: Any = None,
    heads: Mapping[str, HeadNames | Mapping[str, Any]] | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
    **options: Any,
) -> tuple[Opening, dict[str, Live]]:
    """What to open, and the models in memory among it (the base under ""). `options`: other fields of `Opening`."""
    heads, labels = heads or {}, labels or {}
    named = experts if isinstance(experts, Mapping) else {_task_name(path): path for path in experts}
    if len(named) < len(experts):
        raise RecipeError("two experts have folders of the same name; give a mapping from task name to path")
    for what, keys in (("labels", labels), ("heads", heads)):
        for task in keys:
            if task not in named:
                raise RecipeError(f"'{what}' names {task!r}, which is no expert; {nearest(task, named)}")
    live = {task: model for task, value in {**named, "": base}.items() if (model := as_live(value)) is not None}
    opened: dict[str, Expert] = {}
    for task, value in named.items():
        expert = value if isinstance(value, Expert) else Expert(reference(f"the expert of {task!r}", value))
        if task in labels:
            if isinstance(labels[task], str):
                raise RecipeError(f"the 'labels' of {task!r} must be a list of names, got one text")
            expert = replace(expert, labels=tuple(labels[task]))
        if task in heads:
            head = heads[task]
            names = head if isinstance(head, HeadNames) else build(HeadNames, head, where=f"the head of {task!r}")
            expert = replace(expert, head=names)
        opened[task] = expert
    return Opening(opened, None if base is None else reference("the base", base), **options), live


def experts_by_name(words: Sequence[str]) -> dict[str, str]:
    """Experts of a command line: `NAME=EXPERT`, or a path or hub id that names the task itself."""
    named = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not _TASK.fullmatch(name):
            name, path = _task_name(word), word
        if not path:
            raise RecipeError(f"an expert must be written EXPERT or NAME=EXPERT, got {word!r}")
        if name in named:
            raise RecipeError(f"two experts are called {name!r}; give one another name: NAME={path}")
        named[name] = path
    return named


def reference(role: str, value: object) -> str:
    """A base or an expert as text; neither a `Path` nor a live model is ever taken for a hub id."""
    if as_live(value) is not None:
        return f"<{role} in memory>"
    if isinstance(value, Path):
        return str(value) if value.is_absolute() or str(value).startswith("~") else f"./{value}"
    if isinstance(value, str):
        return value
    raise RecipeError(
        f"{role} must be a path, a hub id or a live model of transformers, got {type(value).__name__}; "
        "a merged model is opened from its folder"
    )


def check_task_names(tasks: Mapping[str, object]) -> None:
    """Refuse names of tasks that cannot be names of folders."""
    if not tasks:
        raise RecipeError("'experts' is empty: name at least one")
    for task in tasks:
        if not _TASK.fullmatch(task):
            raise RecipeError(
                f"{task!r} cannot name an expert: use letters, digits and _ . + - (it becomes the name of a folder)"
            )
        if task.casefold() in _RESERVED:
            raise RecipeError(f"{task!r} cannot name an expert, because every output has a file of that name")
    if len({task.casefold() for task in tasks}) < len(tasks):
        raise RecipeError("two experts have names that differ in case only, which not every file system can tell apart")


def as_live(value: object) -> Live | None:
    """A live model from a model or a pair (model, processor); None for anything else."""
    parts = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(parts) <= 2 or not (hasattr(parts[0], "state_dict") and hasattr(parts[0], "config")):
        return None
    if hasattr(parts[0], "peft_config"):
        raise RecipeError("a live PEFT model must be merged first: give model.merge_and_unload(), or its saved folder")
    return Live(*parts)


def live_checkpoint(role: str, live: Live) -> Checkpoint:
    """The tensors of a live model, not copied, with its config."""
    file = MemoryFile(Path(f"<{role} in memory>"))
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in live.model.state_dict().items():
        spec = spec_of(tensor, f"{name!r} of the live model of {role!r}")
        owner = owners.setdefault((tensor.data_ptr(), spec.shape), name)
        if owner != name and tensor.numel():
            aliases[name] = owner
        else:
            entries[name] = Entry(file, file.add(tensor), spec)
    config = json.loads(live.model.config.to_json_string())  # as in the config.json of a saved model
    return Checkpoint(file.path, entries, config=config, aliases=aliases, in_memory=True)


def _task_name(path: str | Path) -> str:
    """The task of an expert that is given by its path alone: `topic` for models/topic, topic.pth, org/topic@main."""
    name = Path(path).name.partition("@")[0]
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in _WEIGHT_FILES else name
