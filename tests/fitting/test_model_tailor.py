"""Model Tailor: no sparsity and full, how much is kept, and which sign of the compensation makes up for the rest."""

import math
from dataclasses import replace

import pytest
import torch
from tests.fitting.making import KINDS, has_hooks

from orthomerge.core.errors import NumericalError
from orthomerge.fitting.grams import grams, linear_layers
from orthomerge.fitting.model_tailor import ModelTailor
from orthomerge.fitting.setting import Setting
from orthomerge.testing.settings import Kind, make_setting


def alone(setting: Setting, task: str) -> Setting:
    return replace(setting, heads={task: setting.heads[task]}, inputs=setting.inputs.at({task: slice(None)}))


@pytest.mark.parametrize("kind", KINDS)
def test_ends_of_the_sparsity_and_sums_of_patches(kind: Kind) -> None:
    setting = make_setting(kind)
    one = alone(setting, "three")
    torch.testing.assert_close(ModelTailor(sparsity=0.0).fit(one).weights, setting.tuned("three"))
    fitted = ModelTailor(sparsity=1.0, rest="base").fit(setting)
    assert torch.equal(fitted.weights, setting.base)
    assert fitted.facts["kept"] == {"two": 0.0, "three": 0.0, "five": 0.0}
    assert fitted.classifiers == setting.heads
    assert not has_hooks(setting)
    deltas = torch.stack([setting.tuned(task) - setting.base for task in setting.tasks]).sum(0)
    whole = dict(setting.layout.views(ModelTailor(sparsity=0.0, scale=0.3).fit(setting).weights - setting.base))
    layers = linear_layers(setting.encoder.module)
    for name, delta in setting.layout.views(deltas):
        torch.testing.assert_close(whole[name], delta * (0.3 if name in layers else 0.1), rtol=1e-4, atol=1e-5)
    patches = [ModelTailor(rest="base").fit(alone(setting, task)).weights - setting.base for task in setting.tasks]
    together = ModelTailor(rest="base").fit(setting).weights - setting.base
    torch.testing.assert_close(together, sum(patches), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tenth_of_every_layer_differs_from_the_base(kind: Kind) -> None:
    setting = alone(make_setting(kind), "five")
    fitted = ModelTailor(sparsity=0.9, rest="base").fit(setting)
    merged, base = (dict(setting.layout.views(weights)) for weights in (fitted.weights, setting.base))
    layers = linear_layers(setting.encoder.module)
    assert fitted.facts["layers"] == len(layers)
    changed = 0
    for name in merged:
        count = int((merged[name] != base[name]).sum())
        assert count == (merged[name].numel() - int(0.9 * merged[name].numel()) if name in layers else 0)
        changed += count
    total = sum(merged[name].numel() for name in layers)
    assert fitted.facts["kept"]["five"] == pytest.approx(changed / total)


@pytest.mark.parametrize("kind", KINDS)
def test_minus_makes_up_for_what_reverts_and_plus_makes_it_worse(kind: Kind) -> None:
    setting = make_setting(kind)
    errors: dict[int, dict[str, float]] = {-1: {}, 0: {}, 1: {}}
    base = dict(setting.layout.views(setting.base))
    for task in setting.tasks:
        weights = setting.tuned(task)
        setting.encoder.load(weights)
        expert = dict(setting.layout.views(weights))
        for name, gram in grams(setting, setting.inputs, task).items():
            W_t, W_b = expert[name].double(), base[name].double()
            for sign, found in errors.items():
                delta, kept = ModelTailor(sparsity=0.5, sign=sign).patch(W_t, W_b, gram, what=name)
                left = W_b + delta - W_t
                found[f"{task} {name}"] = float((left @ gram * left).sum())
                assert kept == W_t.numel() - int(0.5 * W_t.numel())
    for place in errors[0]:
        assert errors[-1][place] < errors[0][place] < errors[1][place], place


def test_two_columns_by_hand() -> None:
    """The first entry reverts; the second takes over what it did, as far as the two inputs go together."""
    tuned = torch.tensor([[1.0, 5.0]], dtype=torch.float64)
    base = torch.zeros(1, 2, dtype=torch.float64)
    gram = torch.tensor([[2.0, 1.0], [1.0, 4.0]], dtype=torch.float64)
    damped = gram + 0.5 * 3 * torch.eye(2)
    for sign, expected in ((-1, 5 + damped[0, 1] / damped[1, 1]), (0, 5.0), (1, 5 - damped[0, 1] / damped[1, 1])):
        for block in (1, 2):  # two blocks of one column, or one of two
            method = ModelTailor(sparsity=0.5, damping=0.5, sign=sign, block=block)
            delta, _ = method.patch(tuned, base, gram, what="a toy")
            if block == 2:
                assert delta.tolist() == [[0.0, pytest.approx(float(expected))]]
            else:
                assert delta.tolist() == [[1.0, 5.0]]  # half of one entry is none


def test_blocks_only_change_where_scores_are_compared() -> None:
    random = torch.Generator().manual_seed(0)
    tuned, base = torch.randn(2, 5, 12, generator=random, dtype=torch.float64)
    X = torch.randn(40, 12, generator=random, dtype=torch.float64)
    gram = X.T @ X / 40
    whole, kept = ModelTailor(sparsity=1.0, block=12).patch(tuned, base, gram, what="a toy")
    parts, _ = ModelTailor(sparsity=1.0, block=5).patch(tuned, base, gram, what="a toy")
    assert kept == 0
    assert not whole.any()
    assert not parts.any()
    half, kept = ModelTailor(sparsity=0.5, block=4).patch(tuned, base, gram, what="a toy")
    assert kept == 30
    for start in (0, 4, 8):
        assert int((half[:, start : start + 4] == 0).sum()) == 10
    left = half + base - tuned
    other = ModelTailor(sparsity=0.5, block=4, sign=0).patch(tuned, base, gram, what="a toy")[0] + base - tuned
    assert float((left @ gram * left).sum()) < float((other @ gram * other).sum())


def test_matrices_that_cannot_be_factored() -> None:
    square = torch.eye(2, dtype=torch.float64)
    with pytest.raises(NumericalError, match="the second moments of the inputs of a toy are singular; raise 'damping'"):
        ModelTailor().patch(square, square, -square, what="a toy")
    with pytest.raises(NumericalError, match="the patch of a toy is not finite; raise 'damping'"):
        ModelTailor(sparsity=0.0).patch(square * math.nan, square, square, what="a toy")
