"""Adam as torch has it, what all aligners that descend have in common, and the losses of surgery for autograd."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.alignment.planted import by_autograd
from torch.distributions import Normal, kl_divergence

from orthomerge.alignment.aligned_c import AlignedC
from orthomerge.alignment.aligners import Aligner
from orthomerge.alignment.descent import Descent
from orthomerge.alignment.surgery import ProbSurgery, Surgery, first_layer
from orthomerge.alignment.trained_maps import AlignedM, MomaOrthogonal, OrthM
from orthomerge.core.errors import CheckpointError, NumericalError, RecipeError
from orthomerge.models.heads import SurgeryHead, rebuild_surgery
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


F, T = random(20, 6), random(20, 6, seed=1)
both = pytest.mark.parametrize("aligner", [Surgery, ProbSurgery])


def module(found: object) -> SurgeryHead:
    assert isinstance(found, SurgeryHead)
    return found


def corrected(f: torch.Tensor, D: torch.Tensor, U: torch.Tensor) -> torch.Tensor:
    return f - (f @ D.T).relu() @ U.T


def test_by_hand() -> None:
    # D f = 1 + 2 = 3 for the first input and -3, cut to 0, for the second.
    made = SurgeryHead(linear_head(torch.eye(2)), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5], [-1.0]]))
    assert made(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).tolist() == [[-0.5, 5], [-1, -2]]
    # It comes before the head normalises: (3, 4) - (0, 4) = (3, 0), which has the direction (1, 0).
    head = linear_head(10 * torch.eye(2), normalise=True)
    made = SurgeryHead(head, torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0], [1.0]]))
    assert made(torch.tensor([[3.0, 4.0]])).tolist() == [[10, 0]]


@both
@pytest.mark.parametrize("kind", HEADS)
def test_it_starts_at_the_unaligned_model(kind: str, aligner: Callable[..., Any]) -> None:
    head = head_of(kind)
    assert torch.equal(aligner(steps=1, lr=1e-30).fit(pair_of(F, T), head).classifier(F), head(F))


def check(found: Any, D: torch.Tensor, U: torch.Tensor) -> None:
    """That the module is the one that autograd found, and that the facts say how far the features are from T."""
    made = module(found.classifier)
    torch.testing.assert_close([made.down, made.up], [D, U], atol=2e-5, rtol=0)
    assert found.facts["loss_before"] == pytest.approx(float((F - T).abs().mean()))
    assert found.facts["loss"] == pytest.approx(float((corrected(F, D, U) - T).abs().mean()), rel=1e-4)


def test_its_loss() -> None:
    D = first_layer(4, 6, torch.Generator().manual_seed(3)).requires_grad_()
    U, reference = torch.zeros(6, 4, requires_grad=True), torch.nn.L1Loss()
    expected = by_autograd([D, U], lambda: reference(corrected(F, D, U), T), steps=40, lr=0.01)
    found = Surgery(rank=4, steps=40, lr=0.01, batch=20, seed=3).fit(pair_of(F, T), head_of("normalising"))
    check(found, *expected)


@pytest.mark.parametrize("beta", [0.0, 1e-4, 0.1])
def test_its_loss_by_probsurgery(beta: float) -> None:
    """The generator draws the first layer and the seed of the noise; a batch of all inputs has no order."""
    generator = torch.Generator().manual_seed(3)
    D = first_layer(5, 6, generator).requires_grad_()
    U, V = torch.zeros(6, 5, requires_grad=True), torch.zeros(6, 5, requires_grad=True)
    drawing = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
    noise = iter(torch.randn(50, 20, 6, generator=drawing))

    def loss() -> torch.Tensor:
        h = (F @ D.T).relu()
        bias = Normal(h @ U.T, (h @ V.T / 2).exp())
        z = bias.loc + bias.scale * next(noise)
        distance: torch.Tensor = (F - z - T).abs().mean()
        return distance + beta * kl_divergence(bias, Normal(0.0, 1.0)).sum(1).mean()

    D_found, U_found, _ = by_autograd([D, U, V], loss, steps=30, lr=0.01)
    found = ProbSurgery(width=5, beta=beta, steps=30, lr=0.01, batch=20, seed=3).fit(pair_of(F, T), head_of("plain"))
    check(found, D_found, U_found)


@pytest.mark.parametrize(
    ("aligner", "size", "share"), [(Surgery(lr=0.01), 1, 0.1), (ProbSurgery(lr=0.01, steps=1000, width=32), 3, 0.15)]
)
def test_a_planted_module_is_taken_off(aligner: Surgery | ProbSurgery, size: float, share: float) -> None:
    f, D, U = random(400, 6) + 1, random(2, 6, seed=1), size * random(6, 2, seed=2)
    found = aligner.fit(pair_of(f, corrected(f, D, U)), head_of("plain"))
    assert float(found.facts["loss"]) < share * float(found.facts["loss_before"])


@both
def test_what_it_costs_and_rebuilding(aligner: Callable[..., Any]) -> None:
    head, (kind, r) = head_of("hidden"), ("surgery", 16) if aligner is Surgery else ("probsurgery", 128)
    made = module(aligner(steps=5).fit(pair_of(F, T), head).classifier)
    assert (made.kind, made.head, made.labels) == (kind, head, head.labels)
    assert {name: tensor.shape for name, tensor in made.extra_tensors().items()} == {"down": (r, 6), "up": (6, r)}
    assert sum(tensor.nbytes for tensor in made.extra_tensors().values()) == 2 * r * 6 * 4
    again = rebuild_surgery(head, made.extra_tensors(), kind=kind)
    assert again.kind == kind
    assert torch.equal(again(F), made(F))
    assert torch.equal(made(F), made(F)), "nothing is drawn any more"


def test_the_first_layer_starts_as_torchs_linear() -> None:
    weight = first_layer(200, 64, torch.Generator().manual_seed(0))
    assert weight.abs().max() <= 1 / 8
    assert float(weight.std()) == pytest.approx(1 / 8 / math.sqrt(3), rel=0.02)
    assert float(torch.nn.Linear(64, 200).weight.detach().abs().max()) == pytest.approx(1 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"down": torch.ones(2, 6)}, r"a surgery module must hold 'down' and 'up', got \['down'\]; align again"),
        (
            {"down": torch.ones(2, 5), "up": torch.ones(5, 2)},
            r"head of width 6 must have 'down' \[r, 6\] and 'up' \[6, r\], got \(2, 5\) and \(5, 2\); align again",
        ),
        ({"down": torch.ones(2, 6), "up": torch.ones(6, 3)}, r"got \(2, 6\) and \(6, 3\)"),
        ({"down": torch.ones(6), "up": torch.ones(6)}, r"got \(6,\) and \(6,\)"),
    ],
)
def test_tensors_that_are_no_module(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        rebuild_surgery(head_of("plain"), tensors)
