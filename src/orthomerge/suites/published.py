"""The papers' own suites: experts that others have published, by their names on the hub.

`clip-vit-*-8`: FusionBench's experts (Tang et al. 2024, arXiv 2406.03280), vision towers without heads, which are made
of the tasks' class names. `bert-text5`, `t5-*-text5`: FT-Classifier's (Kong et al. 2024, arXiv 2412.13526), state dicts
of an encoder and a linear layer over the mean of its states, with tables that have no header.

What lies in FOLDER/experts, a folder TASK or a file TASK.pth, is used instead of the hub's.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from orthomerge.core.errors import CheckpointError, some
from orthomerge.data.raw import Problems
from orthomerge.data.reading import read_task
from orthomerge.data.rows import records
from orthomerge.data.sampling import stratified
from orthomerge.data.task import Examples, Modality, Split, Task
from orthomerge.files.opening import locate, open_checkpoint
from orthomerge.files.ownership import SUITE, write_marker
from orthomerge.files.publish import publish
from orthomerge.models.opening import Expert, HeadNames
from orthomerge.models.processing import TextProcessor
from orthomerge.models.processors import COMPANIONS, load_processor
from orthomerge.suites.clip_prompts import TEMPLATES, class_names
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import SUITES

if TYPE_CHECKING:
    import torch

    from orthomerge.models.processing import Processor
    from orthomerge.suites.suite import Say


CLIP_BASE, CLIP_EXPERT, CLIP_DATA = "openai/{model}", "tanganke/{model}_{task}", "tanganke/{task}"
CLIP_DATA_ELSEWHERE = {
    "stanford-cars": "tanganke/stanford_cars",
    "svhn": "ufldl-stanford/svhn:cropped_digits",
    "mnist": "ylecun/mnist",
}
TEXT_EXPERTS = TEXT_DATA = "kongfs/FT-Classifier-for-Model-Merging"  # a repository of models, and one of datasets
TEXT_LABELS: dict[str, tuple[str, ...]] = {
    "ag_news": ("World", "Sports", "Business", "Sci/Tech"),
    "yelp": ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
    "amazon": ("1 star", "2 stars", "3 stars", "4 stars", "5 stars"),
    "yahoo": (
        "Society & Culture", "Science & Mathematics", "Health", "Education & Reference", "Computers & Internet",
        "Sports", "Business & Finance", "Entertainment & Music", "Family & Relationships", "Politics & Government",
    ),
    "dbpedia": (
        "Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder", "MeanOfTransportation", "Building",
        "NaturalPlace", "Village", "Animal", "Plant", "Album", "Film", "WrittenWork",
    ),
}  # fmt: skip
MAX_LENGTH = 256
_SHORT = {"ag_news": "ag"}  # what the repositories call a task, where it is something else
_PICKLE = ".pth"
_HEADS = ("classifier.0", "classifier")  # the layer alone in a Sequential, or on its own


def clip_b32(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Eight vision tasks, CLIP ViT-B/32; nothing is trained, so `device` does not matter here and below."""
    return _clip("clip-vit-b32-8", "clip-vit-base-patch32", folder=folder, data=data, base=base, say=say)


