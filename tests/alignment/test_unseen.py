"""Maps in closed form where inputs say little: what was never seen stays where it is, and no change is none."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from tests.alignment.planted import (
    LINEAR,
    RIGID,
    SEES_A,
    SEES_BOTH,
    D,
    doubles,
    exact,
    fit,
    head_in,
    same_head,
    turn,
    weight_of,
)

from orthomerge.alignment.linear_maps import Invertible, Linear
from orthomerge.alignment.rigid import Orthogonal
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Head
from orthomerge.testing.toys import HEADS, head_of, linear_head, pair_of


def strongest(name: str) -> dict[str, Any]:
    """Options under which nothing may change."""
    if name in RIGID:
        return {"kappa": math.inf, "bias": False}
    return {"prior": math.inf} if name == "scaling" else {"strength": math.inf}


def fitted(name: str, pair: FeaturePair, head: Head, **options: Any) -> Head:
    return head_in(fit(name, pair, head, **options).classifier)


@pytest.mark.parametrize("kappa", [1e-4, 0.3, 3.0])
def test_few_inputs_leave_the_rest_of_space_alone(kappa: float) -> None:
    """A is the identity on whatever neither encoder's features reach, and orthogonal on all of it."""
    d, H, T = 20, doubles(4, 20), doubles(4, 20, seed=1)
    sees = exact(linear_head(torch.eye(d)))
    A = weight_of(Orthogonal(kappa=kappa).fit(pair_of(H, T), sees).classifier)
    seen = torch.linalg.qr(torch.cat([H, T]).T)[0]
    unseen = torch.eye(d, dtype=torch.float64) - seen @ seen.T
    assert unseen.trace() == pytest.approx(12)
    torch.testing.assert_close(A @ unseen, unseen, rtol=0, atol=1e-10)
    torch.testing.assert_close(A.T @ A, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (A @ seen - seen).norm() > 0.5


@pytest.mark.parametrize("strength", [0.0, 1e-9, 1e-3])
@pytest.mark.parametrize("name", LINEAR)
def test_least_squares_leaves_unseen_directions_alone(name: str, strength: float) -> None:
    """Also at strength 0, where rounding would do what it likes with them; from sums as from features."""
    d, H, T = 200, doubles(3, 200) + 5, doubles(3, 200, seed=1)
    head = exact(linear_head(doubles(3, d, seed=3), doubles(3, seed=4)))
    seen = torch.linalg.qr(H.T)[0]
    unseen = torch.eye(d, dtype=torch.float64) - seen @ seen.T
    found = fitted(name, pair_of(H, T), head, strength=strength)
    change = found.output.weight - head.output.weight
    assert change.norm() > 1
    torch.testing.assert_close(change @ unseen, torch.zeros_like(change), rtol=0, atol=1e-8)
    if strength == 0:  # enough freedom to say what the expert said
        torch.testing.assert_close(
            found(H).log_softmax(1), head(T).log_softmax(1), rtol=0, atol=1e-6 if name != "invertible" else 1e-4
        )


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", [*RIGID, *LINEAR, "scaling", "kl-map"])
def test_an_infinite_prior_changes_no_bit(name: str, kind: str) -> None:
    pair = pair_of(doubles(9, D), doubles(9, D, seed=1))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        head = head_of(kind)
        head = head.with_tensors({key: 0.3 + tensor.to(dtype) for key, tensor in head.tensors().items()})
        assert same_head(fitted(name, pair, head, **strongest(name)), head)


@pytest.mark.parametrize("name", RIGID)
def test_an_infinite_kappa_with_a_bias_moves_the_means_alone(name: str) -> None:
    head, H, T = exact(head_of("plain")), doubles(9, D), doubles(9, D, seed=1)
    found = fitted(name, pair_of(H, T), head, kappa=math.inf)
    assert torch.equal(found.output.weight, head.output.weight)
    torch.testing.assert_close(found(H).mean(0), head(T).mean(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [*RIGID, *LINEAR, "scaling", "kl-map", "auto"])
def test_heads_keep_their_dtype(name: str, dtype: torch.dtype) -> None:
    head = head_of("plain").to(dtype)
    expert = doubles(9 if name == "kl-map" else 60, D).float()
    found = head_in(fit(name, pair_of(expert @ turn(D).float(), expert), head).classifier)
    assert {tensor.dtype for tensor in found.tensors().values()} == {dtype}
    assert not same_head(found, head)


def test_invertible_lifts_what_linear_leaves_singular() -> None:
    """The expert's features lie in a plane: the best linear map is singular, and near it is an invertible one."""
    H, P = doubles(50, D), torch.diag(torch.tensor([1.0, 1, 0, 0, 0, 0], dtype=torch.float64))
    pair = pair_of(H, H @ P)
    flat, full = (weight_of(each.fit(pair, SEES_A).classifier) for each in (Linear(0.0), Invertible(0.0, floor=1e-3)))
    assert int(torch.linalg.matrix_rank(flat, atol=1e-8)) == 2
    sizes = torch.linalg.svdvals(full)
    torch.testing.assert_close(sizes[2:], 1e-3 * sizes[0].expand(4), rtol=1e-6, atol=0)
    torch.testing.assert_close(full, flat, rtol=0, atol=2e-3)
    regular = pair_of(H, H @ doubles(D, D, seed=4))
    assert torch.equal(
        *(weight_of(each.fit(regular, SEES_A).classifier) for each in (Linear(0.1), Invertible(0.1, floor=1e-9)))
    )


@pytest.mark.parametrize("kind", ["plain", "normalising with bias", "hidden"])
@pytest.mark.parametrize("name", RIGID)
def test_inputs_that_are_all_the_same_move_the_mean_alone(name: str, kind: str) -> None:
    """There is no direction to turn to, only rounding, which may not be taken for one."""
    h, t = (math.pi * (doubles(1, 40, seed=seed) + 3) for seed in (0, 1))  # so that sums of squares are rounded
    head = exact(head_of(kind, d=40))
    for count, kappa in product((1, 3, 7, 33), (0.0, 1e-4, 1.0)):
        pair = pair_of(h.expand(count, -1), t.expand(count, -1))
        found = fitted(name, pair, head, kappa=kappa)
        assert torch.equal(weight_of(found), weight_of(head))
        torch.testing.assert_close(found(h), head(t), rtol=0, atol=1e-9)


ZERO: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*RIGID, *LINEAR, "scaling", "kl-map")]
ZERO += [("kl-map", {"strength": 0.0}), ("kl-map", {"strength": 0.03})]


