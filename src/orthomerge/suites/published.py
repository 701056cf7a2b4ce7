"""Suites of the papers: experts published on the hub.

`clip-vit-*-8`: FusionBench's experts (Tang et al. 2024, arXiv 2406.03280), vision towers whose heads are computed
from class names. `bert-text5`, `t5-*-text5`: FT-Classifier's (Kong et al. 2024, arXiv 2412.13526), state dicts of an
encoder and a linear layer over the mean of its states, with tables that have no header.

Experts in FOLDER/experts (a folder TASK or a file TASK.pth) are used instead of the hub's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from orthomerge.core.errors import CheckpointError, RecipeError, some
from orthomerge.data.labels import check_rows
from orthomerge.data.reading import read_task, sources_of, split_off
from orthomerge.data.rows import records
from orthomerge.data.task import Examples, Labels, Modality, Split, Task
from orthomerge.files.opening import locate, open_checkpoint
from orthomerge.models.opening import Expert, HeadNames
from orthomerge.models.processing import Processor, TextProcessor
from orthomerge.models.processors import load_processor
from orthomerge.suites.suite import Say, Suite, copy_base
from orthomerge.suites.table import SUITES

_CLIP_DATA = {  # "tanganke/TASK" for the other tasks
    "stanford-cars": "tanganke/stanford_cars",
    "svhn": "ufldl-stanford/svhn:cropped_digits",
    "mnist": "ylecun/mnist",
}
_CLIP = {
    "clip-vit-b32-8": "clip-vit-base-patch32",
    "clip-vit-b16-8": "clip-vit-base-patch16",
    "clip-vit-l14-8": "clip-vit-large-patch14",
}
# Prompts of the frozen heads with which the CLIP experts were fine-tuned (Radford et al. 2021, arXiv 2103.00020).
_NUMBER = ('a photo of the number: "{}".',)
_CARS = (
    "a photo of my {}.",
    "i love my {}!",
    *(f"a photo of my {how} {{}}." for how in ("dirty", "clean", "new", "old")),
)

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "sun397": ("a photo of a {}.", "a photo of the {}."),
    "stanford-cars": ("a photo of a {}.", "a photo of the {}.", *_CARS),
    "resisc45": tuple(
        f"{source} {kind} of {article}{{}}."
        for article in ("", "a ", "the ")
        for kind in ("imagery", "photo", "view")
        for source in ("satellite", "aerial")
    ),
    "eurosat": tuple(f"a centered satellite photo of {article}{{}}." for article in ("", "a ", "the ")),
    "svhn": _NUMBER,
    "gtsrb": tuple(f'a {how} photo of a "{{}}" traffic sign.' for how in ("zoomed in", "centered", "close up")),
    "mnist": _NUMBER,
    "dtd": tuple(
        f"a photo of {article} {{}} {noun}."
        for article in ("a", "the")
        for noun in ("texture", "pattern", "thing", "object")
    ),
}
_DIGIT_TASKS = ("svhn", "mnist")  # tasks whose classes are digits
# Words for prompts by task and label, for datasets with other labels.
_PROMPT_WORDS: Mapping[str, Mapping[str, str]] = {
    "eurosat": {
        "annualcrop": "annual crop land",
        "herbaceousvegetation": "brushland or shrubland",
        "highway": "highway or road",
        "industrial": "industrial buildings or commercial buildings",
        "pasture": "pasture land",
        "permanentcrop": "permanent crop land",
        "residential": "residential buildings or homes or apartments",
        "sealake": "lake or sea",
        "forest": "forest",
        "river": "river",
    }
}

TEXT_REPOSITORY = "kongfs/FT-Classifier-for-Model-Merging"  # the name of one of models, and of one of datasets
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
_NAMES = {"ag_news": ("ag_news", "ag")}  # tasks with other names in the repositories
_PICKLE = ".pth"
_HEADS = ("classifier.0", "classifier")  # a layer in a Sequential, or a layer alone


def clip(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Build a CLIP suite; nothing is trained, so `device` is ignored here and in `text`."""
    model = _CLIP[name]
    copy_base(folder / "base", base or f"openai/{model}", say)
    tasks: dict[str, Task] = {}
    experts: dict[str, Path | Expert] = {}
    for task in SUITES[name].tasks:
        tasks[task] = _clip_task(task, data)
        path = str(_local_expert(folder, task) or f"tanganke/{model}_{task}")
        revision = locate(path)[1]  # downloads it, so that later runs need no network
        path = path if revision is None else f"{path}@{revision}"
        experts[task] = Expert(path, head=HeadNames(classes=tasks[task].labels, templates=TEMPLATES[task]))
        say(f"{task}: {path}, {len(tasks[task].labels)} classes")
    return Suite(name, folder, tasks, load_processor(folder / "base", modality="image"), experts)


