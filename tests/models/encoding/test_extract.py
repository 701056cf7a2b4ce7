"""Every input once, in its place, and the encoder left as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from orthomerge.api.open import open as open_experts
from orthomerge.core.device import device_of
from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.data.task import Examples, Modality
from orthomerge.models.extract import _order, extract
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family
from orthomerge.models.features import Features
from orthomerge.models.processors import load_processor

BERT, VIT = FAMILIES["bert"], FAMILIES["vit"]

GENERIC = generic("", ())


def by_hand(encoder: torch.nn.Module, family: Family, pooling: str, examples: Examples, processor: Any) -> torch.Tensor:
    """One input at a time: no padding, no order, nothing that could go wrong."""
    encoder.eval()
    with torch.no_grad():
        rows = [family.features(encoder, processor([item]), pooling) for item in examples.inputs]
    return torch.cat(rows)


@pytest.mark.parametrize("batch", [1, 5, 22, 23, 64])
@pytest.mark.parametrize("pooling", ["cls", "mean", "pooler"])
def test_texts_equal_a_loop_by_hand(
    bert: torch.nn.Module, texts: Examples, words: Any, pooling: str, batch: int
) -> None:
    found = extract(bert, BERT, pooling, texts, words, task="film", batch=batch, device="cpu")
    expected = by_hand(bert, BERT, pooling, texts, words)
    assert (found.task, found.split, found.values.dtype) == ("film", "test", torch.float32)
    torch.testing.assert_close(found.values, expected, atol=1e-5, rtol=0)
    assert texts.labels is not None
    assert found.labels is not None
    assert found.labels.tolist() == texts.labels.tolist()


def test_a_stock_model_with_its_own_tokenizer(berts: Path) -> None:
    inputs = ["a very good film", "it was bad", "not good", "a film", "very very very bad it was not a good film"]
    processor = load_processor(berts / "base", modality="text", max_length=9)
    encoder = open_experts({"two": berts / "two"}, base=berts / "base").base.encoder.module()
    examples = Examples(inputs, None, "val")
    found = extract(encoder, BERT, "mean", examples, processor, task="film", batch=2, device="cpu")
    torch.testing.assert_close(found.values, by_hand(encoder, BERT, "mean", examples, processor), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch", [1, 4, 11, 100])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_images_equal_a_loop_by_hand(
    vit: torch.nn.Module, images: Examples, pixels: Any, pooling: str, batch: int
) -> None:
    found = extract(vit, VIT, pooling, images, pixels, task="digit", batch=batch, device="cpu")
    torch.testing.assert_close(found.values, by_hand(vit, VIT, pooling, images, pixels), atol=1e-5, rtol=0)
    assert (found.labels, found.split, len(found)) == (None, "train", 11)


def test_the_longest_texts_come_first_and_images_as_they_are(
    texts: Examples, words: Any, images: Examples, pixels: Any
) -> None:
    order = _order(texts, words)
    lengths = [len(texts.inputs[place]) for place in order]
    assert (lengths, sorted(order)) == (sorted(lengths, reverse=True), list(range(23)))
    assert _order(images, pixels) == list(range(11))


class Stopping:
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
    found = extract(bert, BERT, "cls", texts, words, task="film", device="cpu")
    assert [module.training for module in bert.modules()] == before
    assert not found.values.is_inference()
    assert not found.values.requires_grad
    weight = torch.zeros(3, 32, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.nn.functional.linear(found.values, weight).sum(), weight)
    assert gradient.shape == weight.shape

    with pytest.raises(KeyboardInterrupt):
        extract(bert, BERT, "cls", texts, Stopping(), task="film", device="cpu")
    assert [module.training for module in bert.modules()] == before


def test_an_encoder_may_be_a_function(vit: torch.nn.Module, images: Examples, pixels: Any) -> None:
    parameters: dict[str, torch.Tensor] = dict(vit.named_parameters())
    vit.eval()

    def function(**batch: torch.Tensor) -> Any:
        return torch.func.functional_call(vit, parameters, (), batch)

    found = extract(function, VIT, "cls", images, pixels, task="digit", device="cpu")
    torch.testing.assert_close(found.values, by_hand(vit, VIT, "cls", images, pixels), atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_autocast_is_close_and_not_the_same(bert: torch.nn.Module, texts: Examples, words: Any, precision: Any) -> None:
    whole = extract(bert, BERT, "cls", texts, words, task="film", device="cpu")
    narrow = extract(bert, BERT, "cls", texts, words, task="film", device="cpu", autocast=precision)
    assert narrow.values.dtype == torch.float32
    difference = (whole.values - narrow.values).abs().max()
    assert 0 < difference < 0.1


def test_training_under_the_callers_own_autocast_goes_on(bert: torch.nn.Module, texts: Examples, words: Any) -> None:
    weight = bert.get_parameter("encoder.layer.0.output.dense.weight")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        extract(bert, BERT, "cls", texts, words, task="film", device="cpu", autocast="bfloat16")
        loss = BERT.features(bert, words(texts.inputs[:2]), "cls")[:, 0].sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().sum() > 0


@dataclass
class Numbers:
    """A processor for rows of numbers."""

    modality: ClassVar[Modality] = "image"

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        assert not torch.is_autocast_enabled("cpu")
        return {"x": torch.tensor(np.stack(inputs), dtype=torch.float32)}

    def digest(self) -> str:
        return "numbers"


class Rows(torch.nn.Module):
    """Gives its input back, changed at will."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.change(batch["x"])
        return values


