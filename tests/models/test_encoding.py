"""Every input once, in its place, and the encoder left as it was; features are kept, and used again if sound."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.models.making import build, flip_a_bit

from orthomerge.core.device import device_of
from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, OutputError, RecipeError
from orthomerge.data.task import Examples
from orthomerge.models.encoding import Encoding, _order, extract
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family
from orthomerge.models.features import FeatureCache, Features
from orthomerge.models.processing import PixelProcessor
from orthomerge.testing.settings import Words

BERT, VIT = FAMILIES["bert"], FAMILIES["vit"]


def some_texts() -> Examples:
    """23 texts of very different lengths, in no order."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 36, 23)
    inputs = [" ".join(f"w{number}" for number in random.integers(0, 500, length)) for length in lengths]
    return Examples(inputs, random.integers(0, 3, 23), "test")


WORDS, PIXELS, TEXTS = Words(), PixelProcessor(8), some_texts()
IMAGES = Examples(list(np.random.default_rng(0).integers(0, 256, (11, 8, 8, 3), dtype=np.uint8)), None, "train")


@pytest.fixture
def bert() -> Any:
    return copy.deepcopy(build("BertModel", "bert"))


def film(bert: Any, pooling: str = "cls", examples: Examples = TEXTS, processor: Any = WORDS, **how: Any) -> Features:
    """Features of texts."""
    encoding = Encoding(None, **{"device": "cpu", **how})
    return extract(bert, BERT, pooling, examples, processor, task="film", how=encoding)


CASES: list[Any] = [
    *(("BertModel", BERT, pooling, TEXTS, WORDS, (1, 5, 22, 23, 64)) for pooling in ("cls", "mean", "pooler")),
    *(("ViTModel", VIT, pooling, IMAGES, PIXELS, (1, 4, 11, 100)) for pooling in ("cls", "mean")),
]


@pytest.mark.parametrize(("class_name", "family", "pooling", "examples", "process", "batches"), CASES)
def test_features_equal_a_loop(
    class_name: str, family: Family, pooling: str, examples: Examples, process: Any, batches: tuple[int, ...]
) -> None:
    """No padding, no order, nothing that could go wrong."""
    encoder = build(class_name, family.name)
    with torch.no_grad():
        rows = [family.features(encoder, process([item]), pooling) for item in examples.inputs]
    for batch in batches:
        how = Encoding(None, "cpu", batch=batch)
        features = extract(encoder, family, pooling, examples, process, task="film", how=how)
        assert (features.task, features.split, features.values.dtype) == ("film", examples.split, torch.float32)
        torch.testing.assert_close(features.values, torch.cat(rows), atol=1e-5, rtol=0)
        np.testing.assert_array_equal(features.labels, examples.labels)


def test_longest_texts_come_first_and_images_in_their_order() -> None:
    order = _order(TEXTS, WORDS)
    lengths = [len(TEXTS.inputs[place]) for place in order]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(order) == list(range(23))
    assert _order(IMAGES, PIXELS) == list(range(11))


def odd(process: Any) -> Mock:
    """A processor that does something else with its inputs."""
    return Mock(wraps=WORDS, modality="text", side_effect=process)


