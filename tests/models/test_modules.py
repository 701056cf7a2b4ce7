"""Modules from our own reader, in which everything is accounted for, and predictions of raw inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.berts import COUNTS, HEADS
from tests.models.making import TASKS, average, build

import orthomerge as om
from orthomerge.core.errors import CheckpointError, OrthomergeError, RecipeError
from orthomerge.data.task import Examples, Task
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.families import family, generic
from orthomerge.models.family import Family
from orthomerge.models.features import FeatureCache
from orthomerge.models.heads import head_of
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


def test_a_pooler_may_be_left_over_or_missing() -> None:
    """The stock classifier builds RoBERTa without pooler; pre-trained models have one."""
    model = build("RobertaModel", "roberta", 0)
    tensors = dict(model.state_dict()) | {"embeddings.position_ids": torch.arange(512)[None]}
    assert "pooler.dense.weight" in tensors
    built = module(encoder_config(model.config.to_dict(), family("roberta")), tensors, family("roberta"))
    assert not any("pooler" in name for name in built.state_dict())
    config, tensors = parts()
    built = module(config, {name: tensor for name, tensor in tensors.items() if "pooler" not in name})
    batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    assert family("bert").features(built, batch, "cls").shape == (1, 16)
    with pytest.raises(RecipeError, match="this one has none"):
        family("bert").features(built, batch, "pooler")
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
    """Whoever loads weights with from_pretrained gives None in the place of the folder."""
    from transformers import BertModel

    loading = Mock(wraps=BertModel.from_pretrained)
    monkeypatch.setattr(BertModel, "from_pretrained", loading)
    module(*parts())
    loading.assert_called_once()
    (folder,), options = loading.call_args
    assert (folder, options["local_files_only"], options["trust_remote_code"]) == (None, True, False)


# Predictions: the same as an evaluation makes, input by input


@pytest.fixture(scope="module")
def texts(berts: Path) -> om.Model:
    return om.merge({name: berts / name for name in HEADS}, "task_arithmetic", base=berts / "base", scale=0.5)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> om.Model:
    return average("vit", tmp_path_factory.mktemp("vit"))


def test_predictions_are_those_of_an_evaluation(texts: om.Model, tables: Path) -> None:
    data = {name: om.read_data(tables / f"{name}.csv", name=name) for name in HEADS}
    scores = om.evaluate(texts, data)
    records = [record for record in scores.records if record.protocol == "current"]
    for record in records:
        task = data[record.task]
        rows = texts.predict(task["test"].inputs)
        chosen = [texts.labels[record.task].index(row[record.task].label) for row in rows]
        assert scores.predictions[record.predictions or ""].predicted.tolist() == chosen
        assert len(rows) == COUNTS["test"]
    assert {record.task for record in records} == set(HEADS)


def close(one: Any, other: Any) -> None:
    """The same predictions; scores differ in the last digits where batches differ."""
    assert one.keys() == other.keys()
    for task in one:
        assert one[task].scores == pytest.approx(other[task].scores, abs=1e-6)


def test_one_input_or_several(texts: om.Model) -> None:
    one = texts.predict("a good film")
    several = texts.predict(["a bad film", "a good film"])
    assert isinstance(one, dict)
    close(several[1], one)
    assert texts.predict([]) == []
    assert list(texts.predict("a good film", tasks=["five"])) == ["five"]
    prediction = one["three"]
    assert sum(prediction.scores.values()) == pytest.approx(1)
    assert prediction.score == max(prediction.scores.values()) == prediction.scores[prediction.label]
    assert repr(prediction) == f"{prediction.label} {prediction.score:.2f}"


def test_pictures_in_every_form(images: om.Model, tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    path = tmp_path / "x.png"
    Image.fromarray(pixels).save(path)
    forms: list[Any] = [pixels, Image.fromarray(pixels), path, str(path)]
    answers = [images.predict(form) for form in forms]
    assert all(answer == answers[0] for answer in answers)
    for one, other in zip(images.predict(forms), answers, strict=True):
        close(one, other)
    grey = images.predict(pixels[:, :, 0])
    assert grey == images.predict(np.repeat(pixels[:, :, :1], 3, 2))
    task = Task("one", images.labels["one"], "image", {"test": Examples([pixels], None, "test")})
    head: Any = images.heads["one"]
    logits = head(encode(images, task["test"], task="one").values)
    assert list(answers[0]["one"].scores.values()) == pytest.approx(logits.softmax(1)[0].tolist(), abs=1e-6)
    assert set(answers[0]) == set(TASKS)


def test_features_are_kept_by_all_that_they_depend_on(texts: om.Model, berts: Path, tmp_path: Path) -> None:
    head: Any = head_of(texts.head("two"))
    how = Encoding(FeatureCache(tmp_path), "cpu")
    examples = Examples(["a good film", "it was bad"], np.array([0, 1]), "test")
    other = om.merge({"two": berts / "two"}, "average", base=berts / "base")

    def entries(model: om.Model = texts, inputs: Examples = examples, how: Encoding = how, **changes: Any) -> int:
        encode(model, inputs, task="two", head=replace(head, **changes), how=how)
        return len(list(tmp_path.iterdir()))

    assert entries() == entries() == 1
    assert entries(inputs=replace(examples, labels=None, split="train")) == 1  # features do not depend on labels
    assert entries(inputs=examples.take([1, 0])) == 2
    assert entries(pooling="mean") == 3
    assert entries(max_length=4) == 4
    assert entries(model=other) == 5
    assert entries(how=replace(how, precision="bfloat16")) == 6


def test_refused(texts: om.Model, images: om.Model, tmp_path: Path) -> None:
    values: Any
    for values, kind in ((3, "int"), (["a", None], "NoneType"), (b"a film", "int")):
        with pytest.raises(RecipeError, match=f"reads texts, got {kind}"):
            texts.predict(values)
    for values in (np.zeros((8, 8, 3)), np.zeros((2, 8, 8, 3), dtype=np.uint8), 3):
        with pytest.raises(RecipeError, match="an image must be a path, a PIL image or uint8 pixels"):
            images.predict(values)
    with pytest.raises(RecipeError, match="there is no task 'tow'; did you mean 'two'"):
        texts.predict("a", tasks=["tow"])
    with pytest.raises(RecipeError, match="has no heads"):
        texts.with_heads({}).predict("a")
    with pytest.raises(OrthomergeError, match="nowhere"):
        images.predict(tmp_path / "nowhere.png")


def test_a_module_belongs_to_who_asked_for_it(texts: om.Model) -> None:
    before = texts.predict("a good film")
    module = texts.module("cpu", torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert texts.predict("a good film") == before
    assert {parameter.dtype for parameter in texts.module("cpu").parameters()} == {torch.float32}
