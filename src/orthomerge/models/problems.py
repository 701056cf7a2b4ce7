"""What does not fit between a base and its experts: every problem with its way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError, IncompatibleError, OrthomergeError, some
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.documents import read_json
from orthomerge.files.links import leaves
from orthomerge.files.lora import Adapter

if TYPE_CHECKING:
    from orthomerge.models.family import Family
    from orthomerge.models.split import Source, Split


_IN_MESSAGE = "as it says"  # the way out is within the message
_SAME_BASE = "all must come from the same base model"
_NAME_LAYERS = "name the head's layers: head: {layers: [...]}"
_STATISTICS = (".running_mean", ".running_var")
_MOST_BYTES = 64 << 20
_TOKENIZER = "tokenizer.json"
_VOCABULARIES = (
    *("vocab.txt", "vocab.json", "merges.txt", "spiece.model", "spm.model"),
    *("sentencepiece.bpe.model", "bpe.codes", _TOKENIZER),
)


@dataclass(frozen=True)
class Problem:
    """Where it is, what is wrong, and what to do; `error` is the class to raise for it."""

    where: str
    what: str
    fix: str
    error: type[OrthomergeError] = IncompatibleError

    @classmethod
    def of(cls, where: str, error: OrthomergeError) -> Problem:
        """A problem from an error, whose message ends with the way out."""
        what, separator, fix = str(error).rpartition("; ")
        return cls(where, what, fix, type(error)) if separator else cls(where, fix, _IN_MESSAGE, type(error))

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + ("" if self.fix == _IN_MESSAGE else f"; {self.fix}")


def check_problems(problems: Sequence[Problem]) -> None:
    """Raise an error that lists all problems, if there are any."""
    if len(problems) > 1:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise problems[0].error(f"{len(problems)} problems:\n{lines}")
    if problems:
        raise problems[0].error(str(problems[0]))


def base_problems(base: Checkpoint, split: Split) -> Iterator[Problem]:
    """Tensors of the base that nobody can place, or that no method can merge."""
    where = f"base ({base.path})"
    counted = [key for key in split.names if key.endswith(_STATISTICS)]
    if counted:
        what = f"{some(counted)} is a statistic of BatchNorm, which is true of one model and of no mixture"
        patterns = ", ".join(f"'*{name}'" for name in (*_STATISTICS, ".num_batches_tracked"))
        fix = f"leave it out (ignore: [{patterns}]) and count anew: a pass over inputs in train mode"
        yield Problem(where, what, fix)
    if split.unknown:
        yield Problem(
            where, f"{some(split.unknown)} is no part of the encoder", "list it under 'ignore' to leave it out"
        )
    if not split.names:
        yield Problem(where, "no encoder was found in it", "name its prefix as 'encoder_prefix'")


def code_problems(where: str, source: Checkpoint | Adapter, family: str | None) -> Iterator[Problem]:
    """A model whose config asks for Python code of its own: it is never run, so the stock class may not be the model.

    Whoever names the family says that it is.
    """
    asked = (source.config or {}).get("auto_map") if isinstance(source, Checkpoint) else None
    if asked and family is None:
        classes = some(asked.values()) if isinstance(asked, dict) else repr(asked)[:80]
        what = f"its config.json asks to run code that came with it ('auto_map': {classes}), which is never done"
        fix = "if a stock class computes the same, name it as 'family'; else use 'family: generic'"
        yield Problem(where, what, fix, CheckpointError)


def source_problems(
    where: str, source: Source, reference: Mapping[str, Spec], family: Family, base: Checkpoint, *, missing: str
) -> Iterator[Problem]:
    """Everything that does not fit between an expert and the base."""
    split, specs = source.split, source.specs
    ours, theirs = (config.get("model_type") for config in (base.config or {}, source.config))
    if ours and theirs and theirs not in (ours, *family.model_types):  # everything else follows from that
        yield Problem(where, f"it is a {theirs!r} model but the base is a {ours!r}", _SAME_BASE)
        return
    yield from _vocabulary(where, base.path, source.checkpoint.path)
    if len(split.prefixes) > 1:
        yield Problem(where, f"the encoder is found under {some(split.prefixes)} alike", "say which with 'prefix'")
    if not isinstance(source.checkpoint, Adapter):
        needed = [key for key in reference if not family.may_lack(key, source.pooling)]
        yield from _missing(where, source, needed, missing)
    elif not split.names:
        yield Problem(where, "none of the adapter's tensors is in the base", "give the base that it was trained on")
    yield from _shapes(where, split, specs, reference)
    if split.unknown:
        what = f"{some(split.unknown)} is neither encoder nor head"
        yield Problem(where, what, "list it under 'ignore' to leave it out, or name the head: head: {layers: [...]}")
    if source.layout is not None:
        yield from _head(where, source, _widths(base, family))
    elif not source.labels or not family.encoder_class:  # only a model that we can build makes a head of class names
        fix = "give class names: head: {classes: [...], templates: [...]}; or its layers: head: {layers: [...]}"
        yield Problem(where, "this family keeps no head in its checkpoints", fix)


def _vocabulary(where: str, base: Path, expert: Path) -> Iterator[Problem]:
    """Tables of one size can still be of different words: the same row would then mean two things."""
    try:
        for ours, theirs in ((base / name, expert / name) for name in _VOCABULARIES):
            if not (_is_readable(ours) and _is_readable(theirs)) or ours.read_bytes() == theirs.read_bytes():
                continue
            if _words(ours) != _words(theirs):
                fix = f"{_SAME_BASE}, with its tokenizer; or remove the tokenizer that is not the model's"
                yield Problem(where, f"{theirs} is another vocabulary than {ours}", fix)
                return
    except OSError as error:
        yield Problem(where, f"a file of its tokenizer cannot be read: {error}", "fetch it again", CheckpointError)
    except OrthomergeError as error:
        yield Problem.of(where, error)


def _is_readable(path: Path) -> bool:
    """Whether a file is there, and is none that the writer of the output refuses to copy."""
    return path.is_file() and not leaves(path, path.parent) and path.stat().st_size <= _MOST_BYTES


def _words(path: Path) -> object:
    """The words of a vocabulary in order; padding and truncation, which a tokenizer.json has too, may differ."""
    if path.name != _TOKENIZER:
        return path.read_bytes().split()
    document = read_json(path)
    model, added = document.get("model"), document.get("added_tokens")
    rows = added if isinstance(added, list) else []
    tokens = [(item.get("id"), item.get("content")) for item in rows if isinstance(item, dict)]
    return (model.get("vocab") if isinstance(model, dict) else None), tokens


def _missing(where: str, source: Source, needed: Sequence[str], policy: str) -> Iterator[Problem]:
    absent = [key for key in needed if key not in source.split.names]
    if absent and len(absent) == len(needed):
        what = f"none of the base's {len(needed)} encoder tensors is in it (it holds {some(source.specs)})"
        yield Problem(where, what, "if it is not another architecture, name its 'prefix'")
    elif absent and policy == "error":
        what = f"{some(absent)} is in the base but not in the expert"
        yield Problem(where, what, "if the expert was trained without it, set 'missing: base' to take the base's")


def _shapes(where: str, split: Split, specs: Mapping[str, Spec], reference: Mapping[str, Spec]) -> Iterator[Problem]:
    for key, name in split.names.items():
        ours, theirs = reference[key].dtype, specs[name].dtype
        if is_float(ours) and not is_float(theirs):
            what = f"{key!r} is {ours} in the base but {theirs} in the expert ({name!r})"
            yield Problem(where, what, "quantised weights must be converted to float first")
            break
    wrong = [key for key, name in split.names.items() if specs[name].shape != reference[key].shape]
    for key in wrong[:3]:
        what = f"{key!r} is {reference[key].shape} in the base but {specs[split.names[key]].shape} in the expert"
        yield Problem(where, what, _SAME_BASE)
    if len(wrong) > 3:
        yield Problem(where, f"{len(wrong) - 3} more tensors have other shapes than in the base", _SAME_BASE)


def _head(where: str, source: Source, widths: set[int]) -> Iterator[Problem]:
    head, specs, labels = source.split.head, source.specs, source.labels
    layers = source.layout.layers if source.layout else ()
    if "weight" not in head or (len(layers) == 2 and "hidden.weight" not in head):
        yield Problem(where, f"its head {some(layers)} is not in the checkpoint", _NAME_LAYERS)
        return
    odd = next((name for part, name in head.items() if not _is_part(part, specs[name], head, specs)), None)
    if odd is not None:
        what = f"{odd!r} of the head is {specs[odd].shape} {specs[odd].dtype}, which does not fit a linear classifier"
        yield Problem(where, what, _NAME_LAYERS)
        return
    first = head.get("hidden.weight", head["weight"])
    if widths and (width := specs[first].shape[1]) not in widths:
        sizes = " or ".join(map(str, sorted(widths)))
        yield Problem(where, f"{first!r} reads {width} features, but the encoder makes {sizes}", _SAME_BASE)
    rows, kind = specs[head["weight"]].shape[0], source.config.get("problem_type")
    if rows == 1 or kind in ("regression", "multi_label_classification"):
        what = f"{head['weight']!r} has {rows} rows, for {kind or 'a single number'}; heads here choose one class"
        yield Problem(where, what, "give an expert with a softmax over two classes or more, or leave this one out")
    if rows != len(labels):
        yield Problem(where, f"{head['weight']!r} has {rows} rows but there are {len(labels)} labels", "give 'labels'")
    if len(set(labels)) < len(labels):
        yield Problem(where, f"two of its labels are the same ({some(sorted(labels))})", "give distinct 'labels'")


def _widths(base: Checkpoint, family: Family) -> set[int]:
    """Possible numbers of features, by the config; DINOv2 joins the class token and the mean of the rest."""
    if not family.encoder_class:
        return set()
    config: Mapping[str, Any] = base.config or {}
    inner = config.get("vision_config")
    named = {**config, **inner} if isinstance(inner, Mapping) else config
    sizes = [named.get(name) for name in ("hidden_size", "dim", "d_model", "projection_dim")]
    times = (1, 2) if family.name == "dinov2" else (1,)
    return {size * number for size in sizes if type(size) is int for number in times}


def _is_part(part: str, spec: Spec, head: Mapping[str, str], specs: Mapping[str, Spec]) -> bool:
    """Whether a tensor can be that part of a head: matrices of floats that follow each other, biases of their rows."""
    if not is_float(spec.dtype):
        return False
    if part.endswith("weight"):
        follows = part == "hidden.weight" or "hidden.weight" not in head
        return len(spec.shape) == 2 and (follows or specs[head["hidden.weight"]].shape[:1] == spec.shape[1:])
    return spec.shape == specs[head[part.replace("bias", "weight")]].shape[:1]
