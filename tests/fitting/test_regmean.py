"""RegMean and RegMean++: the normal equations, better than the average, padding, shared weights, merged blocks."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.fitting.making import KINDS, average, numbers, with_a_broken_expert
from torch import nn

from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.fitting.grams import grams, least_squares, linear_layers
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.fitting.regmean import RegMean, RegMeanPp, _block
from orthomerge.fitting.setting import Setting
from orthomerge.testing.settings import CPU, Kind, Words, make_setting

DENSE = "encoder.layer.1.output.dense.weight"


def read_by(setting: Setting, task: str) -> dict[str, torch.Tensor]:
    """X [rows, k] of every linear layer in an expert on its own task, input by input, so that nothing is padded."""
    rows: dict[str, list[torch.Tensor]] = {}
    weights = {id(parameter): name for name, parameter in setting.encoder.module.named_parameters()}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        rows.setdefault(weights[id(module.weight)], []).append(args[0].detach().reshape(-1, args[0].shape[-1]))

    layers = [module for module in setting.encoder.module.modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    setting.encoder.load(setting.tuned(task))
    for _, batch in setting.inputs.batches(task, 1):
        setting.encoder.features(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts).double() for name, parts in rows.items()}


def views(setting: Setting, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: view.double() for name, view in setting.layout.views(weights)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_is_orthogonal_to_the_inputs_and_smaller_than_the_averages(kind: Kind) -> None:
    setting = make_setting(kind)
    merged, plain = views(setting, RegMean(alpha=1.0).fit(setting).weights), views(setting, average(setting))
    inputs = {task: read_by(setting, task) for task in setting.tasks}
    experts = {task: views(setting, setting.tuned(task)) for task in setting.tasks}
    names = linear_layers(setting.encoder.module)
    assert len(names) == 12

    def residuals(weights: dict[str, torch.Tensor], name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs of each task and what is left of the outputs, both divided by the root of their number."""
        own = [(inputs[task][name], experts[task][name]) for task in setting.tasks]
        scaled = [(X / math.sqrt(len(X)), W) for X, W in own]
        return [(X, X @ (weights[name] - W).T) for X, W in scaled]

    for name in names:
        products = [X.T @ residual for X, residual in residuals(merged, name)]
        scale = sum(float(product.norm()) for product in products)
        assert float(torch.stack(products).sum(0).norm()) < 1e-3 * scale
        mine, other = (sum(float(left.square().sum()) for _, left in residuals(w, name)) for w in (merged, plain))
        assert mine < other


@pytest.mark.parametrize("method", [RegMean(), RegMeanPp()])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_is_averaged(kind: Kind, method: RegMean) -> None:
    setting = make_setting(kind)
    fitted = method.fit(setting)
    merged, plain = views(setting, fitted.weights), views(setting, average(setting))
    layers = linear_layers(setting.encoder.module)
    for name in merged:
        assert torch.allclose(merged[name], plain[name], atol=1e-6) == (name not in layers)
    assert fitted.facts["layers"] == 12
    assert fitted.facts["averaged"] == len(merged) - 12
    assert fitted.facts["singular"] == 0
    assert 1 < fitted.facts["condition"] <= fitted.facts["worst"]
    assert fitted.facts.get("blocks") == (2 if isinstance(method, RegMeanPp) else None)


def test_alpha_shrinks_towards_one_weight_for_each_input() -> None:
    setting = make_setting("bert")
    merged = views(setting, RegMean(alpha=0.0).fit(setting).weights)
    squares = {task: read_by(setting, task)[DENSE].square().mean(0) for task in setting.tasks}
    experts = {task: views(setting, setting.tuned(task))[DENSE] for task in setting.tasks}
    expected = sum(squares[task] * experts[task] for task in squares) / sum(squares.values())
    torch.testing.assert_close(merged[DENSE], expected, rtol=1e-4, atol=1e-5)


