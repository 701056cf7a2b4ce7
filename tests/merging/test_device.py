"""Matrices merged on another device: the same merge, but for the last digits of a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.tiny import TASKS as EXPERTS
from tests.faults.tiny import write_experts
from tests.merging.making import normal, vectors_of

from orthomerge.api.load import load
from orthomerge.core.errors import OrthomergeError
from orthomerge.merging.kinds import TensorMethod
from orthomerge.merging.methods import METHODS, make_method
from orthomerge.merging.polar import from_gram, svd
from orthomerge.merging.stream import merge_blocks, prepare
from orthomerge.merging.vectors import TaskVectors
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

MATRICES = [name for name, row in METHODS.items() if row.matrices]
GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))]
TASKS = ("a", "b", "c")


SHAPES = {"wide.weight": (12, 40), "tall.weight": (40, 12), "embed.weight": (30, 8), "wide.bias": (12,)}


def vectors() -> TaskVectors:
    base, *changes = (
        {name: normal(*shape, seed=seed, scale=1.0 if seed == 0 else 0.1) for name, shape in SHAPES.items()}
        for seed in range(4)
    )
    return vectors_of(*changes, base=base)


def merged(method: TensorMethod, vectors: TaskVectors) -> dict[str, torch.Tensor]:
    return dict(merge_blocks(vectors, method, lambda block, weights: (block.site.key, weights)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*MATRICES, "knots dare_ties"])
def test_the_same_merge(name: str, device: str) -> None:
    """Whether the survey was on the device or on the host."""
    options: dict[str, Any] = {"merger": "dare_ties"} if " " in name else {}
    method = make_method(name.split(maxsplit=1)[0], options, tasks=TASKS)
    host = vectors()
    there = replace(host, device=torch.device(device))
    expected = merged(prepare(method, host), host)
    for surveyed in (there, host):
        result = merged(prepare(method, surveyed), there)
        assert result.keys() == expected.keys()
        for key, value in result.items():
            assert value.is_cpu
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, expected[key], rtol=0, atol=0 if device == "cpu" else 1e-5)


@pytest.mark.parametrize("top", [None, 3])
def test_eigenvectors_of_the_gram_matrix_are_enough_for_large_values(top: int | None) -> None:
    X = torch.randn(30, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = from_gram(X, top=top)
    assert found is not None
    _, s, Vh = svd(X, key="x", top=top)
    torch.testing.assert_close(found[0], s)
    torch.testing.assert_close((found[1] * Vh).sum(1).abs(), torch.ones(len(s), dtype=torch.float64))


def test_and_say_so_where_they_are_not() -> None:
    """A value that is small but not below the floor; one that is not asked for does not matter."""
    U, _ = torch.linalg.qr(torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    X = U * torch.tensor([1.0, 0.5, 0.1, 1e-6], dtype=torch.float64)
    assert from_gram(X) is None
    assert from_gram(X, top=3) is not None
    assert from_gram(X, floor=1e-3) is not None
    assert from_gram(torch.zeros(3, 2, dtype=torch.float64)) is None


def recipe(folder: Path, **more: Any) -> Recipe:
    write_experts(folder)
    return Recipe({task: str(folder / task) for task in EXPERTS}, base=str(folder / "base"), **more)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("task_arithmetic", r"methods that decompose matrices \(tsv_m.*task_arithmetic is as fast"),
        pytest.param("tsv_m", "'cuda' is not available", marks=pytest.mark.skipif(GPU, reason="needs to have no GPU")),
    ],
)
def test_devices_that_are_refused(tmp_path: Path, method: str, message: str) -> None:
    with pytest.raises(OrthomergeError, match=message):
        write(recipe(tmp_path, method=method, device="cuda"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_whole_merge(tmp_path: Path) -> None:
    found = []
    for where in ("cpu", "cuda"):
        write(recipe(tmp_path, method="tsv_m", device=where), out=tmp_path / "out", force=True)
        found.append(load(tmp_path / "out").encoder.module().state_dict())
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-5)