def test_the_encoder_keeps_its_modes_and_features_can_be_trained_on(bert: torch.nn.Module) -> None:
    bert.train()
    bert.get_submodule("encoder").eval()
    before = [module.training for module in bert.modules()]
    values = film(bert).values
    assert [module.training for module in bert.modules()] == before
    assert (values.is_inference(), values.requires_grad) == (False, False)
    weight = torch.zeros(3, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad((values @ weight.T).sum(), weight)
    assert gradient.shape == weight.shape
    with pytest.raises(KeyboardInterrupt):
        film(bert, processor=odd(KeyboardInterrupt))
    assert [module.training for module in bert.modules()] == before


def test_autocast_is_close_and_not_the_same(bert: torch.nn.Module) -> None:
    for precision in ("bfloat16", "float16"):
        narrow = film(bert, precision=precision).values
        assert narrow.dtype == torch.float32
        assert 0 < (film(bert).values - narrow).abs().max() < 0.1
    # Training under the caller's own autocast goes on.
    weight = bert.get_parameter("encoder.layer.0.output.dense.weight")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        film(bert, precision="bfloat16")
        loss = BERT.features(bert, WORDS(TEXTS.inputs[:2]), "cls")[:, 0].sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.abs().sum() > 0


def numbers(inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Process rows of numbers."""
    assert not torch.is_autocast_enabled("cpu")
    return {"x": torch.tensor(np.stack(inputs), dtype=torch.float32)}


def run(change: Any, precision: Any = "float32") -> Features:
    """Features of an encoder that gives its input back, changed."""
    examples = Examples(list(np.arange(14).reshape(7, 2)), None, "val")
    how, processor = Encoding(None, "cpu", precision, batch=3), Mock(modality="image", side_effect=numbers)
    encoder = torch.nn.Module()
    encoder.forward = lambda **batch: change(batch["x"])
    return extract(encoder, generic(""), "output", examples, processor, task="toy", how=how)


def test_by_hand() -> None:
    """Autocast is for the encoder and not for the processor."""
    assert run(lambda x: x * 2).values.tolist() == [[4 * row, 4 * row + 2] for row in range(7)]
    switched = run(lambda x: x * torch.is_autocast_enabled("cpu"), "bfloat16")
    assert switched.values.tolist() == [[2 * row, 2 * row + 1] for row in range(7)]


def out_of_memory(x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError


SHAPE = r"features of shape \({}\) for 3 inputs of 'toy', got \({}\)"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda x: x[:2], IncompatibleError, SHAPE.format("3, d", "2, 2")),
    (lambda x: x[:, None], IncompatibleError, r"got \(3, 1, 2\); choose another pooling"),
    (lambda x: x if x[0, 0] == 0 else x[:, :1], IncompatibleError, SHAPE.format("3, 2", "3, 1")),
    (
        lambda x: torch.where(x == 9, torch.nan, x),
        NumericalError,
        "NaN or infinity for row 4 of 'toy' in float32; check",
    ),
    (lambda x: x / (x != 9), NumericalError, "NaN or infinity for row 4 of 'toy' in float32; check its weights"),
    (out_of_memory, OrthomergeError, r"out of memory with inputs of 'toy' \(x \(3, 2\)\); give"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_features_that_are_refused(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(change)
    if error is NumericalError:
        with pytest.raises(error, match="row 4 of 'toy' in float16; use precision float32"):
            run(change, "float16")


OPTIONS: dict[str, tuple[str, Any]] = {
    "'precision' must be float32, bfloat16 or float16, got 'bf16'; did you mean 'bfloat16'": ("precision", "bf16"),
    "'batch' must be at least 1, got 0": ("batch", 0),
    "family 'bert' has no pooling 'clss'; did you mean 'cls'": ("pooling", "clss"),
    "the test split of 'film' is empty": ("examples", Examples([], None, "test")),
    "'input_ids' without 'attention_mask', so padding would count": (
        "processor",
        odd(lambda inputs: {"input_ids": WORDS(inputs)["input_ids"]}),
    ),
}


def test_options_that_are_refused(bert: torch.nn.Module) -> None:
    for message, (option, value) in OPTIONS.items():
        with pytest.raises(RecipeError, match=message):
            film(bert, **{option: value})


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    accelerator.current_accelerator = lambda: torch.device("cuda")
    monkeypatch.setattr(torch, "accelerator", accelerator)
    for name, device in (("auto", "cuda"), ("cuda:1", "cuda:1"), ("cpu", "cpu")):
        assert device_of(name) == torch.device(device)
    with pytest.raises(RecipeError, match=r"device 'cuda:2' does not exist, the last one is 'cuda:1'"):
        device_of("cuda:2")
    accelerator.is_available = lambda: False
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(RecipeError, match=r"device 'cuda' is not available, torch finds cpu; use 'auto'"):
        device_of("cuda")
    with pytest.raises(RecipeError, match=r"unknown device 'cpuu'; did you mean 'cpu'"):
        device_of("cpuu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same(bert: torch.nn.Module) -> None:
    whole = film(bert, "mean")
    for batch in (1, 2, 4, 64):
        features = film(bert, "mean", device="auto", batch=batch)
        assert (features.values.device.type, features.values.is_pinned()) == ("cpu", False)
        torch.testing.assert_close(features.values, whole.values, atol=1e-5, rtol=0)
    bert.cpu()


# The cache

KEY = {"weights": "a", "pooling": "cls"}
VALUES = torch.arange(6, dtype=torch.float32).reshape(3, 2)


@pytest.fixture
def cache(tmp_path: Path) -> FeatureCache:
    return FeatureCache(tmp_path / "cache")


def test_features_are_computed_once(cache: FeatureCache) -> None:
    compute = Mock(return_value=VALUES.double())
    for each in (cache, cache, FeatureCache(cache.folder)):
        values = each.get_or_compute(dict(reversed(KEY.items())), 3, compute)
        assert (values.tolist(), values.dtype) == (VALUES.tolist(), torch.float32)
    compute.assert_called_once()
    other = {**KEY, "pooling": "mean"}
    assert cache.get_or_compute(other, 3, lambda: VALUES + 1).tolist() == (VALUES + 1).tolist()
    assert len(list(cache.folder.iterdir())) == 2


def other_name(path: Path) -> None:
    cache, key = FeatureCache(path.parent), {"weights": "b"}
    cache.get_or_compute(key, 3, lambda: VALUES + 9)
    cache.path(key).replace(path)


def other_rows(path: Path) -> None:
    path.unlink()
    FeatureCache(path.parent).get_or_compute(KEY, 4, lambda: torch.zeros(4, 2))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit": flip_a_bit,
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "zero pages": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no seal": lambda path: save_file({"values": VALUES}, path),
    "another dtype": lambda path: save_file({"values": VALUES.double()}, path),
    "another tensor": lambda path: save_file({"features": VALUES}, path),
    "another name": other_name,
    "other rows": other_rows,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_computed_again(cache: FeatureCache, damage: Callable[[Path], Any]) -> None:
    compute = Mock(return_value=VALUES)
    cache.get_or_compute(KEY, 3, compute)
    damage(cache.path(KEY))
    for _ in range(2):
        assert cache.get_or_compute(KEY, 3, compute).tolist() == VALUES.tolist()
    assert compute.call_count == 2


def test_two_may_write_at_once(cache: FeatureCache) -> None:
    values = torch.arange(160_000, dtype=torch.float32).reshape(20_000, 8)

    def write_many_times(writer: int) -> None:
        for number in range(15):  # of an entry that is there, one reads while the other writes
            if (number + writer) % 2:
                cache.path(KEY).unlink(missing_ok=True)
            assert torch.equal(cache.get_or_compute(KEY, 20_000, lambda: values), values)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write_many_times, range(2)))
    assert [path.suffix for path in cache.folder.iterdir()] == [".safetensors"]


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ORTHOMERGE_CACHE", raising=False)
    assert FeatureCache().folder == tmp_path / ".cache/orthomerge/features"
    assert FeatureCache("~/mine").folder == tmp_path / "mine"
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "elsewhere"))
    assert FeatureCache().folder == tmp_path / "elsewhere/features"
    assert not (tmp_path / "elsewhere").exists()
    monkeypatch.setenv("ORTHOMERGE_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(OutputError, match=r"cannot keep features in ~nobody.*set ORTHOMERGE_CACHE to a folder"):
        FeatureCache()


def test_a_folder_that_cannot_be_written_to(cache: FeatureCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is computed, and nothing is left of an entry that was not written."""
    compute = Mock(return_value=VALUES)
    cache.folder.write_text("a file")
    with pytest.raises(OutputError, match=r"cannot keep features in .*: File exists; set ORTHOMERGE_CACHE"):
        cache.get_or_compute(KEY, 3, compute)
    cache.folder.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(OutputError, match=r"cannot keep features in .*: no permission"):
            cache.get_or_compute(KEY, 3, compute)
    compute.assert_not_called()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match=r"cannot write .*: No space left on device; make room"):
        cache.get_or_compute(KEY, 3, compute)
    assert list(cache.folder.iterdir()) == []