def test_padded_positions_do_not_count() -> None:
    setting = make_setting("bert")
    once = RegMean().fit(setting).weights
    # Prepared batch by batch, as where memory is short, every text with seven more empty places.
    pool = setting.inputs.pool
    parts = tuple(replace(part, processor=Words(padding=7)) for part in pool.parts)
    longer = replace(setting, inputs=replace(setting.inputs, pool=replace(pool, kept=None, parts=parts)))
    assert longer.inputs.pool.batch(torch.arange(3))["input_ids"].shape[1] > 7
    torch.testing.assert_close(RegMean().fit(longer).weights, once, rtol=1e-4, atol=1e-4)
    setting.encoder.load(setting.tuned("two"))
    mine = grams(setting, setting.inputs, "two")
    for name, X in read_by(setting, "two").items():
        torch.testing.assert_close(mine[name], X.T @ X / len(X), rtol=1e-4, atol=1e-5)


def test_a_direction_that_no_input_has_keeps_the_average() -> None:
    """Three texts have fewer tokens than the 48 numbers that a layer reads."""
    setting = make_setting("bert", inputs=1)
    fitted = RegMean(alpha=1.0).fit(setting)
    assert fitted.facts["singular"] > 0
    change = views(setting, fitted.weights)[DENSE] - views(setting, average(setting))[DENSE]
    X = torch.cat([read_by(setting, task)[DENSE] for task in setting.tasks])
    assert len(X) < 48
    unseen = torch.linalg.svd(X).Vh[len(X) :].T
    assert float((change @ unseen).norm()) < 1e-4 * float(change.norm())
    total = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    solution, condition = least_squares(total, torch.tensor([[4.0], [0.0]], dtype=torch.float64))
    assert solution.tolist() == [[2.0], [0.0]]
    assert condition == float("inf")


def test_the_broken_expert_is_named_although_others_read_the_average_first() -> None:
    """RegMean++ starts from the average, in which the NaN of `five` reaches the first block of every task."""
    name = "embeddings.word_embeddings.weight"
    setting = with_a_broken_expert(make_setting("bert"), name)
    assert setting.tasks[0] != "five"
    with pytest.raises(NumericalError, match=f"'{name}' holds NaN or infinity in expert 'five'"):
        RegMeanPp().fit(setting)


