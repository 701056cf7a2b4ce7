"""Task vectors out of a few numbers, merges of all their blocks, and PEFT's functions without importing PEFT."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

from orthomerge.merging.kinds import SurveyMethod, TensorMethod
from orthomerge.merging.stream import prepare
from orthomerge.merging.vectors import TILE, TaskVector, TaskVectors

Numbers = torch.Tensor | list[float]


def _vectors(
    *experts: Mapping[str, Numbers] | Numbers, base: Mapping[str, torch.Tensor] | None = None, tile: int = TILE
) -> TaskVectors:
    """Experts 'a', 'b', ... by their deltas; a bare list or tensor is one tensor called 'w'. The base is zero."""
    deltas = [
        {
            key: torch.as_tensor(numbers, dtype=torch.float32)
            for key, numbers in (expert if isinstance(expert, Mapping) else {"w": expert}).items()
        }
        for expert in experts
    ]
    start = base or {key: torch.zeros_like(delta) for key, delta in deltas[0].items()}
    tuned = [{key: start[key] + delta for key, delta in expert.items()} for expert in deltas]
    return TaskVectors(
        {name: TaskVector.between(start, tensors) for name, tensors in zip("abcdefgh", tuned, strict=False)}, tile
    )


def _random(*, tile: int = TILE, experts: int = 3, seed: int = 0, coarse: bool = False) -> TaskVectors:
    """Tensors of every shape; `coarse` deltas take few values, so that thresholds and sums meet ties."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"m": (13, 17), "v": (29,), "one": (), "none": (0, 3), "t": (3, 4, 5)}

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator)
        return (numbers * 2).round() / 8 if coarse else numbers * 0.01

    base = {key: torch.zeros(shape) if coarse else draw(shape) for key, shape in shapes.items()}
    return _vectors(
        *({key: draw(shape) for key, shape in shapes.items()} for _ in range(experts)), base=base, tile=tile
    )


def _merged(method: TensorMethod | SurveyMethod, vectors: TaskVectors) -> dict[str, torch.Tensor]:
    """The merged delta of every tensor; sees to it that no method writes into what it is given."""
    ready = prepare(method, vectors)
    parts: dict[str, list[torch.Tensor]] = {key: [] for key in vectors.shapes}
    for block in vectors.blocks(scope=ready.scope):
        base, deltas = block.base.clone(), block.deltas.clone()
        delta = ready.merge(block.base, block.deltas, site=block.site)
        assert delta.shape == base.shape
        assert delta.dtype == torch.float32
        assert torch.equal(base, block.base)
        assert torch.equal(deltas, block.deltas)
        parts[block.site.key].append(delta.reshape(-1))
    return {
        key: (torch.cat(parts[key]) if parts[key] else torch.empty(0)).reshape(shape)
        for key, shape in vectors.shapes.items()
    }


@pytest.fixture
def vectors_of() -> Callable[..., TaskVectors]:
    return _vectors


@pytest.fixture
def random_vectors() -> Callable[..., TaskVectors]:
    return _random


@pytest.fixture
def merged() -> Callable[..., dict[str, torch.Tensor]]:
    return _merged


@pytest.fixture
def stacked() -> Callable[[TaskVectors], dict[str, torch.Tensor]]:
    """All deltas of each tensor, [T, *shape], as the methods see them."""

    def stack(vectors: TaskVectors) -> dict[str, torch.Tensor]:
        return {key: torch.stack([vector[key] for vector in vectors.vectors.values()]) for key in vectors.shapes}

    return stack


@pytest.fixture
def flat() -> Callable[[TaskVectors], torch.Tensor]:
    """All deltas as one long row an expert."""

    def flatten(vectors: TaskVectors) -> torch.Tensor:
        return torch.stack(
            [torch.cat([vector[key].flatten() for key in vectors.shapes]) for vector in vectors.vectors.values()]
        )

    return flatten


@pytest.fixture(scope="session")
def peft_merging() -> ModuleType:
    """The module peft.utils.merge_utils alone: importing all of PEFT takes ten seconds."""
    package = importlib.util.find_spec("peft")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "utils" / "merge_utils.py"
    spec = importlib.util.spec_from_file_location("peft_merge_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
