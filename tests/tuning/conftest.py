"""Tiny bases with random weights, and tasks that are learnt in seconds: a word is there, an image is bright."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orthomerge.core.progress import Progress
from orthomerge.data.task import Examples, Modality, Split, Task
from orthomerge.models.processing import PixelProcessor
from orthomerge.models.skeleton import quiet
from orthomerge.tuning.finetune import finetune
from orthomerge.tuning.settings import Tuning

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BASES = {"words": "bert", "levels": "vit"}  # of the two tasks
Tune = Callable[..., dict[str, float]]
COUNTS: dict[Split, int] = {"train": 96, "val": 32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads only get in each other's way on models as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Killed(BaseException):
    """As if the process had been."""


class Reports(Progress):
    """Lines that a run says; it is killed at a step."""

    def __init__(self, kill_at: float = math.inf) -> None:
        self.lines: list[str] = []
        self._kill_at = kill_at

    def say(self, text: str) -> None:
        self.lines.append(text)
        if self.steps[-1] >= self._kill_at:
            raise Killed

    @property
    def steps(self) -> list[int]:
        return [int(line.partition("step ")[2].split()[0]) for line in self.lines]


@dataclass(frozen=True)
class Words:
    """Texts are numbers of tokens; token 2 comes first."""

    modality: Modality = "text"

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        rows = [[2, *map(int, text.split())] for text in inputs]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def digest(self) -> str:
        return "words"


PROCESSORS: dict[str, Any] = {"text": Words(), "image": PixelProcessor(8)}


def words_task(name: str, tokens: tuple[int, ...], *, seed: int = 0) -> Task:
    """Which of some tokens is in the text?"""
    splits: dict[str, Examples] = {}
    random = np.random.default_rng(seed)
    for split, count in COUNTS.items():
        labels = random.integers(0, len(tokens), count)
        texts = []
        for label in labels:
            words = random.integers(20, 40, random.integers(3, 7))
            words[random.integers(len(words))] = tokens[label]
            texts.append(" ".join(map(str, words)))
        splits[split] = Examples(texts, labels, split)
    return Task(name, tuple(f"has-{token}" for token in tokens), "text", splits)


def pixels_task(name: str, levels: tuple[int, ...], *, seed: int = 0) -> Task:
    """How bright is the image?"""
    splits: dict[str, Examples] = {}
    random = np.random.default_rng(seed)
    for split, count in COUNTS.items():
        labels = random.integers(0, len(levels), count)
        images = [
            (levels[label] + random.integers(-20, 20, (8, 8, 3))).clip(0, 255).astype(np.uint8) for label in labels
        ]
        splits[split] = Examples(images, labels, split)
    return Task(name, tuple(f"level-{level}" for level in levels), "image", splits)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `bert`, `vit` and `clip`."""
    folder = tmp_path_factory.mktemp("bases")
    with quiet():
        import transformers

        torch.manual_seed(0)
        bert = transformers.BertConfig(**SIZES, vocab_size=40, max_position_embeddings=16)
        transformers.BertModel(bert).save_pretrained(folder / "bert")
        vit = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)
        transformers.ViTModel(vit, add_pooling_layer=False).save_pretrained(folder / "vit")
        text = {**SIZES, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 39, "bos_token_id": 38}
        vision = {**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 8}
        clip = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
        transformers.CLIPModel(clip).save_pretrained(folder / "clip")
    (folder / "bert" / "vocab.txt").write_text("[PAD]\n")
    return folder


@pytest.fixture(scope="session")
def words() -> Task:
    return words_task("words", (5, 6))


@pytest.fixture(scope="session")
def levels() -> Task:
    return pixels_task("levels", (60, 190))


@pytest.fixture(params=BASES)
def task(request: pytest.FixtureRequest) -> Task:
    """Texts, then images."""
    chosen: Task = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def base(task: Task, bases: Path) -> Path:
    return bases / BASES[task.name]


@pytest.fixture
def tune(bases: Path) -> Tune:
    """`tune(task, out, mode=..., ...)`: quick settings, each of which can be replaced."""

    def tuner(task: Task, out: Path, *, more: dict[str, Any] | None = None, **settings: Any) -> dict[str, float]:
        quick: dict[str, Any] = {"epochs": 3.0, "batch": 16, "lr": 3e-3, "head_lr": 1e-2, "device": "cpu"}
        base = bases / ("bert" if task.modality == "text" else "vit")
        options: dict[str, Any] = {"base": base, "processor": PROCESSORS[task.modality], **(more or {})}
        return finetune(task, out=out, settings=Tuning(**{**quick, **settings}), **options)

    return tuner
