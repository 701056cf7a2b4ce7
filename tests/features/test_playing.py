"""Texts of a few lengths; what may be recorded; and, on a GPU, that a recording gives what the encoder gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from orthomerge.data.task import Examples
from orthomerge.features.extract import extract
from orthomerge.features.playing import Player, recordable, rounded, width_of
from orthomerge.models.families import FAMILIES

BERT = FAMILIES["bert"]

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def text(*masks: list[int]) -> dict[str, torch.Tensor]:
    mask = torch.tensor(masks)
    return {"input_ids": 7 * mask, "attention_mask": mask, "token_type_ids": torch.zeros_like(mask)}


def test_texts_are_padded_at_their_ends() -> None:
    found = rounded(text([1] * 11, [1] * 9 + [0] * 2), 100)
    assert {tensor.shape for tensor in found.values()} == {torch.Size([2, 16])}
    assert found["attention_mask"].sum(1).tolist() == [11, 9]
    assert found["input_ids"][0].tolist() == [7] * 11 + [0] * 5


@pytest.mark.parametrize(
    ("given", "most"),
    [
        (text([1] * 16), 100),  # of such a length already
        (text([1] * 11), 15),  # the encoder has no place for more
        (text([0, 1, 1], [1, 1, 1]), 100),  # padded at the beginning
        ({"pixel_values": torch.zeros(2, 3, 5, 5)}, 100),
        ({**text([1] * 11), "other": torch.zeros(1, 3)}, 100),
    ],
)
def test_others_stay_as_they_are(given: dict[str, torch.Tensor], most: int) -> None:
    found = rounded(given, most)
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in given.items()}


def test_padding_changes_no_feature(bert: torch.nn.Module, texts: Examples, words: Any) -> None:
    inputs = {name: tensor[:, :21] for name, tensor in words(list(texts.inputs)).items()}
    padded = rounded(inputs, width_of(bert))
    assert padded["input_ids"].shape[1] > inputs["input_ids"].shape[1]
    bert.eval()
    with torch.no_grad():
        for pooling in BERT.poolings:
            torch.testing.assert_close(
                BERT.features(bert, padded, pooling), BERT.features(bert, inputs, pooling), atol=1e-6, rtol=1e-5
            )


def test_nothing_is_padded_beyond_what_positions_there_are(bert: Any) -> None:
    assert width_of(bert) == bert.config.max_position_embeddings - 2
    assert width_of(torch.nn.Linear(2, 2)) == 0


def test_what_may_be_recorded() -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert recordable(encoder, CUDA)
    assert not recordable(encoder, CPU)
    assert not recordable(lambda x: x, CUDA)
    handle = encoder[0].register_forward_hook(lambda *_: None)
    assert not recordable(encoder, CUDA)
    handle.remove()
    encoder[0].register_forward_pre_hook(lambda *_: None)
    assert not recordable(encoder, CUDA)
    with torch.device("meta"):
        large = torch.nn.Linear(1 << 14, 1 << 14)
    assert not recordable(large, CUDA)


def batches(*sizes: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(size, 8, generator=random)} for size in sizes]


def played(act: Callable[[Any], torch.Tensor], groups: list[list[dict[str, torch.Tensor]]]) -> Player:
    """Plays groups, and compares each feature with what `act` gives."""
    player = Player(act, CUDA)
    for group in groups:
        with torch.inference_mode():
            found = player(group)
            for inputs, features in zip(group, found, strict=True):
                expected = act({name: tensor.cuda() for name, tensor in inputs.items()})
                torch.testing.assert_close(features, expected, atol=1e-6, rtol=1e-5)
    return player


@GPU
def test_a_gpu_plays_what_comes_often() -> None:
    encoder = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).cuda()
    calls: list[int] = []

    def act(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(len(inputs["pixel_values"]))
        found: torch.Tensor = encoder(inputs["pixel_values"])
        return found

    player = played(act, [batches(4, 4, 4, 4, 2), batches(4, 4, 4, 2), batches(2, 2, 2, 3)])
    assert len(player._recordings) == 2
    # Once for each batch to compare with; else: the first one, one recording of 4 and of 2, and what came seldom.
    assert calls.count(4) == 7 + 2
    assert calls.count(2) == 5 + 3
    assert calls.count(3) == 1 + 1


@GPU
def test_a_gpu_sees_new_weights() -> None:
    encoder = torch.nn.Linear(8, 4).cuda()

    def act(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = encoder(inputs["pixel_values"])
        return found

    player = played(act, [batches(4, 4, 4, 4)])
    with torch.no_grad():
        encoder.weight.mul_(2)
    with torch.inference_mode():
        inputs = batches(4)[0]
        expected = act({name: tensor.cuda() for name, tensor in inputs.items()})
        torch.testing.assert_close(player([inputs])[0], expected)


@GPU
def test_a_gpu_runs_as_usual_what_cannot_be_recorded() -> None:
    encoder = torch.nn.Linear(8, 4).cuda()

    def looking(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = encoder(inputs["pixel_values"])
        return found if float(found.sum()) else found + 1

    player = played(looking, [batches(4, 4, 4, 4), batches(4, 4, 4)])
    assert player._failed
    assert not player._recordings


@GPU
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_gives_the_same_of_many_texts(bert: torch.nn.Module, texts: Examples, words: Any, precision: Any) -> None:
    many = Examples(list(texts.inputs) * 40, None, "test")
    whole = extract(bert, BERT, "mean", many, words, task="film", device="cpu")
    found = extract(bert, BERT, "mean", many, words, task="film", device="cuda", batch=8, autocast=precision)
    bert.cpu()
    torch.testing.assert_close(found.values, whole.values, atol=1e-5 if precision == "float32" else 0.1, rtol=0)
