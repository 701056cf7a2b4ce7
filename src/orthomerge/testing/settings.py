"""Small settings of fitted methods: a tiny encoder, three experts with heads, inputs and teachers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch

from orthomerge.data.task import Examples, Modality, Task
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.fitting.setting import Setting, encoded, prepare
from orthomerge.merging.kinds import Block, SurveyMethod, TensorMethod
from orthomerge.merging.methods import make_method
from orthomerge.merging.stream import merge_blocks
from orthomerge.merging.stream import prepare as prepare_method
from orthomerge.merging.vectors import TaskVector, TaskVectors
from orthomerge.models.families import family
from orthomerge.models.heads import Head, Linear
from orthomerge.models.processing import PixelProcessor, Processor
from orthomerge.models.skeleton import quiet

CLASSES = {"two": 2, "three": 3, "five": 5}
POOLINGS = {"bert": "mean", "vit": "cls"}
WIDTH = 32
CPU = torch.device("cpu")

Kind = Literal["bert", "vit"]


@dataclass(frozen=True)
class Words:
    """A small tokenizer: one number per word, padded to the longest text and by `padding` more."""

    modality: ClassVar[Modality] = "text"
    padding: int = 0

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        rows = [[1, *map(_number, text.split())] for text in inputs]
        ids = torch.zeros(len(rows), max(map(len, rows)) + self.padding, dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def digest(self) -> str:
        return f"words {self.padding}"


def _number(word: str) -> int:
    return 2 + hashlib.md5(word.encode(), usedforsecurity=False).digest()[0] % 90


def make_setting(
    kind: Kind = "bert", inputs: int = 32, seed: int = 0, *, layers: int = 2, device: str = "cpu"
) -> Setting:
    """Make experts `two`, `three` and `five`, named after their classes: the base plus random deltas, random heads."""
    encoder = make_encoder(kind, seed=seed, layers=layers, device=device)
    base = encoder.weights.cpu().clone()
    random = torch.Generator().manual_seed(seed)
    experts, heads = {}, {}
    for task, classes in CLASSES.items():
        deltas = {name: 0.05 * torch.randn(shape, generator=random) for name, shape in encoder.layout.shapes.items()}
        experts[task] = base + encoder.layout.flat(deltas)
        heads[task] = make_head(task, classes, random)
    return assemble(kind, encoder, base, experts, heads, make_tasks(kind, inputs, seed), seed=seed)


def make_encoder(kind: Kind, *, seed: int = 0, layers: int = 2, device: str = "cpu") -> FlatEncoder:
    """Make a BERT or a ViT with random weights."""
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "initializer_range": 0.2,
    }
    with quiet(), torch.random.fork_rng():
        import transformers

        torch.manual_seed(seed)
        if kind == "bert":
            config = transformers.BertConfig(**sizes, vocab_size=99, max_position_embeddings=40)
            module = transformers.BertModel(config, add_pooling_layer=False)
        else:
            config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4)
            module = transformers.ViTModel(config, add_pooling_layer=False)
    return FlatEncoder(module, partial(family(kind).features, pooling=POOLINGS[kind]), torch.device(device))


def make_head(task: str, classes: int, random: torch.Generator) -> Head:
    weight = 0.5 * torch.randn(classes, WIDTH, generator=random)
    return Head(Linear(weight, torch.randn(classes, generator=random)), tuple(f"{task}-{n}" for n in range(classes)))


def make_tasks(kind: Kind, inputs: int, seed: int) -> dict[str, Task]:
    """Make random texts of 1 to 12 words, or random images, for every task."""
    random = np.random.default_rng(seed)
    tasks = {}
    for task, classes in CLASSES.items():
        items: list[Any]
        if kind == "bert":
            items = [
                " ".join(f"{task}{word}" for word in random.integers(0, 60, length))
                for length in random.integers(1, 13, inputs)
            ]
        else:
            items = list(random.integers(0, 256, (inputs, 16, 16, 3), dtype=np.uint8))
        examples = Examples(items, random.integers(0, classes, inputs), "train")
        labels = tuple(f"{task}-{n}" for n in range(classes))
        tasks[task] = Task(task, labels, "text" if kind == "bert" else "image", {"train": examples})
    return tasks


def assemble(
    kind: Kind,
    encoder: FlatEncoder,
    base: torch.Tensor,
    experts: Mapping[str, torch.Tensor],
    heads: Mapping[str, Head],
    tasks: Mapping[str, Task],
    *,
    seed: int = 0,
) -> Setting:
    """Make a setting from experts, with the teachers' features encoded."""
    processor: Processor = Words() if kind == "bert" else PixelProcessor(16)
    examples = {task: tasks[task]["train"].unlabelled() for task in experts}
    zeros = {task: torch.zeros(len(inputs), WIDTH) for task, inputs in examples.items()}
    processors = dict.fromkeys(experts, processor)
    inputs = prepare(examples, processors, zeros, device=encoder.device)
    teacher = {}
    for task, weights in experts.items():
        encoder.load(weights)
        teacher[task] = encoded(encoder, inputs, task)
    encoder.load(base)

    def merged(method: str, options: Mapping[str, Any]) -> torch.Tensor:
        return merge_flat(encoder, base, experts, method, options, seed=seed)

    return Setting(
        encoder=encoder,
        base=base,
        tuned=lambda task: experts[task].clone(),
        merged=merged,
        heads={task: heads[task] for task in experts},
        inputs=prepare(examples, processors, teacher, device=encoder.device),
        seed=seed,
    )


def merge_flat(
    encoder: FlatEncoder,
    base: torch.Tensor,
    experts: Mapping[str, torch.Tensor],
    method: str,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
) -> torch.Tensor:
    """Merge flat experts by a data-free method; return weights [P]."""
    layout = encoder.layout
    start = dict(layout.views(base))
    vectors = TaskVectors(
        {task: TaskVector.between(start, dict(layout.views(weights))) for task, weights in experts.items()}
    )
    unprepared = cast("TensorMethod | SurveyMethod", make_method(method, options, tasks=vectors.tasks, seed=seed))
    ready = prepare_method(unprepared, vectors)
    merged = base.clone()

    def place(block: Block, weights: torch.Tensor) -> None:
        first = layout.places[block.site.key].start + block.site.start
        merged[first : first + weights.numel()] = weights.reshape(-1)

    with closing(merge_blocks(vectors, ready, place, workers=1)) as blocks:
        for _ in blocks:
            pass
    return merged
