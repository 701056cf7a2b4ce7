"""Small encoders with random weights, processors that need no files, and examples."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.models.making import build

from orthomerge.data.task import Examples, Modality
from orthomerge.models.processing import PixelProcessor


@dataclass
class Words:
    """A tokenizer in small: a number for each word, padded to the longest text, with a mask."""

    modality: ClassVar[Modality] = "text"
    mask: bool = True
    longest: int = 38

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        rows = [[1, *(2 + int(hashlib.md5(word.encode()).hexdigest(), 16) % 50 for word in text.split())]
                [: self.longest] for text in inputs]  # fmt: skip
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()} if self.mask else {"input_ids": ids}

    def digest(self) -> str:
        return f"words {self.longest}"


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def maskless() -> Words:
    return Words(mask=False)


@pytest.fixture
def pixels() -> PixelProcessor:
    return PixelProcessor(8)


@pytest.fixture
def bert() -> Any:
    return copy.deepcopy(build("BertModel", "bert"))


@pytest.fixture
def vit() -> Any:
    return copy.deepcopy(build("ViTModel", "vit"))


@pytest.fixture
def texts() -> Examples:
    """23 texts of very different lengths, in no order."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 36, 23)
    inputs = [" ".join(f"w{number}" for number in random.integers(0, 500, length)) for length in lengths]
    return Examples(inputs, random.integers(0, 3, 23), "test")


@pytest.fixture
def images() -> Examples:
    random = np.random.default_rng(0)
    return Examples(list(random.integers(0, 256, (11, 8, 8, 3), dtype=np.uint8)), None, "train")
