"""Every input once, in its place, and the encoder left as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from orthomerge.core.device import device_of
from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.data.task import Examples, Modality
from orthomerge.models.encoding import Encoding, _order, extract
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family
from orthomerge.models.features import Features

BERT, VIT = FAMILIES["bert"], FAMILIES["vit"]
CPU = Encoding(None, "cpu")


def one_by_one(encoder: torch.nn.Module, family: Family, pooling: str, examples: Examples, process: Any) -> Any:
    """No padding, no order, nothing that could go wrong."""
    encoder.eval()
    with torch.no_grad():
        return torch.cat([family.features(encoder, process([item]), pooling) for item in examples.inputs])


@pytest.mark.parametrize("pooling", ["cls", "mean", "pooler"])
def test_texts_equal_a_loop(bert: torch.nn.Module, texts: Examples, words: Any, pooling: str) -> None:
    expected = one_by_one(bert, BERT, pooling, texts, words)
    for batch in (1, 5, 22, 23, 64):
        features = extract(bert, BERT, pooling, texts, words, task="film", how=Encoding(None, "cpu", batch=batch))
        assert (features.task, features.split, features.values.dtype) == ("film", "test", torch.float32)
        torch.testing.assert_close(features.values, expected, atol=1e-5, rtol=0)
    assert texts.labels is not None
    assert features.labels is not None
    assert features.labels.tolist() == texts.labels.tolist()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_images_equal_a_loop(vit: torch.nn.Module, images: Examples, pixels: Any, pooling: str) -> None:
    expected = one_by_one(vit, VIT, pooling, images, pixels)
    for batch in (1, 4, 11, 100):
        features = extract(vit, VIT, pooling, images, pixels, task="digit", how=Encoding(None, "cpu", batch=batch))
        torch.testing.assert_close(features.values, expected, atol=1e-5, rtol=0)
    assert (features.labels, features.split, len(features)) == (None, "train", 11)


def test_longest_texts_come_first_and_images_in_their_order(
    texts: Examples, words: Any, images: Examples, pixels: Any
) -> None:
    order = _order(texts, words)
    lengths = [len(texts.inputs[place]) for place in order]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(order) == list(range(23))
    assert _order(images, pixels) == list(range(11))


class Interrupted:
    """A processor during which somebody presses Ctrl-C."""

    modality: ClassVar[Modality] = "text"

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        raise KeyboardInterrupt

    def digest(self) -> str:
        return "none"


def test_the_encoder_keeps_its_modes_and_features_can_be_trained_on(
    bert: torch.nn.Module, texts: Examples, words: Any
) -> None:
    bert.train()
    bert.get_submodule("encoder").eval()
    before = [module.training for module in bert.modules()]
    values = extract(bert, BERT, "cls", texts, words, task="film", how=CPU).values
    assert [module.training for module in bert.modules()] == before
    assert (values.is_inference(), values.requires_grad) == (False, False)
    weight = torch.zeros(3, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.nn.functional.linear(values, weight).sum(), weight)
    assert gradient.shape == weight.shape
    with pytest.raises(KeyboardInterrupt):
        extract(bert, BERT, "cls", texts, Interrupted(), task="film", how=CPU)
    assert [module.training for module in bert.modules()] == before


def test_an_encoder_may_be_a_function(vit: torch.nn.Module, images: Examples, pixels: Any) -> None:
    parameters: dict[str, torch.Tensor] = dict(vit.named_parameters())
    expected = one_by_one(vit, VIT, "cls", images, pixels)

    def function(**batch: torch.Tensor) -> Any:
        return torch.func.functional_call(vit, parameters, (), batch)

    features = extract(function, VIT, "cls", images, pixels, task="digit", how=CPU)
    torch.testing.assert_close(features.values, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_is_close_and_not_the_same(bert: torch.nn.Module, texts: Examples, words: Any, precision: Any) -> None:
    whole = extract(bert, BERT, "cls", texts, words, task="film", how=CPU).values
    narrow = extract(bert, BERT, "cls", texts, words, task="film", how=Encoding(None, "cpu", precision)).values
    assert narrow.dtype == torch.float32
    assert 0 < (whole - narrow).abs().max() < 0.1


def test_training_under_the_callers_own_autocast_goes_on(bert: torch.nn.Module, texts: Examples, words: Any) -> None:
    weight = bert.get_parameter("encoder.layer.0.output.dense.weight")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        extract(bert, BERT, "cls", texts, words, task="film", how=Encoding(None, "cpu", "bfloat16"))
        loss = BERT.features(bert, words(texts.inputs[:2]), "cls")[:, 0].sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().sum() > 0


@dataclass
class Numbers:
    """A processor of rows of numbers."""

    modality: ClassVar[Modality] = "image"

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        assert not torch.is_autocast_enabled("cpu")
        return {"x": torch.tensor(np.stack(inputs), dtype=torch.float32)}

    def digest(self) -> str:
        return "numbers"


class Rows(torch.nn.Module):
    """Gives its input back, changed."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.change(batch["x"])
        return values


