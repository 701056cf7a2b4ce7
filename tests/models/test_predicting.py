"""Predictions of raw inputs: the same as an evaluation makes, input by input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.berts import COUNTS, HEADS
from tests.models.making import TASKS, average

import orthomerge as om
from orthomerge.core.errors import OrthomergeError, RecipeError
from orthomerge.data.task import Examples, Task
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.features import FeatureCache
from orthomerge.models.heads import head_of


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


NO_TEXTS = ((3, "int"), (["a", None], "NoneType"), (b"a film", "int"))
NO_PICTURES = (np.zeros((8, 8, 3)), np.zeros((2, 8, 8, 3), dtype=np.uint8), 3)


def test_refused(texts: om.Model, images: om.Model, tmp_path: Path) -> None:
    values: Any
    for values, kind in NO_TEXTS:
        with pytest.raises(RecipeError, match=f"reads texts, got {kind}"):
            texts.predict(values)
    for values in NO_PICTURES:
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