def clip_b16(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Eight vision tasks, CLIP ViT-B/16."""
    return _clip("clip-vit-b16-8", "clip-vit-base-patch16", folder=folder, data=data, base=base, say=say)


def clip_l14(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Eight vision tasks, CLIP ViT-L/14."""
    return _clip("clip-vit-l14-8", "clip-vit-large-patch14", folder=folder, data=data, base=base, say=say)


def bert_text5(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Five text tasks, BERT."""
    return _text("bert-text5", folder=folder, data=data, base=base, say=say)


def t5_base_text5(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Five text tasks, the encoder of T5-base."""
    return _text("t5-base-text5", folder=folder, data=data, base=base, say=say)


def t5_large_text5(*, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Five text tasks, the encoder of T5-large."""
    return _text("t5-large-text5", folder=folder, data=data, base=base, say=say)


def _clip(suite: str, model: str, *, folder: Path, data: Path | None, base: str | None, say: Say) -> Suite:
    _copy_base(folder / "base", base or CLIP_BASE.format(model=model), say)
    tasks: dict[str, Task] = {}
    experts: dict[str, Path | Expert] = {}
    for name in SUITES[suite].tasks:
        tasks[name] = _clip_task(name, data)
        own = _own(folder, name)
        path = str(own) if own else _pinned(CLIP_EXPERT.format(model=model, task=name))
        experts[name] = Expert(path, head=HeadNames(classes=tasks[name].labels, templates=TEMPLATES[name]))
        say(f"{name}: {path}, {len(tasks[name].labels)} classes")
    return Suite(suite, folder, tasks, load_processor(folder / "base", modality="image"), experts)


def _clip_task(name: str, data: Path | None) -> Task:
    """A task whose labels are the class names of its prompts."""
    if data is None:
        task = read_task(
            CLIP_DATA_ELSEWHERE.get(name, CLIP_DATA.format(task=name)), name=name, modality="image", text="image"
        )
    else:
        names = (name, name.replace("-", "_"))
        found = next((data / f"{n}{end}" for n in names for end in ("", ".npz") if (data / f"{n}{end}").exists()), None)
        if found is None:
            raise CheckpointError(f"{data} has no {name!r}: a folder of pictures or a dataset, or {name}.npz")
        task = read_task(found, name=name, modality="image", text="image")
    return replace(task, labels=class_names(name, task.labels))


@dataclass(frozen=True)
class _Published:
    """Where a text suite comes from: `wanted` and `unwanted` are patterns of its files in the experts' repository.

    `halves`: whether texts are read by the `HalvesProcessor`.
    """

    base: str
    wanted: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    prefix: str | None = None
    family: str | None = None
    halves: bool = False


_TEXT = {
    "bert-text5": _Published("google-bert/bert-base-uncased", ("*.pth",), ("*[tT]5*",), prefix="bert.", halves=True),
    "t5-base-text5": _Published("google-t5/t5-base", ("*[tT]5*base*.pth",), family="t5_encoder"),
    "t5-large-text5": _Published("google-t5/t5-large", ("*[tT]5*large*.pth",), family="t5_encoder"),
}


def _text(suite: str, *, folder: Path, data: Path | None, base: str | None, say: Say) -> Suite:
    source = _TEXT[suite]
    _copy_base(folder / "base", base or source.base, say)
    root = data or _repository(TEXT_DATA, "dataset", ("*.csv", "*.csv.gz"), way_out="give its tables with --data")
    paths = _state_dicts(source, SUITES[suite].tasks, folder)
    tasks: dict[str, Task] = {}
    experts: dict[str, Path | Expert] = {}
    for name, path in paths.items():
        labels = TEXT_LABELS[name]
        tasks[name] = read_csv_task(_tables(root, name), name=name, labels=labels)
        keys = list(open_checkpoint(path))
        head = next((layer for layer in _HEADS if any(key.endswith(f"{layer}.weight") for key in keys)), _HEADS[0])
        experts[name] = Expert(str(path), prefix=source.prefix, labels=labels, head=HeadNames(layers=(head,)))
        say(f"{name}: {path.name}, {len(tasks[name]['test'])} test texts")
    processor: Processor = load_processor(folder / "base", modality="text", max_length=MAX_LENGTH)
    if source.halves and isinstance(processor, TextProcessor):
        processor = HalvesProcessor(processor)
    options = {"pooling": "mean", "family": source.family}
    return Suite(suite, folder, tasks, processor, experts, options=options)


@dataclass(frozen=True)
class HalvesProcessor:
    """Texts as the published BERT experts read them: [CLS] first half [SEP] second half [SEP], padded to one length.

    They were trained without an attention mask, so that padding is attended to and counts in the mean. With a mask they
    would compute something else: here it is all ones.
    """

    modality: ClassVar[Modality] = "text"
    inner: TextProcessor

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        import torch

        tokenizer, length = self.inner.tokenizer, self.inner.max_length
        cut = tokenizer(list(inputs), add_special_tokens=False, truncation=True, max_length=length - 3)["input_ids"]
        rows = torch.full((len(cut), length), tokenizer.pad_token_id)
        for row, tokens in zip(rows, cut, strict=True):
            half = len(tokens) // 2
            ids = [tokenizer.cls_token_id, *tokens[:half], tokenizer.sep_token_id, *tokens[half:]]
            row[: len(ids) + 1] = torch.tensor([*ids, tokenizer.sep_token_id])
        return {"input_ids": rows, "attention_mask": torch.ones_like(rows)}

    def digest(self) -> str:
        return f"halves-{self.inner.digest()}"


def read_csv_task(folder: Path, *, name: str, labels: tuple[str, ...]) -> Task:
    """A task from `train.csv` and `test.csv` without header: a label from 1 on comes first, the text third.

    A tenth of train, at most 5000 texts, becomes val, as in `read_task`.
    """
    train = _read_csv(folder / "train.csv", "train", labels)
    assert train.labels is not None  # noqa: S101 - for mypy: every row has one
    if len(np.unique(train.labels)) < len(labels):
        raise CheckpointError(f"{folder / 'train.csv'} has no examples of some of the {len(labels)} labels of {name!r}")
    places = stratified(train.labels, min(round(0.1 * len(train)), 5000), seed=0)
    val = replace(train.take(places), split="val")
    train = train.take(np.setdiff1d(np.arange(len(train)), places))
    test = _read_csv(folder / "test.csv", "test", labels)
    return Task(name, labels, "text", {"train": train, **({"val": val} if len(val) else {}), "test": test})


def _read_csv(path: Path, split: Split, labels: tuple[str, ...]) -> Examples:
    path = path if path.exists() else path.with_name(f"{path.name}.gz")
    problems = Problems(path)
    texts: list[str] = []
    places: list[int] = []
    for number, row in records(path):
        place = int(row[0]) - 1 if row[0].isdecimal() else -1
        if not 0 <= place < len(labels):
            problems.add(f"line {number} must begin with 1 to {len(labels)}, got {row[0][:40]!r}")
        elif len(row) < 3 or not row[2]:
            problems.add(f"line {number} has no text in its third column")
        else:
            texts.append(row[2])
            places.append(place)
    problems.check()
    if not texts:
        raise CheckpointError(f"{path} is empty: it has no rows")
    return Examples(texts, np.array(places, dtype=np.int64), split)


def _copy_base(target: Path, reference: str, say: Say) -> None:
    """The base in the suite's own folder: weights, config, tokenizer, image processor."""
    if (target / "config.json").is_file():
        return
    say(f"base: {reference}")
    source = open_checkpoint(reference)
    if source.config is None:
        raise CheckpointError(f"the base {reference} must be a folder with weights and a config.json")
    index = "model.safetensors" if source.files[0].path.suffix == ".safetensors" else "pytorch_model.bin"
    names = (*(file.path.name for file in source.files), f"{index}.index.json", "config.json", *COMPANIONS)
    with publish(target, force=True, need=source.nbytes, inputs=[source.path], marker=SUITE) as partial:
        for name in names:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, partial / name)
        write_marker(partial, SUITE)


def _pinned(reference: str) -> str:
    """A path, or a hub id with the commit that it stands for now, fetched: later runs need no network for it."""
    path, revision = locate(reference)
    return str(path) if revision is None else f"{reference.partition('@')[0]}@{revision}"


def _names(task: str) -> tuple[str, ...]:
    return (task, *([_SHORT[task]] if task in _SHORT else ()))


def _own(folder: Path, task: str) -> Path | None:
    """An expert that the user has put into the suite's folder."""
    candidates = (folder / "experts" / f"{name}{end}" for name in _names(task) for end in ("", _PICKLE))
    return next((path for path in candidates if path.exists()), None)


def _state_dicts(source: _Published, tasks: Sequence[str], folder: Path) -> dict[str, Path]:
    """The experts' files: the user's own, or else the one of its name in the experts' repository."""
    paths = {task: own for task in tasks if (own := _own(folder, task))}
    if len(paths) == len(tasks):
        return paths
    way_out = f"get the experts in another way and put them into {folder / 'experts'} as TASK{_PICKLE}"
    root = _repository(TEXT_EXPERTS, "model", source.wanted, unwanted=source.unwanted, way_out=way_out)
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob(f"*{_PICKLE}"))}
    for task in (task for task in tasks if task not in paths):
        ends = tuple(f"{joint}{name}{_PICKLE}" for name in _names(task) for joint in "_-/")
        found = [
            name
            for name in files
            if f"/{name}".casefold().endswith(ends)
            and any(fnmatchcase(name, pattern) for pattern in source.wanted)
            and not any(fnmatchcase(name, pattern) for pattern in source.unwanted)
        ]
        if len(found) != 1:
            what = f"several files of expert {task!r}, {some(found)}" if found else f"no file of expert {task!r}"
            raise CheckpointError(f"{TEXT_EXPERTS} has {what}, among {some(files) or 'none at all'}; {way_out}")
        paths[task] = files[found[0]]
    return {task: paths[task] for task in tasks}


