"""Task vectors of a few numbers, merges of all their blocks, and methods applied to one matrix."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from orthomerge.merging.kinds import Site, SurveyMethod, TensorMethod
from orthomerge.merging.stream import prepare
from orthomerge.merging.vectors import TILE, TaskVector, TaskVectors

Numbers = torch.Tensor | list[float]
Tensors = dict[str, torch.Tensor]
KEY = "layer.0.weight"


def vectors_of(
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


def random_vectors(*, tile: int = TILE, experts: int = 3, seed: int = 0, coarse: bool = False) -> TaskVectors:
    """Tensors of every shape; `coarse` deltas take few values, so that thresholds and sums meet ties."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"m": (13, 17), "v": (29,), "one": (), "none": (0, 3), "t": (3, 4, 5)}

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator)
        return (numbers * 2).round() / 8 if coarse else numbers * 0.01

    base = {key: torch.zeros(shape) if coarse else draw(shape) for key, shape in shapes.items()}
    changes = [{key: draw(shape) for key, shape in shapes.items()} for _ in range(experts)]
    return vectors_of(*changes, base=base, tile=tile)


def merged(method: TensorMethod | SurveyMethod, vectors: TaskVectors) -> Tensors:
    """The merged delta of every tensor."""
    ready = prepare(method, vectors)
    parts: dict[str, list[torch.Tensor]] = {key: [torch.empty(0)] for key in vectors.shapes}
    for block in vectors.blocks(scope=ready.scope):
        delta = ready.merge(block.base, block.deltas, site=block.site)
        assert delta.shape == block.base.shape
        parts[block.site.key].append(delta.reshape(-1))
    return {key: torch.cat(parts[key]).reshape(shape) for key, shape in vectors.shapes.items()}


def stacked(vectors: TaskVectors) -> Tensors:
    """All deltas of each tensor, [T, *shape], as the methods see them."""
    return {key: torch.stack([vector[key] for vector in vectors.vectors.values()]) for key in vectors.shapes}


def normal(*shape: int, seed: int = 0, scale: float = 1e-2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def merge(method: TensorMethod, deltas: torch.Tensor, *, key: str = KEY) -> torch.Tensor:
    """The merged delta of one tensor [T, *shape] over a base of ones."""
    shape = tuple(deltas.shape[1:])
    return method.merge(torch.ones(shape), deltas, site=Site(key, shape, 0, tuple(map(str, range(len(deltas))))))


@dataclass(frozen=True)
class Products:
    """An expert by its factors: tensors that it does not name are untouched. `thin`: whether it tells them."""

    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    thin: bool = True
    mute: bool = False

    def shape(self, key: str) -> tuple[int, ...] | None:
        return (len(self.pairs[key][0]), self.pairs[key][1].shape[1]) if key in self.pairs else None

    def delta(self, key: str, start: int, stop: int, *, base: torch.Tensor) -> torch.Tensor:
        assert not self.mute, "the product was asked for"
        if key not in self.pairs:
            return torch.zeros_like(base)
        left, right = self.pairs[key]
        return (left.double() @ right.double()).float().reshape(-1)[start:stop]

    def factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.pairs[key] if self.thin else None

    def origin(self, key: str) -> str:
        return "a test"
