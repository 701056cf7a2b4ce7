"""An encoder in one flat tensor: memory that is shared, gradients that add up, and the features of the plain module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy

import pytest
import torch
from torch import nn

from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.files.checkpoint import Spec
from orthomerge.fitting.layout import FlatEncoder, Layout
from orthomerge.models.tensors import MemoryTensors
from orthomerge.testing.settings import CPU


class Tied(nn.Module):
    """A table whose weight is read a second time, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.9)
        self.register_buffer("shift", torch.ones(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(self.out(self.table(ids))) * self.scale + self.shift
        return found


class Halves(MemoryTensors):
    """Every tensor in two blocks."""

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, block in super().blocks():
            for part in torch.chunk(block, 2):
                yield key, part


def pool(encoder: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = encoder(batch["ids"])
    return found


def test_tensors_lie_apart_and_aligned() -> None:
    layout = Layout({"a": (3, 5), "b": (), "c": (64,), "d": (0, 2), "e": (65,)})
    places = [(place.start, place.stop) for place in layout.places.values()]
    assert places == [(0, 15), (64, 65), (128, 192), (192, 192), (192, 257)]
    assert (layout.size, layout.elements) == (320, 15 + 1 + 64 + 65)
    assert Layout({}).size == 0
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in layout.shapes.items()}
    flat = layout.flat({**tensors, "other": torch.ones(3)})
    assert flat.dtype == torch.float32
    for name, view in layout.views(flat):
        assert torch.equal(view, tensors[name].float())
        view.zero_()
    assert torch.equal(flat, torch.zeros(320))
    stacked = dict(layout.views(torch.arange(640.0).view(2, 320)))
    assert stacked["a"].shape == (2, 3, 5)
    assert stacked["b"].tolist() == [64, 320 + 64]
    del tensors["c"]
    with pytest.raises(IncompatibleError, match=r"weights of 'c' are missing; all experts must have the same arch"):
        layout.flat(tensors)


def test_tied_parameters_scalars_and_gradients() -> None:
    torch.manual_seed(0)
    plain = Tied()
    encoder = FlatEncoder(deepcopy(plain), pool, CPU)
    assert sorted(encoder.layout.shapes) == ["scale", "table.weight"]
    batch = {"ids": torch.tensor([0, 3, 3])}
    plain.eval()
    assert torch.equal(encoder.features(batch), pool(plain, batch))
    for _ in range(2):
        encoder.features(batch).square().sum().backward()  # type: ignore[no-untyped-call]
        pool(plain, batch).square().sum().backward()  # type: ignore[no-untyped-call]
    expected = encoder.layout.flat({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    torch.testing.assert_close(encoder.gradient, expected)
    assert expected.count_nonzero() > 8
    encoder.load(torch.zeros(encoder.layout.size))
    assert torch.equal(encoder.features(batch), torch.ones(3, 7))
    module = encoder.module
    assert isinstance(module, Tied)
    assert module.out.weight is module.table.weight
    with torch.no_grad():
        module.scale.fill_(5)
    assert encoder.weights[encoder.layout.places["scale"]].tolist() == [5.0]


def test_from_canonical_names_and_back() -> None:
    """Blocks of a stream under other names; what is no parameter is left out, and each goes into its own dtype."""
    plain = Tied()
    names = {"words": "table.weight", "factor": "scale", "offset": "shift"}
    encoder = FlatEncoder(plain, pool, CPU, names)
    assert encoder.names == {"words": "table.weight", "factor": "scale"}
    words = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    tensors = {"words": words, "factor": torch.tensor(3.0).half(), "offset": torch.ones(7), "other": torch.ones(2)}

    flat = encoder.flat(Halves(tensors))
    assert flat[encoder.layout.places["table.weight"]].tolist() == list(range(35))
    assert flat[encoder.layout.places["scale"]].tolist() == [3.0]
    specs = {"words": Spec((7, 5), "BF16"), "factor": Spec((), "F32"), "offset": Spec((7,), "F32")}
    found = encoder.tensors(flat, specs)
    assert found.keys() == {"words", "factor"}
    assert torch.equal(found["words"], words.bfloat16())
    assert found["factor"].dtype == torch.float32
    with pytest.raises(NumericalError, match=r"'words' does not fit into F16 after the fit .*magnitude 1e\+06\)"):
        encoder.tensors(torch.full_like(flat, 1e6), {"words": Spec((7, 5), "F16")})
    with pytest.raises(IncompatibleError, match="weights of 'scale' are missing"):
        encoder.flat(MemoryTensors({"words": words}))
    with pytest.raises(IncompatibleError, match=r"weights of 'table\.weight' are missing"):
        encoder.flat(MemoryTensors({"words": words[:3], "factor": torch.tensor(1.0)}))
