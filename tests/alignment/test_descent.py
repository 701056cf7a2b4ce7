"""Adam as torch has it, the order of batches, and what all aligners that descend have in common."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.aligners import Aligner
from orthomerge.alignment.descent import Descent
from orthomerge.alignment.surgery import ProbSurgery, Surgery
from orthomerge.alignment.trained_maps import AlignedM, MomaOrthogonal, OrthM
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of, random

TRAINED: dict[str, Any] = {
    "aligned-m": AlignedM,
    "orth-m": OrthM,
    "moma-orthogonal": MomaOrthogonal,
    "surgery": Surgery,
    "probsurgery": ProbSurgery,
}
ALIGNERS: dict[str, Any] = {"aligned-c": AlignedC, **TRAINED}
every = pytest.mark.parametrize("name", ALIGNERS)


def short(name: str, *, seed: int = 0) -> Aligner:
    """A few steps of small batches."""
    length = {"epochs": 2} if name == "aligned-c" else {"steps": 6}
    made: Aligner = ALIGNERS[name](batch=8, seed=seed, **length)
    return made


@pytest.mark.parametrize("decay", [False, True])
def test_it_is_torchs(decay: bool) -> None:
    x, y = random(12, 4), random(12, seed=1)
    w, b = torch.zeros(4), torch.zeros(1)

    def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        error = x[rows] @ w + b - y[rows]
        return [2 * error @ x[rows] / len(rows), 2 * error.mean(0, keepdim=True)]

    Descent(steps=30, lr=0.05, batch=12, decay=decay).minimise([w, b], gradients, count=12, name="")
    leaves = [torch.zeros(4, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimiser = torch.optim.Adam(leaves, lr=0.05)
    for step in range(30):
        optimiser.param_groups[0]["lr"] = 0.05 * (1 + math.cos(math.pi * step / 30)) / 2 if decay else 0.05
        optimiser.zero_grad()
        (x @ leaves[0] + leaves[1] - y).square().mean().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    torch.testing.assert_close([w, b], [leaf.detach() for leaf in leaves], atol=1e-5, rtol=0)


def orders(*, count: int, seed: int) -> list[list[int]]:
    """The rows of every step."""
    seen: list[list[int]] = []

    def gradients(rows: torch.Tensor) -> list[torch.Tensor]:
        seen.append(rows.tolist())
        return [torch.zeros(1)]

    Descent(steps=7, lr=0.1, batch=4, seed=seed).minimise([torch.zeros(1)], gradients, count=count, name="")
    return seen


def test_every_epoch_goes_through_all_rows_in_a_new_order() -> None:
    first = orders(count=10, seed=0)
    assert [len(rows) for rows in first] == [4, 4, 2, 4, 4, 2, 4]
    one, two = ([row for rows in part for row in rows] for part in (first[:3], first[3:6]))
    assert sorted(one) == sorted(two) == list(range(10))
    assert one != two
    assert first != orders(count=10, seed=1)
    assert orders(count=3, seed=0) == [[0, 1, 2]] * 7  # a batch of all is all


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "'steps' must be at least 1, got 0"),
    ({"batch": -1}, "'batch' must be at least 1, got -1"),
    ({"lr": 0.0}, r"'lr' must be in \(0, 1\], got 0.0"),
    ({"lr": math.nan}, r"'lr' must be in \(0, 1\], got nan"),
    ({"seed": 2**63}, "'seed' must be a whole number of at most 63 bits"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, options, message) for name in TRAINED for options, message in COMMON),
    ("aligned-c", {"recipe": "papper"}, r"'recipe' must be paper or tuned, got 'papper'; did you mean 'paper'\?"),
    ("aligned-c", {"epochs": 0}, "'epochs' must be at least 1, got 0"),
    ("aligned-c", {"batch": 0}, "'batch' must be at least 1, got 0"),
    ("aligned-c", {"most": 0}, "'most' must be at least 1, got 0"),
    ("aligned-c", {"lr": 0.0}, r"'lr' must be in \(0, 1\], got 0.0"),
    ("aligned-c", {"lr": math.nan}, r"'lr' must be in \(0, 1\], got nan"),
    ("aligned-c", {"seed": -(2**63) - 1}, "'seed' must be a whole number of at most 63 bits"),
    ("orth-m", {"alpha": -1.0}, "'alpha' must be at least 0, got -1.0"),
    ("moma-orthogonal", {"alpha": math.inf}, "'alpha' must be a finite number, got inf"),
    ("surgery", {"rank": 0}, "'rank' must be at least 1, got 0"),
    ("probsurgery", {"width": 0}, "'width' must be at least 1, got 0"),
    ("probsurgery", {"beta": math.nan}, "'beta' must be a finite number, got nan"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        ALIGNERS[name](**options)


@every
@pytest.mark.parametrize("kind", HEADS)
def test_every_head(name: str, kind: str) -> None:
    """The loss falls, or hardly rises in so few steps, and is reported before and after."""
    head, merged, expert = head_of(kind), random(40, 6, seed=7), random(40, 6, seed=8)
    found = short(name).fit(pair_of(merged, expert), head)
    assert not torch.equal(found.classifier(merged), head(merged))
    assert 0 < float(found.facts["loss"]) < 1.2 * float(found.facts["loss_before"])


@every
def test_the_seed_decides(name: str) -> None:
    pair, head = pair_of(random(40, 6), random(40, 6, seed=1)), head_of("plain")
    one, other = (short(name, seed=seed).fit(pair, head).classifier(pair.merged.values) for seed in (0, 1))
    assert not torch.equal(one, other)


@every
def test_divergence_names_the_task(name: str) -> None:
    by_features = name in ("moma-orthogonal", "surgery", "probsurgery")
    size = 3e38 if by_features else 1.0
    pair = pair_of(torch.full((4, 6), size), torch.full((4, 6), -size))
    head = linear_head(torch.full((3, 6), 1.0 if by_features else 3e38))
    with pytest.raises(NumericalError, match=f"of 'toy' diverged under {name}: it is no longer finite; lower 'lr'"):
        short(name).fit(pair, head)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("kind", HEADS)
def test_on_a_gpu(name: str, kind: str) -> None:
    pair, head, new = pair_of(random(20, 6), random(20, 6, seed=50)), head_of(kind), random(9, 6, seed=99)
    one, other = (TRAINED[name](batch=8, steps=6, device=device).fit(pair, head) for device in ("cpu", "cuda"))
    assert other.classifier(new).device.type == "cpu"
    if name != "probsurgery":  # whose noise is the device's own
        near = 1e-2 if name == "orth-m" else 1e-4  # the sign of next to nothing may be either
        torch.testing.assert_close(other.classifier(new), one.classifier(new), atol=near, rtol=near)
    assert float(other.facts["loss"]) < 1.2 * float(other.facts["loss_before"])