class Shared(nn.Module):
    """Two linear layers with one weight, one that is never called, and one whose weight is a table's too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(99, 8)
        self.first, self.second, self.spare = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.decoder = nn.Linear(8, 99, bias=False)
        self.decoder.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = (self.table(input_ids) * (input_ids > 0).unsqueeze(-1)).sum(1)
        logits: torch.Tensor = self.decoder(self.second(torch.relu(self.first(hidden))))
        return logits[:, :32]


def ids_only(encoder: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    features: torch.Tensor = encoder(batch["input_ids"])
    return features


def with_module(setting: Setting, module: nn.Module) -> Setting:
    """The tasks of a setting for another encoder with random experts."""
    encoder = FlatEncoder(module, ids_only, CPU)
    experts = {
        task: encoder.layout.flat({name: numbers(seed, *shape) for name, shape in encoder.layout.shapes.items()})
        for seed, task in enumerate(setting.tasks)
    }
    return replace(setting, encoder=encoder, base=encoder.weights.clone(), tuned=lambda task: experts[task].clone())


def test_shared_weights_are_solved_once_and_without_linear_layers_there_is_nothing_to_solve() -> None:
    setting = with_module(make_setting("bert"), Shared())
    layers = {name: len(modules) for name, modules in linear_layers(setting.encoder.module).items()}
    assert layers == {"first.weight": 2, "spare.weight": 1}
    fitted = RegMean(alpha=1.0).fit(setting)
    assert fitted.facts["layers"] == 1
    merged, plain = views(setting, fitted.weights), views(setting, average(setting))
    torch.testing.assert_close(merged["spare.weight"], plain["spare.weight"])
    torch.testing.assert_close(merged["table.weight"], plain["table.weight"])
    total, moments = torch.zeros(8, 8).double(), torch.zeros(8, 8).double()
    for task in setting.tasks:
        X = read_by(setting, task)["first.weight"]
        assert len(X) == 2 * 32
        total += X.T @ X
        moments += X.T @ X @ views(setting, setting.tuned(task))["first.weight"].T
    torch.testing.assert_close(merged["first.weight"], torch.linalg.solve(total, moments).T, rtol=1e-3, atol=1e-3)
    with pytest.raises(IncompatibleError, match=r"calls no nn.Linear.*; merge it with 'average'"):
        RegMean().fit(with_module(make_setting("bert"), nn.EmbeddingBag(99, 32)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_an_input_count_by_its_weight(kind: Kind) -> None:
    """G = (G of the first four, halved, + G of the last three times 0.3), each by its share of all rows."""
    setting = make_setting(kind, inputs=7)
    setting.encoder.load(setting.tuned("three"))
    inputs, targets = setting.inputs, setting.inputs.targets["three"]
    parts = [inputs.at({"three": some}) for some in (slice(4), slice(4, None))]
    first, last = (grams(setting, part, "three") for part in parts)
    weighted = replace(targets, weights=torch.tensor([0.5] * 4 + [0.3] * 3))
    both = grams(setting, inputs.with_targets({"three": weighted}), "three")
    counts = [sum(tokens(item) for item in each.raw("three")) for each in parts]
    for name, G in both.items():
        expected = (0.5 * counts[0] * first[name] + 0.3 * counts[1] * last[name]) / sum(counts)
        torch.testing.assert_close(G, expected, rtol=1e-5, atol=1e-7)


def tokens(item: Any) -> int:
    """How many tokens or patches a linear layer reads of an input."""
    return len(item.split()) + 1 if isinstance(item, str) else 17


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_on_common_embeddings_the_first_block_is_regmeans_and_the_second_is_not(kind: Kind, layers: int) -> None:
    setting = make_setting(kind, layers=layers)
    embeddings = [place for name, place in setting.layout.places.items() if name.startswith("embeddings.")]

    def tuned(task: str) -> torch.Tensor:
        weights = setting.tuned(task)
        for place in embeddings:
            weights[place] = setting.base[place]
        return weights

    common = replace(setting, tuned=tuned)
    fitted = RegMeanPp().fit(common)
    mine, other = views(setting, fitted.weights), views(setting, RegMean().fit(common).weights)
    for name in linear_layers(setting.encoder.module):
        same = torch.allclose(mine[name], other[name], rtol=1e-4, atol=1e-5)
        assert same == (_block(name).endswith("0")), name
    assert fitted.facts["blocks"] == layers


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_the_second_block_solves_its_equations_above_merged_blocks(kind: Kind) -> None:
    """Inputs of block 1 are those of the merged embeddings and block 0, then of the expert's own block 1."""
    setting = make_setting(kind)
    weights = RegMeanPp(alpha=1.0).fit(setting).weights
    merged = views(setting, weights)
    above = {name: place for name, place in setting.layout.places.items() if ".1." in _block(name) + "."}
    layers = [name for name in linear_layers(setting.encoder.module) if name in above]
    assert len(layers) == 6
    left = dict.fromkeys(layers, torch.zeros(1))
    for task in setting.tasks:
        expert, mixed = setting.tuned(task), weights.clone()
        for place in above.values():
            mixed[place] = expert[place]
        setting.encoder.load(mixed)
        seen = grams(setting, setting.drawn(256), task)
        own = views(setting, expert)
        for name in layers:
            left[name] = left[name] + seen[name] @ (merged[name] - own[name]).T
    for name, residual in left.items():
        assert float(residual.norm()) < 1e-3 * float(seen[name].norm()), name
