"""What fitted methods have in common: options that are refused, broken experts, equal experts, few inputs, starts."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from tests.fitting.making import KINDS, has_hooks, with_a_broken_expert, with_equal_experts

from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.core.schema import instance_of
from orthomerge.fitting.adamerging import AdaMerging
from orthomerge.fitting.concrete import ConcreteAm, ConcreteTa
from orthomerge.fitting.fisher import Fisher
from orthomerge.fitting.lm_cocktail import LmCocktail
from orthomerge.fitting.model_tailor import ModelTailor
from orthomerge.fitting.regmean import RegMean, RegMeanPp
from orthomerge.fitting.setting import FittedMethod
from orthomerge.merging.methods import FITTED
from orthomerge.testing.settings import Kind, make_setting

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("adamerging", {"density": 0.0}, r"'density' must be in \(0, 1\], got 0"),
    ("adamerging", {"lr": 0.0}, "'lr' must be positive, got 0"),
    ("concrete_ta", {"temperature": 0.0}, "'temperature' must be positive, got 0"),
    ("concrete_ta", {"temperature": nan}, "'temperature' must be positive, got nan"),
    ("concrete_ta", {"temperature": inf}, "'temperature' must be positive, got inf"),
    ("concrete_ta", {"batch": 0}, "'batch' must be at least 1, got 0"),
    ("concrete_am", {"temperature": 0.0}, "'temperature' must be positive, got 0"),
    ("concrete_am", {"steps": 0}, "'steps' must be at least 1, got 0"),
    ("concrete_am", {"inner_lr": 0.0}, "'inner_lr' must be positive, got 0"),
    ("concrete_am", {"adapt_lr": -1.0}, "'adapt_lr' must be positive, got -1"),
    ("concrete_am", {"adapt_steps": 0}, "'adapt_steps' must be at least 1, got 0"),
    ("fisher", {"inputs": 0}, "'inputs' must be at least 1, got 0"),
    ("fisher", {"samples": 0}, "'samples' must be at least 1"),
    ("fisher", {"floor": -1.0}, "'floor' must be at least 0"),
    ("fisher", {"weights": (0.0, 0.0)}, "'weights' must be at least 0 and not all 0"),
    ("fisher", {"weights": (1.0, -1.0)}, "'weights' must be at least 0 and not all 0"),
    ("lm_cocktail", {"temperature": 0.0}, "'temperature' must be positive, got 0"),
    ("lm_cocktail", {"temperature": inf}, "'temperature' must be positive, got inf"),
    ("lm_cocktail", {"inputs": 0}, "'inputs' must be at least 1, got 0"),
    ("model_tailor", {"sparsity": 2.0}, r"'sparsity' must be in \[0, 1\], got 2"),
    ("model_tailor", {"balance": -1.0}, r"'balance' must be in \[0, 1\], got -1"),
    ("model_tailor", {"sign": 2}, r"'sign' must be -1 .consistent., 1 .as released. or 0 .none., got 2"),
    ("model_tailor", {"damping": 0.0}, "'damping' must be positive, got 0"),
    ("model_tailor", {"rest": "bass"}, "'rest' must be base | mean, got 'bass'; did you mean 'base'"),
    ("model_tailor", {"block": 0}, "'block' must be at least 1"),
    ("model_tailor", {"inputs": 0}, "'inputs' must be at least 1"),
    ("model_tailor", {"scale": nan}, "'scale' must be a finite number"),
    ("moma", {"cap": 0.5}, "'cap' must be at least 1, got 0.5; the mask itself makes elements smaller"),
    ("moma", {"alpha": -1.0}, "'alpha' must be at least 0, got -1"),
    ("moma", {"map_lr": 0.0}, "'map_lr' must be positive, got 0"),
    ("moma", {"mask": "none", "transform": "none"}, "there is nothing to fit; set one of them"),
    ("moma", {"steps": 0}, "'steps' must be at least 1, got 0"),
    ("realign", {"solver": "surgery"}, "adds parameters"),
    ("realign", {"solver": "rigde"}, "did you mean 'ridge'"),
    ("realign", {"cap": 1.0}, "'cap' must be above 1"),
    ("realign", {"copies": -1}, "'copies' must be at least 0, got -1"),
    ("realign", {"lr": 0.0}, "'lr' must be positive"),
    ("realign", {"hold_out": 0.9}, "'hold_out' must be from 0 to 0.5, got 0.9"),
    ("regmean", {"alpha": 1.5}, r"'alpha' must be in \[0, 1\], got 1.5"),
    ("regmean", {"inputs": 0}, "'inputs' must be at least 1, got 0"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_options_that_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("|", r"\|")):
        instance_of(FITTED[name], options, what="method")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Fisher(), r"task 'five' is not finite in 'embeddings.cls_token'; check"),
        (LmCocktail(), "the loss of 'five' on task 'two' is nan"),
        (ModelTailor(), r"input of layer 'layers.1.attention.o_proj.weight' is not finite on task 'five'"),
        (RegMean(), r"'layers.1.attention.q_proj.weight' holds NaN or infinity in expert 'five'"),
        (RegMeanPp(), r"'layers.1.attention.q_proj.weight' holds NaN or infinity in expert 'five'"),
    ],
)
def test_a_broken_expert_is_named_and_no_hook_is_left(method: FittedMethod, message: str) -> None:
    setting = with_a_broken_expert(make_setting("vit", inputs=4))
    with pytest.raises(NumericalError, match=message):
        method.fit(setting)
    assert not has_hooks(setting)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [Fisher(), RegMean(), RegMeanPp()])
def test_equal_experts_come_out_to_the_bit(method: FittedMethod, kind: Kind) -> None:
    setting = make_setting(kind, inputs=6)
    fitted = method.fit(with_equal_experts(setting))
    assert torch.equal(fitted.weights, setting.tuned("three"))
    assert fitted.classifiers is setting.heads
    assert not has_hooks(setting)


@pytest.mark.parametrize(
    "method",
    [
        AdaMerging(steps=1, lr=1e-12),
        ConcreteTa(steps=1, lr=1e-12, final="expected"),
        ConcreteAm(steps=1, lr=1e-12, adapt_steps=1, adapt_lr=1e-12, final="expected"),
    ],
)
def test_before_the_first_step_it_is_task_arithmetic(method: FittedMethod) -> None:
    setting = make_setting("bert")
    expected = setting.merged("task_arithmetic", {"scale": 0.3})
    torch.testing.assert_close(method.fit(setting).weights, expected, rtol=1e-5, atol=1e-5)


def test_inputs_are_drawn() -> None:
    setting = make_setting("vit")
    assert [len(targets) for targets in setting.drawn(7).targets.values()] == [7, 7, 7]
    assert torch.equal(setting.drawn(99).targets["five"].rows, setting.inputs.targets["five"].rows)
    empty = setting.inputs.at({**dict.fromkeys(setting.tasks, slice(None)), "two": slice(0)})
    with pytest.raises(RecipeError, match="task 'two' has no inputs; give"):
        replace(setting, inputs=empty).drawn(7)
