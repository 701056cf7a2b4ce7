"""Gram matrices of base and deltas."""

from collections.abc import Callable

import torch

from orthomerge.merging.gram import grams
from orthomerge.merging.vectors import TaskVectors

Make = Callable[..., TaskVectors]


def test_by_hand(vectors_of: Make) -> None:
    vectors = vectors_of([1, 2], [0, -3], base={"w": torch.tensor([2.0, 1.0])})
    assert grams(vectors)["w"].tolist() == [[5, 4, -3], [4, 5, -6], [-3, -6, 9]]


def test_the_same_bits_for_every_size_of_block(vectors_of: Make) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"m": torch.randn(300, 301, generator=generator), "v": torch.randn(99, generator=generator)}
    experts = [{key: torch.randn(t.shape, generator=generator) for key, t in base.items()} for _ in "ab"]
    whole, *others = (grams(vectors_of(*experts, base=base, tile=tile)) for tile in (1 << 20, 1 << 15, 10_007))
    for other in others:
        assert all(torch.equal(other[key], gram) for key, gram in whole.items())
    vectors = vectors_of(*experts, base=base)
    rows = torch.stack([base["m"], *(vector["m"] for vector in vectors.vectors.values())]).flatten(1).double()
    torch.testing.assert_close(whole["m"], rows @ rows.T)