def run(change: Any, precision: Any = "float32") -> Features:
    examples = Examples(list(np.arange(14).reshape(7, 2)), None, "val")
    how = Encoding(None, "cpu", precision, batch=3)
    return extract(Rows(change), generic(""), "output", examples, Numbers(), task="toy", how=how)


def test_by_hand() -> None:
    assert run(lambda x: x * 2).values.tolist() == [[4 * row, 4 * row + 2] for row in range(7)]


def test_autocast_is_for_the_encoder_and_not_for_the_processor() -> None:
    def check(x: torch.Tensor) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu")
        return x

    run(check, "bfloat16")


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("change", "precision", "error", "message"),
    [
        (lambda x: x[:2], "float32", IncompatibleError, r"features \(3, d\) for 3 inputs of 'toy', got \(2, 2\)"),
        (lambda x: x[:, None], "float32", IncompatibleError, r"got \(3, 1, 2\); choose another pooling"),
        (
            lambda x: x if x[0, 0] == 0 else x[:, :1],
            "float32",
            IncompatibleError,
            r"features \(3, 2\) for 3 inputs of 'toy', got \(3, 1\)",
        ),
        (
            lambda x: torch.where(x == 9, torch.nan, x),
            "float32",
            NumericalError,
            "not finite for row 4 of 'toy'; check its weights",
        ),
        (lambda x: x / (x != 9), "float16", NumericalError, "row 4 of 'toy'; float16 may be too narrow for it"),
        (out_of_memory, "float32", OrthomergeError, r"out of memory with inputs of 'toy' \(x \(3, 2\)\); give"),
    ],
)
def test_features_that_are_refused(change: Any, precision: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(change, precision)


def test_options_that_are_refused(bert: torch.nn.Module, texts: Examples, words: Any, maskless: Any) -> None:
    wrong: Any = "bf16"
    with pytest.raises(RecipeError, match=r"unknown precision 'bf16'; did you mean 'bfloat16'"):
        Encoding(precision=wrong)
    with pytest.raises(RecipeError, match=r"'batch' must be at least 1, got 0"):
        Encoding(batch=0)
    with pytest.raises(RecipeError, match=r"family 'bert' has no pooling 'clss'; did you mean 'cls'"):
        extract(bert, BERT, "clss", texts, words, task="film", how=CPU)
    with pytest.raises(RecipeError, match=r"the test split of 'film' is empty"):
        extract(bert, BERT, "cls", Examples([], None, "test"), words, task="film", how=CPU)
    with pytest.raises(RecipeError, match=r"'input_ids' without 'attention_mask', so padding would count"):
        extract(bert, BERT, "cls", texts, maskless, task="film", how=CPU)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(
        is_available=lambda: True, current_accelerator=lambda: torch.device("cuda"), device_count=lambda: 2
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    assert device_of("auto") == torch.device("cuda")
    assert device_of("cuda:1") == torch.device("cuda", 1)
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(RecipeError, match=r"device 'cuda:2' does not exist, the last one is 'cuda:1'"):
        device_of("cuda:2")
    accelerator.is_available = lambda: False
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(RecipeError, match=r"device 'cuda' is not available, torch finds cpu here; use 'auto'"):
        device_of("cuda")
    with pytest.raises(RecipeError, match=r"unknown device 'cpuu'; did you mean 'cpu'"):
        device_of("cpuu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(bert: torch.nn.Module, texts: Examples, words: Any) -> None:
    whole = extract(bert, BERT, "mean", texts, words, task="film", how=CPU)
    for batch in (1, 2, 4, 64):
        features = extract(bert, BERT, "mean", texts, words, task="film", how=Encoding(None, batch=batch))
        assert (features.values.device.type, features.values.is_pinned()) == ("cpu", False)
        torch.testing.assert_close(features.values, whole.values, atol=1e-5, rtol=0)
    bert.cpu()