@pytest.mark.parametrize(("name", "options"), ZERO)
def test_features_that_are_all_zero_say_nothing(name: str, options: dict[str, Any]) -> None:
    for kind, count in product(HEADS, (1, 2, 9)):
        head = head_of(kind)
        found = fitted(name, pair_of(torch.zeros(count, D), doubles(count, D)), head, **options)
        assert torch.equal(weight_of(found), weight_of(head))
        if name == "kl-map":
            assert same_head(found, head)


@pytest.mark.parametrize("name", RIGID)
@pytest.mark.parametrize("d", [12, 100])
def test_a_prior_is_chosen_by_what_is_held_out(name: str, d: int) -> None:
    """Many inputs that only turned: the boldest prior is best. A teacher who differs by noise: hardly any change."""
    head, expert = exact(linear_head(doubles(5, d, seed=3), doubles(5, seed=4))), doubles(600, d, seed=1)
    turned = fit(name, pair_of(expert @ turn(d), expert), head)
    assert turned.facts["kappa"] == 1e-4
    noisy = fit(name, pair_of(expert, expert + doubles(600, d, seed=2)), head)
    assert float(noisy.facts["kappa"]) >= 3
    assert (weight_of(noisy.classifier) - weight_of(head)).norm() < 0.02 * weight_of(head).norm()


def test_the_shift_is_believed_as_far_as_it_is_seen() -> None:
    """A shift of all features by the same number is one that this head, and softmax, cannot see."""
    H, noise, shift = doubles(200, D), 0.5 * doubles(200, D, seed=1), 3 * doubles(D, seed=2)
    for moved, share in ((shift, 1.0), (0 * shift, 0.0), (3 + 0 * shift, 0.0)):
        found = Orthogonal().fit(pair_of(H, H + moved + noise), SEES_BOTH)
        assert found.facts["shift"] == share