EXAMPLES = Examples(list(np.arange(14).reshape(7, 2)), None, "val")


def run(change: Any, **options: Any) -> Features:
    return extract(Rows(change), GENERIC, "output", EXAMPLES, Numbers(), task="toy", batch=3, device="cpu", **options)


def test_autocast_is_for_the_encoder_and_not_for_the_processor() -> None:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu")
        return x

    run(multiply, autocast="bfloat16")


def test_by_hand() -> None:
    assert run(lambda x: x * 2).values.tolist() == [[4 * row, 4 * row + 2] for row in range(7)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(bad: float) -> None:
    def spoil(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x == 9, bad, x)

    with pytest.raises(NumericalError, match=r"not finite for row 4 of 'toy'; check its weights"):
        run(spoil)
    with pytest.raises(NumericalError, match=r"row 4 of 'toy'; float16 may be too narrow for it"):
        run(spoil, autocast="float16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:2], r"must give features \(3, d\) for 3 inputs of 'toy', got \(2, 2\)"),
        (lambda x: x[:, None], r"got \(3, 1, 2\); choose another pooling"),
        (lambda x: x if x[0, 0] == 0 else x[:, :1], r"features \(3, 2\) for 3 inputs of 'toy', got \(3, 1\)"),
    ],
)
def test_features_of_another_shape_are_refused(change: Any, message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        run(change)


def test_out_of_memory_says_what_to_do() -> None:
    def burst(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(OrthomergeError, match=r"cpu ran out of memory on inputs of 'toy' \(x \(3, 2\)\); give a small"):
        run(burst)


def test_a_lost_example_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orthomerge.models.extract._order", lambda examples, processor: list(range(6)))
    with pytest.raises(AssertionError, match="6 of 7 examples of 'toy' were encoded"):
        run(lambda x: x)


def test_what_makes_no_sense_is_refused(bert: torch.nn.Module, texts: Examples, words: Any, maskless: Any) -> None:
    def ask(examples: Examples = texts, processor: Any = words, pooling: str = "cls", **options: Any) -> None:
        extract(bert, BERT, pooling, examples, processor, task="film", **({"device": "cpu"} | options))

    with pytest.raises(RecipeError, match=r"family 'bert' has no pooling 'clss'; did you mean 'cls'"):
        ask(pooling="clss")
    with pytest.raises(RecipeError, match=r"unknown precision 'bf16'; did you mean 'bfloat16'"):
        ask(autocast="bf16")
    with pytest.raises(RecipeError, match=r"'batch' must be at least 1, got 0"):
        ask(batch=0)
    with pytest.raises(RecipeError, match=r"the test split of 'film' is empty"):
        ask(Examples([], None, "test"))
    with pytest.raises(RecipeError, match=r"'input_ids' without 'attention_mask', so padding would count"):
        ask(processor=maskless)


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
@pytest.mark.parametrize("batch", [1, 2, 4, 64])
def test_a_gpu_gives_the_same(bert: torch.nn.Module, texts: Examples, words: Any, batch: int) -> None:
    whole = extract(bert, BERT, "mean", texts, words, task="film", device="cpu")
    features = extract(bert, BERT, "mean", texts, words, task="film", device="auto", batch=batch)
    bert.cpu()
    assert (features.values.device.type, features.values.is_pinned()) == ("cpu", False)
    torch.testing.assert_close(features.values, whole.values, atol=1e-5, rtol=0)
