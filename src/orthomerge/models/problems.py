"""Problems between a base and its experts, each with a way to solve it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orthomerge.core.errors import CheckpointError, IncompatibleError, OrthomergeError, some
from orthomerge.files.checkpoint import Checkpoint, Spec, is_float
from orthomerge.files.documents import read_json
from orthomerge.files.folders import leaves
from orthomerge.files.lora import Adapter
from orthomerge.models.family import Family
from orthomerge.models.heads import misfit
from orthomerge.models.skeleton import tower_config
from orthomerge.models.split import Source, Split

_IN_MESSAGE = "see the message"  # the message has no separate advice
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
    """One problem: location, description and advice; `error` is the class to raise for it."""

    where: str
    what: str
    fix: str
    error: type[OrthomergeError] = IncompatibleError

    @classmethod
    def of(cls, where: str, error: OrthomergeError) -> Problem:
        """Make a problem from an error, whose message ends with the advice after the last semicolon."""
        what, separator, fix = str(error).rpartition("; ")
        return cls(where, what, fix, type(error)) if separator else cls(where, fix, _IN_MESSAGE, type(error))

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + ("" if self.fix == _IN_MESSAGE else f"; {self.fix}")


@contextmanager
def collected(problems: list[Problem], where: str) -> Iterator[None]:
    """Add an error that the block raises to the problems."""
    try:
        yield
    except OrthomergeError as error:
        problems.append(Problem.of(where, error))


def check_problems(problems: Sequence[Problem]) -> None:
    if len(problems) > 1:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise problems[0].error(f"{len(problems)} problems:\n{lines}")
    if problems:
        raise problems[0].error(str(problems[0]))


def code_problem(where: str, source: Checkpoint | Adapter, family: str | None) -> list[Problem]:
    """Report a config that asks to run its own code, unless the user vouches for the stock class by naming it."""
    code = (source.config or {}).get("auto_map") if isinstance(source, Checkpoint) else None
    if not code or family is not None:
        return []
    classes = some(code.values()) if isinstance(code, dict) else repr(code)[:80]
    text = f"its config.json asks to run its own code ('auto_map': {classes}), which is never done"
    fix = "if a stock class computes the same, name it as 'family', else use 'family: generic'"
    return [Problem(where, text, fix, CheckpointError)]


def base_problems(base: Checkpoint, split: Split) -> list[Problem]:
    """Report tensors of the base that belong to no known part, or that no method can merge."""
    misfits = []
    if counted := [key for key in split.names if key.endswith(_STATISTICS)]:
        patterns = ", ".join(f"'*{name}'" for name in (*_STATISTICS, ".num_batches_tracked"))
        misfits.append(
            f"{some(counted)} is a statistic of BatchNorm, which is wrong for a merge; "
            f"leave it out (ignore: [{patterns}]) and compute it again: a pass over inputs in train mode"
        )
    if split.unknown:
        misfits.append(f"{some(split.unknown)} is no part of the encoder; list it under 'ignore' to leave it out")
    if not split.names:
        misfits.append("no encoder was found in it; name its prefix as 'encoder_prefix'")
    return [Problem.of(f"base ({base.path})", IncompatibleError(text)) for text in misfits]


def source_problems(
    where: str, source: Source, reference: Mapping[str, Spec], family: Family, base: Checkpoint, *, missing: str
) -> list[Problem]:
    ours, theirs = (config.get("model_type") for config in (base.config or {}, source.config))
    if ours and theirs and theirs not in (ours, *family.model_types):  # the other mismatches follow from this one
        return [Problem(where, f"it is a {theirs!r} model but the base is a {ours!r}", _SAME_BASE)]
    misfits = [*_encoder_misfits(source, reference, family, missing), *_head_misfits(source, base, family)]
    vocabulary = _vocabulary_problems(where, base.path, source.checkpoint.path)
    return [*vocabulary, *(Problem.of(where, IncompatibleError(text)) for text in misfits)]


def _encoder_misfits(source: Source, reference: Mapping[str, Spec], family: Family, missing: str) -> Iterator[str]:
    split = source.split
    if len(split.prefixes) > 1:
        yield f"the encoder is found under each of {some(split.prefixes)}; choose one with 'prefix'"
    required = [key for key in reference if not family.may_lack(key, source.pooling)]
    missing_keys = [key for key in required if key not in split.names]
    if isinstance(source.checkpoint, Adapter):
        if not split.names:
            yield "none of the adapter's tensors is in the base; give the base that it was trained on"
    elif missing_keys and len(missing_keys) == len(required):
        yield (
            f"none of the base's {len(required)} encoder tensors is in it (it holds {some(source.checkpoint.specs)}); "
            "if it is not another architecture, name its 'prefix'"
        )
    elif missing_keys and missing == "error":
        yield (
            f"{some(missing_keys)} is in the base but not in the expert; "
            "if the expert was trained without it, set 'missing: base' to take the base's"
        )
    yield from _shape_misfits(split.names, source.checkpoint.specs, reference)
    if split.unknown:
        yield (
            f"{some(split.unknown)} is neither encoder nor head; list it under 'ignore' to leave it out, or "
            f"{_NAME_LAYERS}"
        )


def _shape_misfits(names: Mapping[str, str], specs: Mapping[str, Spec], reference: Mapping[str, Spec]) -> Iterator[str]:
    pairs = {key: (reference[key], specs[name]) for key, name in names.items()}
    for key, (ours, theirs) in pairs.items():
        if is_float(ours.dtype) and not is_float(theirs.dtype):
            yield (
                f"{key!r} is {ours.dtype} in the base but {theirs.dtype} in the expert ({names[key]!r}); "
                "quantised weights must be converted to float first"
            )
            break
    mismatched = [key for key, (ours, theirs) in pairs.items() if ours.shape != theirs.shape]
    for key in mismatched[:3]:
        ours, theirs = pairs[key]
        yield f"{key!r} is {ours.shape} in the base but {theirs.shape} in the expert; {_SAME_BASE}"
    if len(mismatched) > 3:
        yield f"{len(mismatched) - 3} more tensors have other shapes than in the base; {_SAME_BASE}"


def _head_misfits(source: Source, base: Checkpoint, family: Family) -> Iterator[str]:
    layout, head, specs, labels = source.layout, source.split.head, source.checkpoint.specs, source.labels
    if layout is None:
        if not labels or not family.encoder_class:  # a zero-shot head needs a model that can be built
            yield (
                "checkpoints of this family hold no head; "
                "give class names: head: {classes: [...], templates: [...]}, or its layers: head: {layers: [...]}"
            )
        return
    if "weight" not in head or (len(layout.layers) == 2 and "hidden.weight" not in head):
        yield f"its head {some(layout.layers)} is not in the checkpoint; {_NAME_LAYERS}"
        return
    integers = [name for name in head.values() if not is_float(specs[name].dtype)]
    part = misfit({part: specs[name].shape for part, name in head.items()})
    if integers or part is not None:
        odd = integers[0] if part is None else head[part]
        yield (
            f"{odd!r} of the head is {specs[odd].shape} {specs[odd].dtype}, which does not fit a linear classifier; "
            f"{_NAME_LAYERS}"
        )
        return
    first, last = head.get("hidden.weight", head["weight"]), head["weight"]
    widths = _widths(base, family)
    if widths and (width := specs[first].shape[1]) not in widths:
        sizes = " or ".join(map(str, sorted(widths)))
        yield f"{first!r} reads {width} features, but the encoder makes {sizes}; {_SAME_BASE}"
    rows, kind = specs[last].shape[0], source.config.get("problem_type")
    if rows == 1 or kind in ("regression", "multi_label_classification"):
        yield (
            f"{last!r} has {rows} rows, for {kind or 'a single number'}, but a head must choose one class of several; "
            "give an expert with a softmax over two classes or more, or leave this one out"
        )
    if rows != len(labels):
        yield f"{last!r} has {rows} rows but there are {len(labels)} labels; give 'labels'"
    if len(set(labels)) < len(labels):
        yield f"two of its labels are the same ({some(sorted(labels))}); give distinct 'labels'"


def _widths(base: Checkpoint, family: Family) -> set[int]:
    """Possible numbers of features by the config; DINOv2 concatenates the class token and the mean of the rest."""
    config = tower_config((base.config if family.encoder_class else None) or {}, "vision_config")
    sizes = [config.get(name) for name in ("hidden_size", "dim", "d_model", "projection_dim")]
    times = (1, 2) if family.name == "dinov2" else (1,)
    return {size * number for size in sizes if type(size) is int for number in times}


def _vocabulary_problems(where: str, base: Path, expert: Path) -> Iterator[Problem]:
    """Report different vocabularies, with which the same row of the embeddings stands for different words."""
    try:
        for ours, theirs in ((base / name, expert / name) for name in _VOCABULARIES):
            if not _is_readable(ours) or not _is_readable(theirs) or ours.read_bytes() == theirs.read_bytes():
                continue
            if _words(ours) != _words(theirs):
                fix = f"{_SAME_BASE}, with its tokenizer, or remove the tokenizer that is not the model's"
                yield Problem(where, f"{theirs} differs from the vocabulary {ours}", fix)
                return
    except OSError as error:
        yield Problem(where, f"a file of its tokenizer cannot be read: {error}", "fetch it again", CheckpointError)
    except OrthomergeError as error:
        yield Problem.of(where, error)


def _is_readable(path: Path) -> bool:
    return path.is_file() and not leaves(path, path.parent) and path.stat().st_size <= _MOST_BYTES


def _words(path: Path) -> object:
    if path.name != _TOKENIZER:
        return path.read_bytes().split()
    document = read_json(path)
    model, added = document.get("model"), document.get("added_tokens")
    rows = added if isinstance(added, list) else []
    tokens = [(item.get("id"), item.get("content")) for item in rows if isinstance(item, dict)]
    return (model.get("vocab") if isinstance(model, dict) else None), tokens
