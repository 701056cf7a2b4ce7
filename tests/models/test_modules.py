"""Stock modules from our own reader: everything accounted for, nothing made up, nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.making import build

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.models.families import family, generic
from orthomerge.models.family import Family
from orthomerge.models.model_data import Encoder, loaded, release
from orthomerge.models.skeleton import encoder_config, quiet
from orthomerge.models.tensors import MemoryTensors

Tensors = dict[str, torch.Tensor]


def parts() -> tuple[dict[str, Any], Tensors]:
    """Config and tensors of a tiny BERT."""
    model = build("BertModel", "bert")
    return encoder_config(model.config.to_dict(), family("bert")), dict(model.state_dict())


def module(config: dict[str, Any], tensors: Tensors, row: Family | None = None) -> Any:
    return Encoder(row or family("bert"), config, MemoryTensors(tensors)).module()


def test_weights_and_dtype_are_those_of_the_tensors() -> None:
    """In eval mode; of mixed dtypes, the one that holds all of them."""
    config, tensors = parts()
    built = module(config, tensors)
    assert not built.training
    assert all(torch.equal(built.state_dict()[name], tensor) for name, tensor in tensors.items())
    others = (torch.float16, torch.bfloat16, torch.float64)
    cases = {dtype: {name: tensor.to(dtype) for name, tensor in tensors.items()} for dtype in others}
    cases[torch.float32] = tensors | {"pooler.dense.bias": torch.ones(16, dtype=torch.bfloat16)}
    for dtype, weights in cases.items():
        built = module({**config, "dtype": "float32"}, weights)
        assert {parameter.dtype for parameter in built.parameters()} == {dtype}


GONE = [f"encoder.layer.{layer}.output.dense.{part}" for layer in (0, 1) for part in ("weight", "bias")]
REFUSED: dict[str, tuple[list[str], Tensors, dict[str, Any], str]] = {
    "missing": (GONE, {}, {}, r"BertModel: they lack 'encoder.layer.0.output.dense.bias', .* and 1 more"),
    "half a pooler": (["pooler.dense.bias"], {}, {}, r"they lack 'pooler.dense.bias'"),
    "another shape": ([], {"pooler.dense.bias": torch.ones(3)}, {}, r"shapes to 'pooler.dense.bias \(3,\) instead"),
    "no place": ([], {"classifier.weight": torch.ones(3, 16)}, {}, r"the model has no place for 'classifier.weight'"),
    "odd config": ([], {}, {"num_attention_heads": 3}, r"transformers cannot build BertModel: .*16"),
    "odd type": ([], {}, {"hidden_size": "wide"}, r"transformers cannot build BertModel: "),
}


@pytest.mark.parametrize(("gone", "more", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    gone: list[str], more: Tensors, options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is initialised at random, nothing is printed, and settings of transformers come back."""
    from transformers.utils import logging

    config, tensors = parts()
    before = (logging.get_verbosity(), logging.is_progress_bar_enabled())
    with pytest.raises(CheckpointError, match=message):
        module({**config, **options}, {name: t for name, t in (tensors | more).items() if name not in gone})
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    with quiet():
        assert not logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


def test_optional_weights_may_be_left_over() -> None:
    """The stock classifier builds RoBERTa without pooler; pre-trained models have one."""
    model = build("RobertaModel", "roberta", 0)
    tensors = dict(model.state_dict()) | {"embeddings.position_ids": torch.arange(512)[None]}
    assert "pooler.dense.weight" in tensors
    built = module(encoder_config(model.config.to_dict(), family("roberta")), tensors, family("roberta"))
    assert not any("pooler" in name for name in built.state_dict())


def test_what_is_built_without_a_pooler_or_not_at_all() -> None:
    config, tensors = parts()
    built = module(config, {name: tensor for name, tensor in tensors.items() if "pooler" not in name})
    batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    assert family("bert").features(built, batch, "cls").shape == (1, 16)
    with pytest.raises(RecipeError, match=r"'generic' has no class to build; build the module yourself"):
        module({}, {"a": torch.ones(1)}, generic("bert"))


def test_the_last_two_modules_are_kept() -> None:
    config, tensors = parts()
    shifted = [{name: tensor + float(shift) for name, tensor in tensors.items()} for shift in range(3)]
    first, second, third = encoders = [Encoder(family("bert"), config, MemoryTensors(each)) for each in shifted]
    key = "encoder.layer.0.output.dense.weight"
    for shift, encoder in enumerate(encoders):
        skeleton = loaded(encoder)
        assert loaded(encoder) is skeleton
        assert torch.equal(skeleton.module.state_dict()[skeleton.names[key]], tensors[key] + float(shift))
    kept = loaded(second)
    loaded(first)
    assert loaded(second) is kept
    assert loaded(third) is not skeleton
    release(second)
    assert loaded(second) is not kept


def test_a_folder_of_somebody_else_is_not_given_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of from_pretrained for weights has None in the place of the folder."""
    from transformers import BertModel

    seen: list[Any] = []
    real = BertModel.from_pretrained.__func__

    def spy(cls: Any, name: Any, *arguments: Any, **options: Any) -> Any:
        seen.append((name, options["local_files_only"], options["trust_remote_code"]))
        return real(cls, name, *arguments, **options)

    monkeypatch.setattr(BertModel, "from_pretrained", classmethod(spy))
    module(*parts())
    assert seen == [(None, True, False)]
