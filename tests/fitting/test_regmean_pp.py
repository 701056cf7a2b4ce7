"""RegMean++: the first layer as RegMean solves it, later ones from merged blocks below; blocks by their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.fitting.making import has_hooks

from orthomerge.core.errors import NumericalError
from orthomerge.fitting.grams import grams, linear_layers
from orthomerge.fitting.regmean import RegMean, RegMeanPp, _block
from orthomerge.fitting.setting import Setting
from orthomerge.testing.settings import Kind, make_setting

KINDS = ["bert", "vit"]


def with_common_embeddings(setting: Setting) -> Setting:
    """The same experts, but with the base's embeddings."""

    def tuned(task: str) -> torch.Tensor:
        weights = setting.tuned(task)
        for name, place in setting.layout.places.items():
            if name.startswith("embeddings."):
                weights[place] = setting.base[place]
        return weights

    return replace(setting, tuned=tuned)


@pytest.mark.parametrize("kind", KINDS)
def test_one_block_on_common_embeddings_is_regmean(kind: Kind) -> None:
    setting = with_common_embeddings(make_setting(kind, layers=1))
    mine, other = RegMeanPp().fit(setting), RegMean().fit(setting)
    torch.testing.assert_close(mine.weights, other.weights, rtol=1e-4, atol=1e-5)
    assert mine.facts["blocks"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_block_is_regmeans_and_the_second_is_not(kind: Kind) -> None:
    setting = with_common_embeddings(make_setting(kind))
    fitted = RegMeanPp().fit(setting)
    mine = dict(setting.layout.views(fitted.weights))
    other = dict(setting.layout.views(RegMean().fit(setting).weights))
    for name in linear_layers(setting.encoder.module):
        same = torch.allclose(mine[name], other[name], rtol=1e-4, atol=1e-5)
        assert same == (_block(name).endswith("0")), name
    assert fitted.facts["blocks"] == 2
    assert fitted.facts["layers"] == 12
    assert fitted.classifiers == setting.heads
    assert not has_hooks(setting)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_the_second_block_solves_its_equations_above_merged_blocks(kind: Kind) -> None:
    """Inputs of block 1 are those of the merged embeddings and block 0, then of the expert's own block 1."""
    setting = make_setting(kind)
    weights = RegMeanPp(alpha=1.0).fit(setting).weights
    merged = dict(setting.layout.views(weights))
    above = {name: place for name, place in setting.layout.places.items() if _block(name).endswith("layer.1")}
    above |= {name: place for name, place in setting.layout.places.items() if _block(name) == "layers.1"}
    layers = [name for name in linear_layers(setting.encoder.module) if name in above]
    assert len(layers) == 6
    left = dict.fromkeys(layers, torch.zeros(1))
    for task in setting.tasks:
        expert = setting.tuned(task)
        mixed = weights.clone()
        for place in above.values():
            mixed[place] = expert[place]
        setting.encoder.load(mixed)
        seen = grams(setting, setting.drawn(256), task)
        own = dict(setting.layout.views(expert))
        for name in layers:
            left[name] = left[name] + seen[name] @ (merged[name] - own[name]).double().T
    for name, residual in left.items():
        assert float(residual.norm()) < 1e-3 * float(seen[name].norm()), name


@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_is_averaged_and_equal_experts_come_out_to_the_bit(kind: Kind) -> None:
    setting = make_setting(kind)
    merged = dict(setting.layout.views(RegMeanPp().fit(setting).weights))
    plain = dict(setting.layout.views(torch.stack([setting.tuned(task) for task in setting.tasks]).mean(0)))
    layers = linear_layers(setting.encoder.module)
    for name, weight in merged.items():
        assert torch.allclose(weight, plain[name], atol=1e-6) == (name not in layers)
    expert = setting.tuned("three")
    assert torch.equal(RegMeanPp().fit(replace(setting, tuned=lambda task: expert.clone())).weights, expert)


def test_same_seed_same_bits() -> None:
    setting = make_setting("bert")
    once = RegMeanPp(inputs=9).fit(setting).weights
    assert torch.equal(RegMeanPp(inputs=9).fit(setting).weights, once)
    assert not torch.equal(RegMeanPp(inputs=9).fit(replace(setting, seed=1)).weights, once)


def test_blocks_by_name() -> None:
    assert _block("encoder.layer.3.attention.self.query.weight") == "encoder.layer.3"
    assert _block("encoder.block.0.layer.1.DenseReluDense.wi.weight") == "encoder.block.0"
    assert _block("layers.11.mlp.fc1.weight") == "layers.11"
    assert _block("pooler.dense.weight") == "pooler.dense"


def test_refusals_leave_no_hooks() -> None:
    setting = make_setting("vit")
    place = setting.layout.places["layers.1.attention.q_proj.weight"]

    def tuned(task: str) -> torch.Tensor:
        weights = setting.tuned(task)
        if task == "three":
            weights[place] = float("nan")
        return weights

    with pytest.raises(NumericalError, match=r"'layers.1.attention.o_proj.weight' reads .* task 'three'"):
        RegMeanPp().fit(replace(setting, tuned=tuned))
    assert not has_hooks(setting)
