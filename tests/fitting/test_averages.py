"""Fisher merging and LM-Cocktail: the linear softmax by hand, gradients input by input, weights from losses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.fitting.making import KINDS, average, numbers, shared_setting
from torch import nn

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Examples, Modality
from orthomerge.fitting.fisher import Fisher, directions, fisher_of
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.fitting.lm_cocktail import LmCocktail
from orthomerge.fitting.setting import Inputs, Setting, encoded, prepare
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.settings import CPU, Kind, make_setting


@dataclass(frozen=True)
class Numbers:
    """Inputs that are vectors already."""

    modality: ClassVar[Modality] = "text"

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.stack(list(inputs))}

    def digest(self) -> str:
        return "numbers"


def project(encoder: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = encoder(batch["x"])
    return found


def softmax_setting(experts: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> Setting:
    """log p(y|x) = log softmax(W x): the encoder is W [C, k], and the heads do nothing."""
    classes, width = next(iter(experts.values())).shape
    encoder = FlatEncoder(nn.Linear(width, classes, bias=False), project, CPU)
    flat = {task: encoder.layout.flat({"weight": weight}) for task, weight in experts.items()}
    labels = tuple(map(str, range(classes)))
    examples = {task: Examples(list(rows), None, "train") for task, rows in inputs.items()}
    teacher = {task: inputs[task] @ experts[task].T for task in inputs}
    return Setting(
        encoder=encoder,
        base=torch.zeros(encoder.layout.size),
        tuned=lambda task: flat[task].clone(),
        merged=lambda method, options: torch.zeros(encoder.layout.size),
        heads={task: Head(Linear(torch.eye(classes)), labels) for task in experts},
        inputs=prepare(examples, dict.fromkeys(examples, Numbers()), teacher, device=encoder.device),
    )


def by_hand(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """E_x sum_y p_y (e_y - p)^2 (x) x^2."""
    total = torch.zeros_like(weight, dtype=torch.float64)
    for x in inputs.double():
        p = (weight.double() @ x).softmax(0)
        for y, share in enumerate(p):
            error = torch.eye(len(p), dtype=torch.float64)[y] - p
            total += share * torch.outer(error, x).square()
    return total / len(inputs)


def matrix(setting: Setting, weights: torch.Tensor) -> torch.Tensor:
    return next(view for _, view in setting.layout.views(weights))


def test_the_linear_softmax_by_hand() -> None:
    experts, inputs = ({task: numbers(seed + n, n, 5) for seed, task in enumerate(("a", "b"))} for n in (3, 7))
    setting = softmax_setting(experts, inputs)
    F = {task: by_hand(experts[task], inputs[task]) for task in experts}
    found = matrix(setting, Fisher(normalise=False, floor=0.0).fit(setting).weights)
    expected = sum(F[task] * experts[task] for task in F) / (F["a"] + F["b"])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)

    unit = {task: fisher / fisher.norm() for task, fisher in F.items()}
    fitted = Fisher(floor=0.0, weights=(1.0, 3.0)).fit(setting)
    expected = (unit["a"] * experts["a"] + 3 * unit["b"] * experts["b"]) / (unit["a"] + 3 * unit["b"])
    torch.testing.assert_close(matrix(setting, fitted.weights).double(), expected, rtol=1e-5, atol=1e-5)
    assert fitted.facts["norms"]["a"] == pytest.approx(float(F["a"].norm()), rel=1e-5)
    assert fitted.facts["averaged"] == 0


def test_equal_fishers_give_the_average() -> None:
    """One more for every class changes no prediction, so the Fishers are the same though the weights are not."""
    weight, inputs = numbers(1, 4, 6), numbers(2, 9, 6)
    experts = {"a": weight, "b": weight + numbers(3, 6)}
    setting = softmax_setting(experts, {"a": inputs, "b": inputs})
    found = matrix(setting, Fisher().fit(setting).weights)
    torch.testing.assert_close(found, (experts["a"] + experts["b"]) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_squared_input_by_input_and_class_by_class(kind: Kind) -> None:
    setting = make_setting(kind, inputs=4)
    head, encoder = setting.heads["five"], setting.encoder
    found = fisher_of(setting, setting.drawn(4), "five", setting.tuned("five"), head, samples=8)
    assert not encoder.gradient.any()
    expected = torch.zeros_like(found)
    parameters = list(encoder.module.parameters())
    for row in setting.inputs.targets["five"].rows:
        scores = head(encoder.features(setting.inputs.pool.batch(row[None])))[0].log_softmax(0)
        for score in scores:
            gradients = torch.autograd.grad(score, parameters, retain_graph=True, allow_unused=True)
            known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
            flat = setting.layout.flat(dict(zip(setting.layout.shapes, known, strict=True)))
            expected += float(score.detach().exp()) * flat.square() / 4
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_drawn_labels_are_right_in_the_mean() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    p = logits.double().softmax(0)
    expected = torch.diag(p) - torch.outer(p, p)
    random = torch.Generator().manual_seed(0)
    exact = directions(logits, 3, random)
    assert exact.shape == (3, 4)
    torch.testing.assert_close(exact.T @ exact, expected)
    rough = directions(logits, 2, random)
    assert rough.shape == (2, 4)
    mean = sum(v.T @ v for v in (directions(logits, 2, random) for _ in range(4000))) / 4000
    torch.testing.assert_close(mean, expected, atol=0.02, rtol=0.0)
    assert not len(directions(torch.tensor([0.0, 2000.0]), 3, random))


def test_what_no_input_reaches_is_averaged_and_all_lies_between_the_experts() -> None:
    setting = make_setting("bert", inputs=8)
    fitted = Fisher(floor=1e-9).fit(setting)
    experts = torch.stack([setting.tuned(task) for task in setting.tasks])
    assert (fitted.weights <= experts.amax(0) + 1e-6).all()
    assert (fitted.weights >= experts.amin(0) - 1e-6).all()
    tables = dict(setting.layout.views(fitted.weights)), dict(setting.layout.views(experts.mean(0)))
    rows, means = (table["embeddings.word_embeddings.weight"] for table in tables)
    torch.testing.assert_close(rows[92:], means[92:])
    assert not torch.allclose(rows[1], means[1], atol=1e-3)
    assert 92 * 32 / 20000 > fitted.facts["averaged"] > 7 * 32 / 20000
    plain = Fisher(floor=1e30).fit(setting)
    torch.testing.assert_close(plain.weights, experts.mean(0))
    assert plain.facts["averaged"] == 1


def test_a_weight_of_zero_leaves_an_expert_out_and_every_expert_has_one() -> None:
    setting = make_setting("vit", inputs=6)
    fitted = Fisher(floor=0.0, weights=(0.0, 1.0, 0.0), samples=1).fit(setting)
    name = "layers.0.attention.v_proj.weight"
    torch.testing.assert_close(
        dict(setting.layout.views(fitted.weights))[name], dict(setting.layout.views(setting.tuned("three")))[name]
    )
    assert fitted.classifiers == setting.heads
    with pytest.raises(RecipeError, match="must be one number or 3, got 2"):
        Fisher(weights=(1.0, 1.0)).fit(setting)


def test_inputs_count_by_their_weights() -> None:
    """The mean over two inputs of weight times information: 0.5 of one and 2 of the other."""
    setting = make_setting("bert", inputs=2)
    head, expert, targets = setting.heads["five"], setting.tuned("five"), setting.inputs.targets["five"]

    def information(some: Inputs) -> torch.Tensor:
        return fisher_of(setting, some, "five", expert, head, samples=8)

    one, other = (information(setting.inputs.at({"five": slice(n, n + 1)})) for n in (0, 1))
    weighted = replace(targets, weights=torch.tensor([0.5, 2.0]))
    found = information(setting.inputs.with_targets({"five": weighted}))
    torch.testing.assert_close(found, (0.5 * one + 2.0 * other) / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_follow_from_the_losses(kind: Kind) -> None:
    setting = make_setting(kind)
    fitted = LmCocktail(temperature=0.5).fit(setting)
    shares, losses = fitted.facts["weights"], fitted.facts["losses"]
    assert sum(shares.values()) + fitted.facts["base"] == pytest.approx(1)
    order = sorted(setting.tasks, key=losses.__getitem__)
    assert order == sorted(setting.tasks, key=shares.__getitem__, reverse=True)
    ratio = shares["two"] / fitted.facts["base"]
    assert ratio == pytest.approx(math.exp((fitted.facts["base_loss"] - losses["two"]) / 0.5))
    expected = fitted.facts["base"] * setting.base
    for task, share in shares.items():
        expected = expected + share * setting.tuned(task)
    torch.testing.assert_close(fitted.weights, expected)
    assert fitted.classifiers == setting.heads


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_by_hand(kind: Kind, weight: float) -> None:
    """Every input is one of all tasks, and counts in each by its weight."""
    setting = shared_setting(kind, (1.0, weight), inputs=4)
    setting.encoder.load(setting.tuned("three"))
    terms = []
    for number, (task, head) in enumerate(setting.heads.items()):
        target = head(setting.inputs.targets[task].features).softmax(1)
        student = head(encoded(setting.encoder, setting.inputs, task)).softmax(1)
        each = (target * (target / student).log()).sum(1)
        own = slice(4 * number, 4 * number + 4)
        terms.append(float(weight * each.sum() + (1 - weight) * each[own].sum()) / 12)
    assert LmCocktail().fit(setting).facts["losses"]["three"] == pytest.approx(sum(terms) / 3, rel=1e-5)


def test_a_single_expert_is_its_own_best() -> None:
    setting = make_setting("bert")
    alone = replace(setting, heads={"two": setting.heads["two"]}, inputs=setting.inputs.at({"two": slice(None)}))
    fitted = LmCocktail(base=False).fit(alone)
    torch.testing.assert_close(fitted.weights, setting.tuned("two"))
    assert fitted.facts["weights"] == {"two": 1.0}
    assert "base" not in fitted.facts
    cold = LmCocktail(temperature=1e-4).fit(alone)
    torch.testing.assert_close(cold.weights, setting.tuned("two"))
    assert cold.facts["losses"]["two"] < cold.facts["base_loss"]


def test_a_high_temperature_gives_the_average() -> None:
    setting = make_setting("vit")
    fitted = LmCocktail(temperature=1e9, base=False).fit(setting)
    torch.testing.assert_close(fitted.weights, average(setting), rtol=1e-5, atol=1e-6)
    fitted = LmCocktail(temperature=1e9).fit(setting)
    torch.testing.assert_close(fitted.weights, (3 * average(setting) + setting.base) / 4, rtol=1e-5, atol=1e-6)
