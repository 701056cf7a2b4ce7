"""Names and options of base and experts as plain data, which is saved with every output.

A live `PreTrainedModel`, alone or paired with its tokenizer or image processor, may be given instead of a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orthomerge.core.errors import RecipeError, nearest
from orthomerge.core.schema import build
from orthomerge.files.checkpoint import Checkpoint, Entry
from orthomerge.files.raw_file import MemoryTensor
from orthomerge.models.tensors import spec_of

Named = Mapping[str, Any] | Sequence[str | Path]

_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class HeadNames:
    """Layers of a head with other names than its family's, or class names of a CLIP head.

    `layers`: names of the layers, first to last (`[fc]`, or `[head.dense, head.out]` with an `activation` between).
    `classes` and `templates`: a zero-shot head is made from them with the base's text tower.
    """

    layers: tuple[str, ...] | None = None
    activation: Literal["tanh", "relu", "gelu"] | None = None
    classes: tuple[str, ...] | None = None
    templates: tuple[str, ...] = ("a photo of a {}.",)

    def __post_init__(self) -> None:
        count = 1 if self.layers is None else len(self.layers)
        if count not in (1, 2):
            raise RecipeError(f"'layers' of a head must be one or two names, got {count}; name its linear layers")
        if (count == 2) != (self.activation is not None):
            raise RecipeError("an 'activation' must be given for two 'layers' of a head, and only then; correct one")


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


@dataclass(frozen=True, kw_only=True)
class OpeningOptions:
    """The base as a user names it, and options of opening it with its experts.

    `pooling`: of all heads; None: that in each expert's config, else the family's default. `ignore`: patterns of
    tensors to leave out. `missing`: "error", or "base" to take tensors that an expert lacks from the base.
    """

    base: str | None = None
    family: str | None = None
    encoder_prefix: str | None = None
    pooling: str | None = None
    ignore: tuple[str, ...] = ()
    missing: Literal["error", "base"] = "error"
    check_base: bool = True


@dataclass(frozen=True)
class Opening(OpeningOptions):
    """Base and experts as a user names them, with the options of opening them."""

    experts: Mapping[str, Expert]

    def __post_init__(self) -> None:
        check_task_names(self.experts)


@dataclass(frozen=True, eq=False)
class Live:
    """A model in memory with its tokenizer or image processor, if one was given."""

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
    """Make an `Opening`, and a table of the models in memory (the base under ""). `options`: fields of `Opening`."""
    heads, labels = heads or {}, labels or {}
    named = experts if isinstance(experts, Mapping) else {_task_name(path): path for path in experts}
    if len(named) < len(experts):
        raise RecipeError("two experts have folders of the same name; give a mapping from task name to path")
    for option, tasks in (("labels", labels), ("heads", heads)):
        for task in tasks:
            if task not in named:
                raise RecipeError(f"'{option}' names {task!r}, which is no expert; {nearest(task, named)}")
    opened: dict[str, Expert] = {}
    for task, value in named.items():
        fields = (
            dict(vars(value)) if isinstance(value, Expert) else {"path": reference(f"the expert of {task!r}", value)}
        )
        options_of_task = {"labels": labels.get(task), "head": heads.get(task)}
        fields |= {name: option for name, option in options_of_task.items() if option is not None}
        opened[task] = build(Expert, fields, where=f"expert {task!r}")
    base_path = None if base is None else reference("the base", base)
    return Opening(opened, base=base_path, **options), live_models({**named, "": base})


def experts_by_name(words: Sequence[str]) -> dict[str, str]:
    """Parse the experts of a command line: `NAME=EXPERT`, or a path or hub id whose last part is the task's name."""
    named = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not _TASK.fullmatch(name):
            name, path = _task_name(word), word
        if not path:
            raise RecipeError(f"an expert must be written EXPERT or NAME=EXPERT, got {word!r}")
        if name in named:
            raise RecipeError(f"two experts have the name {name!r}; rename one: NAME={path}")
        named[name] = path
    return named


def reference(role: str, value: object) -> str:
    """Name a base or an expert as text; a `Path` or a live model never becomes a hub id."""
    if _is_live(value):
        return f"<{role} in memory>"
    if isinstance(value, Path):
        return str(value) if value.is_absolute() or str(value).startswith("~") else f"./{value}"
    if isinstance(value, str):
        return value
    raise RecipeError(
        f"{role} must be a path, a hub id or a live model of transformers, got {type(value).__name__}; "
        "give a merged model as its folder"
    )


def check_task_names(tasks: Mapping[str, object]) -> None:
    if not tasks:
        raise RecipeError("'experts' is empty; name at least one")
    for task in tasks:
        if not _TASK.fullmatch(task):
            raise RecipeError(f"{task!r} cannot name an expert and its folder; use letters, digits and _ . + -")
    if len({task.casefold() for task in tasks}) < len(tasks):
        raise RecipeError("two experts have names that differ in case only, the same to some file systems; rename one")


def live_models(named: Mapping[str, object]) -> dict[str, Live]:
    live = {}
    for name, value in named.items():
        if _is_live(value):
            live[name] = Live(*value) if isinstance(value, tuple) else Live(value)
            if hasattr(live[name].model, "peft_config"):
                raise RecipeError(
                    "a live PEFT model must be merged first; give model.merge_and_unload(), or its saved folder"
                )
    return live


def _is_live(value: object) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return 1 <= len(parts) <= 2 and hasattr(parts[0], "state_dict") and hasattr(parts[0], "config")


def live_checkpoint(role: str, live: Live) -> Checkpoint:
    """Present a live model as a checkpoint; its tensors are not copied."""
    path = Path(f"<{role} in memory>")
    entries: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in live.model.state_dict().items():
        spec = spec_of(tensor, f"{name!r} of the live model of {role!r}")
        owner = owners.setdefault((tensor.data_ptr(), spec.shape), name)
        if owner != name and tensor.numel():
            aliases[name] = owner
        else:
            entries[name] = Entry(MemoryTensor(path, tensor), 0, spec)
    config = json.loads(live.model.config.to_json_string())  # as in the config.json of a saved model
    return Checkpoint(path, entries, config=config, aliases=aliases, in_memory=True)


def _task_name(path: str | Path) -> str:
    """Derive a task name from a path or hub id: `topic` for models/topic, topic.pth and org/topic@main."""
    name = Path(path).name.partition("@")[0]
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in _WEIGHT_FILES else name
