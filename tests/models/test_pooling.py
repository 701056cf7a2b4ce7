"""Poolings refuse what they cannot read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.making import batch_for, build
from torch.nn.functional import pad

from orthomerge.core.errors import RecipeError
from orthomerge.models.families import FAMILIES
from orthomerge.models.families import family as find_family
from orthomerge.models.family import eos, mean, pooler, shifted_decoder

IDS = torch.tensor([[7, 1, 0], [8, 9, 1]])


def test_mean_by_hand() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]], [[1.0, 1.0], [2.0, 2.0], [6.0, 0.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    features = mean(SimpleNamespace(last_hidden_state=hidden), {"attention_mask": mask}, None)
    assert features.tolist() == [[2.0, 3.0], [3.0, 1.0]]


def test_mean_does_not_overflow_in_half_precision() -> None:
    hidden = torch.full((1, 100, 1), 30_000.0, dtype=torch.float16)
    mask = torch.ones(1, 100, dtype=torch.long)
    features = mean(SimpleNamespace(last_hidden_state=hidden), {"attention_mask": mask}, None)
    assert features.dtype == torch.float16
    assert features.item() == 30_000.0


def test_what_poolings_refuse() -> None:
    with pytest.raises(RecipeError, match=r"needs an 'attention_mask' in every batch.*got input_ids"):
        mean(SimpleNamespace(last_hidden_state=torch.zeros(2, 3, 4)), {"input_ids": IDS}, None)
    with pytest.raises(RecipeError, match="this one has none; use 'cls' or 'mean'"):
        pooler(SimpleNamespace(pooler_output=None), {"input_ids": IDS}, None)
    with pytest.raises(RecipeError, match="end-of-sequence token 1, but some texts have none"):
        eos(SimpleNamespace(), {"input_ids": torch.tensor([[7, 1], [7, 8]])}, SimpleNamespace(eos_token_id=1))


class Decoder:
    """Gives token number and position back as features, so that the test can see which one was read."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)
        self.seen: dict[str, Any] = {}

    def __call__(self, **batch: Any) -> SimpleNamespace:
        self.seen = batch
        rows, columns = batch["input_ids"].shape
        place = torch.arange(columns).expand(rows, columns)
        return SimpleNamespace(last_hidden_state=torch.stack([batch["decoder_input_ids"], place], dim=-1).float())


def test_eos_reads_the_last_end_of_each_text_and_shifts_the_decoder() -> None:
    decoder = Decoder(eos_token_id=1, decoder_start_token_id=0)
    ids = torch.tensor([[7, 1, 0, 0], [1, 9, 5, 1]])
    assert find_family("t5").features(decoder, {"input_ids": ids}, "eos").tolist() == [[7.0, 1.0], [5.0, 3.0]]
    assert decoder.seen["decoder_input_ids"].tolist() == [[0, 7, 1, 0], [0, 1, 9, 5]]


def test_t5_features_need_to_know_special_tokens() -> None:
    for encoder in (lambda **batch: batch, Decoder(decoder_start_token_id=None)):
        with pytest.raises(RecipeError, match="need to know 'decoder_start_token_id': set it in the encoder's"):
            shifted_decoder(encoder, {"input_ids": IDS})
    for config in (None, SimpleNamespace(eos_token_id=None)):
        with pytest.raises(RecipeError, match="T5 features need to know 'eos_token_id'"):
            eos(SimpleNamespace(), {"input_ids": IDS}, config)


@pytest.mark.parametrize("name", [name for name in FAMILIES if find_family(name).modality == "text"])
def test_more_padding_changes_nothing(name: str) -> None:
    """Whatever texts are filled with, the mask leaves it out."""
    family = find_family(name)
    encoder = build(family.encoder_class, name)
    batch = batch_for(family, encoder.config)
    padded = {name: pad(tensor, (0, 3)) for name, tensor in batch.items()}
    with torch.no_grad():
        for pooling in family.poolings:
            features, expected = family.features(encoder, padded, pooling), family.features(encoder, batch, pooling)
            torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)
