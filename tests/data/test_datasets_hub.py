"""Datasets of Hugging Face: through a stand-in with the same surface, and through the library where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

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
    """`library.found` is what the stand-in loads, `library.asked` what it was asked for."""
    stand_in = SimpleNamespace(ClassLabel=ClassLabel, Image=Picture, found=None, asked=None)

    def load(*args: object, **options: object) -> Any:
        stand_in.asked = (args, options)
        if isinstance(stand_in.found, Exception):
            raise stand_in.found
        return stand_in.found

    stand_in.load_dataset = stand_in.load_from_disk = load
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    return stand_in


def texts(count: int = 4, labels: list[Any] | None = None, **more: Any) -> Dataset:
    given = labels if labels is not None else [n % 2 for n in range(count)]
    features = {"text": object(), "label": ClassLabel(["zebra", "ape"])}
    return Dataset(features, text=[f"t{n}" for n in range(count)], label=given, **more)


def png(value: int) -> bytes:
    out = BytesIO()
    Image.new("L", (3, 2), value).save(out, "PNG")
    return out.getvalue()


def test_a_hub_id_with_config_and_revision(library: SimpleNamespace) -> None:
    library.found = {"train": texts(), "validation": texts(2), "test": texts(2, [-1, -1]), "unsupervised": texts()}
    task = read_task("org/name:config@v1")
    assert library.asked == (("org/name",), {"name": "config", "revision": "v1"})
    assert (task.name, task.modality, task.labels) == ("name-config", "text", ("zebra", "ape"))
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 4, "val": 2, "test": 2}
    assert task["test"].labels is None


def test_one_dataset_is_its_split(library: SimpleNamespace) -> None:
    library.found = texts()
    assert list(read_task("org/name", validation=0).splits) == ["train"]
    library.found.split = "test"
    assert list(read_task("org/name").splits) == ["test"]
    assert library.asked == (("org/name",), {"name": None, "revision": None})


def test_pictures_are_decoded_when_looked_at(library: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(9))
    pictures = [{"bytes": png(7), "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}, None]
    library.found = Dataset(
        {"image": Picture(), "label": ClassLabel(["a", "b"])}, image=pictures, label=[0, 1, 1], split="train"
    )
    task = read_task("org/name", validation=0)
    inputs = task["train"].inputs
    assert task.modality == "image"
    assert isinstance(inputs, Lazy)
    assert (inputs[0].shape, inputs[0][0, 0], inputs[1][0, 0]) == ((2, 3), 7, 9)
    with pytest.raises(CheckpointError, match=r"org/name \(train\) row 3 has no picture"):
        inputs[2]


@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (
            ConnectionError("no route\nto host"),
            CheckpointError,
            r"cannot load the dataset 'org/name': ConnectionError: no",
        ),
        ({"other": texts()}, CheckpointError, r"has no split called train, val or test, got 'other'"),
        ({"val": texts(), "dev": texts()}, CheckpointError, "'val' and 'dev' are both the val split"),
        (texts(0), CheckpointError, r"org/name \(train\) is empty"),
        (texts(3, [0, None, True]), CheckpointError, r"2 bad rows: row 2 has no .* name as 'label' but None; row 3"),
        (texts(3, [0, -1, 1]), CheckpointError, r"\(train\) row 2: label -1 has no name; named are"),
        (texts(3, [0, 5, 1]), CheckpointError, r"\(train\) row 2: label 5 has no name; named are 'zebra', 'ape'"),
        (texts(3, [0, 0, 0]), CheckpointError, r"the train split has no examples of 'ape'"),
        (
            Dataset({"text": 0, "label": 0}, text=["", 3, "x"], label=[0, 1, 1]),
            CheckpointError,
            r"2 bad rows: row 1 has an empty 'text'; row 2 has no text as 'text' but 3",
        ),
        (Dataset({"texts": 0}, texts=["x"]), RecipeError, r"has no column 'text'; did you mean 'texts'\?.*`text`"),
        (Dataset({"text": 0, "labels": 0}, text=["x"]), RecipeError, r"'label'; did you mean 'labels'\?.*`label`"),
    ],
)
def test_what_is_wrong(found: Any, error: type[Exception], message: str, library: SimpleNamespace) -> None:
    library.found = found
    with pytest.raises(error, match=message):
        read_task("org/name")


def test_a_damaged_folder(library: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()
    library.found = ValueError("broken")
    with pytest.raises(CheckpointError, match=r"cannot load the dataset .*: ValueError: broken"):
        read_task(tmp_path)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        RecipeError,
        match=r"'org/name', which is no path that exists and must be a hub id, needs .*: pip install datasets",
    ):
        read_task("org/name")


def test_saved_to_disk_by_the_library(tmp_path: Path, rows: Callable[..., Any]) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["zebra", "ape"])}
    )
    given = {
        split: datasets.Dataset.from_list(
            [{"text": row["text"], "label": row["label"]} for row in rows() if row["split"] == split], features=features
        )
        for split in ("train", "test")
    }
    datasets.DatasetDict(given).save_to_disk(tmp_path / "texts")
    task = read_task(tmp_path / "texts", validation=0)
    assert (task.name, task.labels, list(task.splits)) == ("texts", ("zebra", "ape"), ["train", "test"])
    assert list(task["train"].inputs) == [f"train {n}" for n in range(20)]
    given["test"].to_parquet(tmp_path / "test.parquet")
    assert read_task(tmp_path / "test.parquet").labels == ("zebra", "ape")

    pictures = {
        "picture": [{"bytes": png(value), "path": None} for value in (3, 4)],
        "label": ["b", "a"],
    }
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict(pictures, features=features).with_format("numpy").save_to_disk(tmp_path / "pictures")
    task = read_task(tmp_path / "pictures")
    assert (task.modality, task.labels) == ("image", ("a", "b"))
    assert np.array_equal(task["train"].inputs[1], np.full((2, 3), 4))
    with pytest.raises(CheckpointError, match="cannot load the dataset 'org/never-heard-of'"):
        read_task("org/never-heard-of")