def _clip_task(name: str, data: Path | None) -> Task:
    """Read a task; its labels are replaced by the class names for its prompts."""
    source = _CLIP_DATA.get(name, f"tanganke/{name}")
    if data is not None:
        source = next(iter(sources_of(data, (name, name.replace("-", "_"))).values()))
    task = read_task(source, name=name, modality="image", text="image")
    return replace(task, labels=class_names(name, task.labels))


def class_names(task: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the class names of a task for its templates; numbers are refused, except in tasks of digits."""
    numbers = [label for label in labels if label.isdecimal()]
    if numbers and task not in _DIGIT_TASKS:
        raise RecipeError(
            f"the classes of {task!r} must be named in words, from which its head is computed, got {some(numbers)}; "
            "rename its folders, or its labels, to the words for the prompts"
        )
    words = _PROMPT_WORDS.get(task, {})
    names = (re.sub(r"[\s_]+", " ", label).strip() for label in labels)
    return tuple(words.get(name.replace(" ", "").casefold(), name) for name in names)


_TEXT = {  # base, and pattern of the experts' files
    "bert-text5": ("google-bert/bert-base-uncased", "*.pth"),
    "t5-base-text5": ("google-t5/t5-base", "*[tT]5*base*.pth"),
    "t5-large-text5": ("google-t5/t5-large", "*[tT]5*large*.pth"),
}


def text(*, name: str, folder: Path, data: Path | None, base: str | None, device: str, say: Say) -> Suite:
    """Build a text suite on BERT or the encoder of T5."""
    (reference, pattern), bert = _TEXT[name], name == "bert-text5"
    copy_base(folder / "base", base or reference, say)
    root = data or _repository("dataset", ["*.csv", "*.csv.gz"], way_out="give its tables with --data")
    tasks: dict[str, Task] = {}
    experts: dict[str, Path | Expert] = {}
    for task in SUITES[name].tasks:
        path, labels = _state_dict(task, folder, pattern, exclude="*[tT]5*" if bert else None), TEXT_LABELS[task]
        tasks[task] = read_csv_task(_tables(root, task), name=task, labels=labels)
        keys = list(open_checkpoint(path))
        head = next((layer for layer in _HEADS if any(key.endswith(f"{layer}.weight") for key in keys)), _HEADS[0])
        experts[task] = Expert(str(path), prefix="bert." if bert else None, labels=labels, head=HeadNames((head,)))
        say(f"{task}: {path.name}, {len(tasks[task]['test'])} test texts")
    processor: Processor = load_processor(folder / "base", modality="text", max_length=MAX_LENGTH)
    if bert and isinstance(processor, TextProcessor):
        processor = HalvesProcessor(processor)
    options = {"pooling": "mean", "family": None if bert else "t5_encoder"}
    return Suite(name, folder, tasks, processor, experts, options=options)


@dataclass(frozen=True)
class HalvesProcessor:
    """Inputs of the published BERT experts: [CLS] first half [SEP] second half [SEP], padded to one length.

    They were trained without an attention mask, so padding counts in the mean: the mask here is all ones.
    """

    modality: ClassVar[Modality] = "text"
    inner: TextProcessor

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
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
    """Read `train.csv` and `test.csv` without header: labels from 1 in the first column, texts in the third.

    A tenth of train becomes val, as in `read_task`.
    """
    train, numbers = _read_csv(folder / "train.csv", "train", labels)
    if len(np.unique(numbers)) < len(labels):
        raise CheckpointError(f"{folder / 'train.csv'} must have examples of all {len(labels)} labels of {name!r}")
    test, _ = _read_csv(folder / "test.csv", "test", labels)
    splits = {"train": train, **split_off(train, numbers, 0.1), "test": test}
    return Task(name, labels, "text", {str(split): part for split, part in splits.items()})


def _read_csv(path: Path, split: Split, labels: tuple[str, ...]) -> tuple[Examples, Labels]:
    path = path if path.exists() else path.with_name(f"{path.name}.gz")
    problems: list[str] = []
    texts: list[str] = []
    classes: list[int] = []
    for line, row in records(path):
        label = int(row[0]) - 1 if row[0].isdecimal() else -1
        if not 0 <= label < len(labels):
            problems.append(f"line {line} must begin with 1 to {len(labels)}, got {row[0][:40]!r}")
        elif len(row) < 3 or not row[2]:
            problems.append(f"line {line} has no text in its third column")
        else:
            texts.append(row[2])
            classes.append(label)
    check_rows(path, problems)
    if not texts:
        raise CheckpointError(f"{path} is empty: it has no rows")
    numbers = np.array(classes, dtype=np.int64)
    return Examples(texts, numbers, split), numbers


def _names(task: str) -> tuple[str, ...]:
    return _NAMES.get(task, (task,))


def _local_expert(folder: Path, task: str) -> Path | None:
    candidates = (folder / "experts" / f"{name}{end}" for name in _names(task) for end in ("", _PICKLE))
    return next((path for path in candidates if path.exists()), None)


def _state_dict(task: str, folder: Path, pattern: str, *, exclude: str | None) -> Path:
    """Return the file of an expert: the user's, or else that in the experts' repository."""
    if local := _local_expert(folder, task):
        return local
    way_out = f"get the experts in another way and put them into {folder / 'experts'} as TASK{_PICKLE}"
    root = _repository("model", [pattern], exclude=exclude, way_out=way_out)
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob(f"*{_PICKLE}"))
    ends = tuple(f"{joint}{name}{_PICKLE}" for name in _names(task) for joint in "_-/")
    matches = [
        file
        for file in files
        if fnmatchcase(file, pattern) and not fnmatchcase(file, exclude or "") and f"/{file}".casefold().endswith(ends)
    ]
    if len(matches) != 1:
        what = f"several files of expert {task!r}, {some(matches)}" if matches else f"no file of expert {task!r}"
        raise CheckpointError(f"{TEXT_REPOSITORY} has {what}, among {some(files) or 'none at all'}; {way_out}")
    return root / matches[0]


def _tables(root: Path, task: str) -> Path:
    tests = [path for pattern in ("test.csv", "test.csv.gz") for path in sorted(root.rglob(pattern))]
    folders = sorted({path.parent for path in tests if path.parent.name.casefold() in _names(task)})
    if len(folders) != 1:
        what = f"several folders {some(folders)}" if folders else f"no folder called {' or '.join(_names(task))}"
        raise CheckpointError(f"{root} has {what} with train.csv and test.csv; give their folder with --data")
    return folders[0]


def _repository(
    kind: Literal["model", "dataset"], include: list[str], *, exclude: str | None = None, way_out: str
) -> Path:
    """Download the files of the text suites' models or data that match patterns, at any depth."""
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(TEXT_REPOSITORY, repo_type=kind, allow_patterns=include, ignore_patterns=exclude)
    except Exception as error:  # the hub, the network and the disk raise errors of many kinds
        raise CheckpointError(
            f"cannot fetch the {kind} repository {TEXT_REPOSITORY!r} ({type(error).__name__}); {way_out}"
        ) from error
    return Path(folder)
