"""Datasets of Hugging Face, through a stand-in with the surface of the library."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tests.data.making import refused

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.data.reading import read_task
from orthomerge.data.task import Lazy


class ClassLabel:
    def __init__(self, names: list[str] | None = None) -> None:
        self.names = names


class Picture:
    def __init__(self, decode: bool = True) -> None:
        self.decode = decode


class Dataset:
    """As much of datasets.Dataset as is used."""

    def __init__(self, features: dict[str, Any], split: str | None = None, **columns: list[Any]) -> None:
        self.features, self.split, self.columns = features, split, columns
        self.format: str | None = "torch"

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, what: str | int) -> Any:
        assert self.format is None
        return self.columns[what] if isinstance(what, str) else {name: c[what] for name, c in self.columns.items()}

    def with_format(self, kind: None) -> Dataset:
        changed = Dataset(self.features, self.split, **self.columns)
        changed.format = kind
        return changed

    def select_columns(self, names: list[str]) -> Dataset:
        return Dataset(self.features, self.split, **{name: self.columns[name] for name in names}).with_format(None)

    def cast_column(self, name: str, feature: Picture) -> Dataset:
        assert not feature.decode
        return self


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`library.loaded` is what the stand-in loads, or its error; `library.call` its arguments."""
    stand_in = SimpleNamespace(ClassLabel=ClassLabel, Image=Picture, loaded=None, call=None)

    def load(*args: object, **options: object) -> Any:
        stand_in.call = (args, options)
        if isinstance(stand_in.loaded, Exception):
            raise stand_in.loaded
        return stand_in.loaded

    stand_in.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    return stand_in


def texts(count: int = 4, labels: list[Any] | None = None, **more: Any) -> Dataset:
    given = labels if labels is not None else [n % 2 for n in range(count)]
    features = {"text": object(), "label": ClassLabel(["zebra", "ape"])}
    return Dataset(features, text=[f"t{n}" for n in range(count)], label=given, **more)


ODD = Dataset({"text": 0, "label": 0}, text=["", 3, "x"], label=[0, 1, 1])


def png(value: int) -> bytes:
    out = BytesIO()
    Image.new("L", (3, 2), value).save(out, "PNG")
    return out.getvalue()


def test_a_hub_id_with_config_and_revision(library: SimpleNamespace) -> None:
    library.loaded = {"train": texts(), "validation": texts(2), "test": texts(2, [-1, -1]), "unsupervised": texts()}
    task = read_task("org/name:config@v1")
    assert library.call == (("org/name",), {"name": "config", "revision": "v1"})
    assert (task.name, task.modality, task.labels) == ("name-config", "text", ("zebra", "ape"))
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 4, "val": 2, "test": 2}
    assert task["test"].labels is None
    library.loaded = texts()
    assert list(read_task("org/name", validation=0).splits) == ["train"]
    library.loaded.split = "test"
    assert list(read_task("org/name").splits) == ["test"]
    assert library.call == (("org/name",), {"name": None, "revision": None})


def test_pictures_are_decoded_when_used(library: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(9))
    pictures = [{"bytes": png(7), "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}, None]
    features = {"image": Picture(), "label": ClassLabel(["a", "b"])}
    library.loaded = Dataset(features, image=pictures, label=[0, 1, 1], split="train")
    task = read_task("org/name", validation=0)
    inputs = task["train"].inputs
    assert task.modality == "image"
    assert isinstance(inputs, Lazy)
    assert (inputs[0].shape, inputs[0][0, 0], inputs[1][0, 0]) == ((2, 3), 7, 9)
    with pytest.raises(CheckpointError, match=r"org/name \(train\) row 3 has no picture"):
        inputs[2]


@pytest.mark.parametrize(
    ("loaded", "error", "message"),
    [
        (ConnectionError("no\nroute"), CheckpointError, r"cannot load the dataset 'org/name': ConnectionError: no; it"),
        ({"other": texts()}, CheckpointError, r"has no split called train, val or test, got 'other'"),
        (texts(0), CheckpointError, r"org/name \(train\) is empty"),
        (texts(3, [0, None, True]), CheckpointError, r"2 bad rows: row 2 must have .* as 'label', got None; row 3"),
        (texts(3, [0, -1, 1]), CheckpointError, r"\(train\) row 2: label -1 has no name; the names are"),
        (ODD, CheckpointError, r"2 bad rows: row 1 has an empty 'text'; row 2 must have a text as 'text', got 3"),
        (Dataset({"texts": 0}, texts=["x"]), RecipeError, r"has no column 'text'; did you mean 'texts'\?.*`text`"),
        (Dataset({"text": 0, "labels": 0}, text=["x"]), RecipeError, r"'label'; did you mean 'labels'\?.*`label`"),
    ],
)
def test_datasets_that_are_refused(loaded: Any, error: type[Exception], message: str, library: SimpleNamespace) -> None:
    library.loaded = loaded
    refused("org/name", message, error)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(
        "org/name",
        r"reading 'org/name' needs Hugging Face's datasets: pip install datasets; it is not a path",
        RecipeError,
    )