def _tables(root: Path, task: str) -> Path:
    """The folder of a task's tables, wherever it lies below `root`."""
    tests = [path for pattern in ("test.csv", "test.csv.gz") for path in sorted(root.rglob(pattern))]
    found = sorted({path.parent for path in tests if path.parent.name.casefold() in _names(task)})
    if len(found) != 1:
        what = f"several folders {some(found)}" if found else f"no folder called {' or '.join(_names(task))}"
        raise CheckpointError(f"{root} has {what} with train.csv and test.csv; give the folder of them with --data")
    return found[0]


def _repository(
    reference: str,
    kind: Literal["model", "dataset"],
    wanted: Sequence[str],
    *,
    unwanted: Sequence[str] = (),
    way_out: str,
) -> Path:
    """A folder, or a hub repository's files of some patterns, at any depth; `hub.fetch` is for those of one model."""
    if Path(reference).expanduser().is_dir():
        return Path(reference).expanduser()
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            reference, repo_type=kind, allow_patterns=list(wanted), ignore_patterns=list(unwanted)
        )
    except Exception as error:  # as many kinds as there are ways for a hub to be out of reach
        raise CheckpointError(
            f"cannot fetch the {kind} repository {reference!r} ({type(error).__name__}); {way_out}"
        ) from error
    return Path(folder)
