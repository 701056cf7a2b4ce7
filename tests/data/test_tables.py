"""Tables of every kind come back as they were written, and bad rows are named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.data import rows as module
from orthomerge.data.reading import read_task

Row = dict[str, Any]
Rows = Callable[..., list[Row]]
Write = Callable[[Path, Sequence[Row]], Path]
NAMES = [
    *(f"reviews{kind}{packed}" for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in ("", ".gz")),
    "reviews.parquet",
]


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, tmp_path: Path, rows: Rows, write: Write) -> None:
    task = read_task(write(tmp_path / name, rows()), validation=0)
    assert (task.name, task.modality, task.labels) == ("reviews", "text", ("zebra", "ape"))
    assert list(task.splits) == ["train", "test"]
    assert list(task["train"].inputs) == [f"train {n}" for n in range(20)]
    labels = task["test"].labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_names_alone_are_sorted(name: str, tmp_path: Path, rows: Rows, write: Write) -> None:
    named = [{"text": row["text"], "label": row["label_name"]} for row in rows()]
    task = read_task(write(tmp_path / name, named))
    assert task.labels == ("ape", "zebra")
    assert list(task.splits) == ["train", "val"]


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_a_folder_with_a_file_a_split(kind: str, tmp_path: Path, rows: Rows, write: Write) -> None:
    for name, split in (("train", "train"), ("dev", "train"), ("test", "test")):
        write(tmp_path / f"{name}{kind}", [row | {"split": "valid" if name == "dev" else split} for row in rows(4, 2)])
    (tmp_path / "README.md").write_text("not a table")
    task = read_task(tmp_path)
    assert task.name == tmp_path.name
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 6, "val": 6, "test": 6}
    assert all(examples.split == split for split, examples in task.splits.items())


def test_files_by_split(tmp_path: Path, rows: Rows, write: Write) -> None:
    one = write(tmp_path / "a.csv", [{"text": "x", "label": "no"}, {"text": "y", "label": "yes"}])
    two = write(tmp_path / "b.jsonl", [{"text": "z", "label": "yes"}])
    task = read_task({"train": one, "validation": str(two)})
    assert task.name == tmp_path.name
    assert list(task["val"].inputs) == ["z"]
    with pytest.raises(RecipeError, match="has no 'test' split"):
        task["test"]


@pytest.mark.parametrize("files", [{}, {"trian": "a.csv"}, {"val": "a.csv", "dev": "b.csv"}])
def test_files_of_unknown_splits(files: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match="files must be given for train, val and test"):
        read_task(files)


def test_a_file_called_after_a_split_is_that_split(tmp_path: Path, rows: Rows, write: Write) -> None:
    task = read_task(write(tmp_path / "test.csv", [{"text": "x", "label": 0}, {"text": "y", "label": 1}]))
    assert (task.name, list(task.splits)) == (tmp_path.name, ["test"])


def test_shards_in_order(tmp_path: Path, rows: Rows, write: Write) -> None:
    for place in (1, 0):
        write(tmp_path / f"train-0000{place}-of-00002.jsonl", [row | {"split": "train"} for row in rows(2 + place, 0)])
    assert list(read_task(tmp_path, validation=0)["train"].inputs) == ["train 0", "train 1"] * 2 + ["train 2"]
    (tmp_path / "train-00000-of-00002.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"the train split must be one file, or all shards of one"):
        read_task(tmp_path)


def test_two_files_for_one_split(tmp_path: Path, rows: Rows, write: Write) -> None:
    write(tmp_path / "train.csv", rows())
    write(tmp_path / "train.jsonl", rows())
    with pytest.raises(CheckpointError, match=r"must be one file, .* got 'train.csv', 'train.jsonl'"):
        read_task(tmp_path)


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_other_columns(kind: str, tmp_path: Path, write: Write) -> None:
    given = [{"review": "x", "stars": 1, "part": "train"}, {"review": "y", "stars": 2, "part": "train"}]
    path = write(tmp_path / f"a{kind}", given)
    task = read_task(path, text="review", label="stars", split="part", validation=0)
    assert task.labels == ("1", "2")
    assert list(task["train"].inputs) == ["x", "y"]
    with pytest.raises(RecipeError, match=r"has no column 'reviews'; did you mean 'review'\?; say which with `text`"):
        read_task(path, text="reviews", label="stars")
    with pytest.raises(RecipeError, match=r"has no column 'label'; known: part, review, stars; say which with `label`"):
        read_task(path, text="review")
    with pytest.raises(RecipeError, match=r"has no column 'parts'; .*`split`"):
        read_task(path, text="review", label="stars", split="parts")


def test_the_split_column_can_be_ignored(tmp_path: Path, rows: Rows, write: Write) -> None:
    assert list(read_task(write(tmp_path / "a.csv", rows()), split=None, validation=0).splits) == ["train"]


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(lambda text: text.strip() != "")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts, min_size=2, max_size=5))
def test_any_text_survives(tmp_path: Path, write: Write, found: list[str]) -> None:
    given_rows = [{"text": text, "label": n % 2} for n, text in enumerate(found)]
    for name in ("a.jsonl", "a.csv", "a.csv.gz"):
        assert list(read_task(write(tmp_path / name, given_rows), validation=0)["train"].inputs) == found


def test_a_tsv_has_no_quoting(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"so\t0\nit" is\t1\n')
    assert list(read_task(tmp_path / "a.tsv", validation=0)["train"].inputs) == ['"so', 'it" is']


def test_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext,label\r\n\r\nx,0\r\ny,1\r\n\r\n")
    assert list(read_task(tmp_path / "a.csv", validation=0)["train"].inputs) == ["x", "y"]
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "x", "label": 0}\n\n{"text": "y", "label": 1}\n'  # the last line may or may not end
        b'{"text": "z", "label": 1}'
    )
    assert list(read_task(tmp_path / "a.jsonl", validation=0)["train"].inputs) == ["x", "y", "z"]


def bad(path: Path, *lines_: object) -> Path:
    good = [{"text": "x", "label": 0, "split": "train"}, {"text": "y", "label": 1, "split": "train"}]
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in (*good, *lines_)))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "line 3 is not valid JSON"),
        ("[1]", r"line 3 must be a JSON object, got list"),
        ('{"text": "a", "text": "b", "label": 1}', "line 3 names 'text' twice"),
        ({"text": "x", "split": "train"}, "line 3 has no whole number or name as 'label' but None"),
        ({"text": "x", "label": True, "split": "train"}, "line 3 has no whole number or name as 'label' but True"),
        ({"text": "x", "label": 0.5, "split": "train"}, "line 3 has no whole number or name as 'label' but 0.5"),
        ({"text": 7, "label": 0, "split": "train"}, "line 3 has no text as 'text' but 7"),
        ({"text": list(range(99)), "label": 0, "split": "train"}, r"line 3 has no text as 'text' but \[0, 1.*\.\.\."),
        ({"text": " \t", "label": 0, "split": "train"}, "line 3 has an empty 'text'"),
        ({"text": "x", "label": 0, "split": "trian"}, "line 3 has split 'trian', which must be train, val or test"),
        ({"text": "x", "label": 0}, "line 3 has split None"),
    ],
)
def test_bad_rows(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"a.jsonl has 1 bad row: {message}"):
        read_task(bad(tmp_path / "a.jsonl", line))


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    told = r"has 5 bad rows: line 3 .*; line 4 .*; line 5 .*; and 2 more; correct them"
    with pytest.raises(CheckpointError, match=told):
        read_task(bad(tmp_path / "a.jsonl", *["{"] * 5))


def test_empty_texts_may_be_kept(tmp_path: Path) -> None:
    path = bad(tmp_path / "a.jsonl", {"text": "", "label": 0, "split": "train"})
    assert list(read_task(path, keep_empty=True, validation=0)["train"].inputs) == ["x", "y", ""]


def test_a_row_of_another_split_than_its_file(tmp_path: Path) -> None:
    bad(tmp_path / "train.jsonl", {"text": "z", "label": 0, "split": "test"})
    with pytest.raises(CheckpointError, match="line 3 says split 'test' in the file of train"):
        read_task(tmp_path)


def test_a_label_with_two_names(tmp_path: Path, rows: Rows, write: Write) -> None:
    given_rows = rows()
    given_rows[4]["label_name"] = "horse"
    given_rows[5]["label_name"] = ""
    with pytest.raises(
        CheckpointError,
        match=r"line 5 calls label 0 'horse', which was 'zebra' before; line 6 has no name as 'label_name' but ''",
    ):
        read_task(write(tmp_path / "a.jsonl", given_rows))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text,label\nx,0\ny\nz,1,2\n", "2 bad rows: line 3 has 1 columns instead of 2; line 4 has 3 columns"),
        ("text,label,text\nx,0,y\n", "has two columns called 'text'"),
        ('text,label\n"x,0\ny,1\n', r"line 3 is not valid: unexpected end of data"),
        ('text,label\n"x"y,0\n', r"line 2 is not valid: ',' expected after '\"'"),
        (f"text,label\n{'x' * 200_000},0\n", r"line 2 is not valid: field larger than field limit"),
        ("", "is empty: it has no rows"),
        ("text,label\n", "is empty: it has no rows"),
    ],
)
def test_bad_csv(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_task(tmp_path / "a.csv")


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\ncaf\xe9,0\n")
    with pytest.raises(CheckpointError, match=r"a.csv line 2 is not UTF-8"):
        read_task(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x", "label": 0}\n{"text": "caf\xe9", "label": 0}\n')
    with pytest.raises(CheckpointError, match=r"line 2 is not valid JSON"):
        read_task(tmp_path / "a.jsonl")


def test_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "x", "label": 0}]')
    with pytest.raises(CheckpointError, match=r"must hold one JSON object per line, got a list; .*jq"):
        read_task(tmp_path / "a.json")


def test_lines_and_files_are_bounded(tmp_path: Path, rows: Rows, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl.gz", rows())
    with monkeypatch.context() as patch:
        patch.setattr(module, "_LONGEST_LINE", 30)
        with pytest.raises(CheckpointError, match=r"line 1: a line may have 30 bytes"):
            read_task(path)
    monkeypatch.setattr(module, "_MOST_BYTES", 200)
    with pytest.raises(CheckpointError, match=r"line 3: .* and all of them 200"):
        read_task(path)


def test_damaged_gzip(tmp_path: Path, rows: Rows, write: Write) -> None:
    path = write(tmp_path / "a.jsonl.gz", rows())
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(CheckpointError, match=r"cannot read .*a.jsonl.gz: Compressed file ended"):
        read_task(path)
    path.write_bytes(b"plain")
    with pytest.raises(CheckpointError, match=r"cannot read .*: Not a gzipped file"):
        read_task(path)
    path.write_bytes(whole[:15] + bytes(8) + whole[23:])
    with pytest.raises(CheckpointError, match=r"cannot read"):
        read_task(path)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").touch()
    with pytest.raises(CheckpointError, match=r"is no table: its name must end in .jsonl, .json, .csv"):
        read_task({"train": tmp_path / "a.xlsx"})
    with pytest.raises(CheckpointError, match=r"b.csv does not exist or is not a plain file"):
        read_task({"train": tmp_path / "b.csv"})


def test_damaged_parquet(tmp_path: Path, write: Write, rows: Rows) -> None:
    path = write(tmp_path / "a.parquet", rows(2000))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(CheckpointError, match=r"a.parquet cannot be read as parquet"):
        read_task(path)
    path.write_bytes(whole[:4] + b"\xff" * 100 + whole[104:])
    with pytest.raises(CheckpointError, match=r"a.parquet cannot be read as parquet"):
        read_task(path)
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(whole))
    with pytest.raises(CheckpointError, match=r"is no table: .* and .gz if it is gzipped \(parquet must not be\)"):
        read_task(tmp_path / "b.parquet.gz")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(RecipeError, match="needs pyarrow: pip install pyarrow"):
        read_task(tmp_path / "a.parquet")


def test_names_that_datasets_left_in_parquet(tmp_path: Path) -> None:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def save(name: str, names: object) -> Path:
        table = arrow.Table.from_pylist([{"text": "x", "label": 1}, {"text": "y", "label": 0}])
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        files.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / name)
        return tmp_path / name

    assert read_task(save("a.parquet", ["zebra", "ape"])).labels == ("zebra", "ape")
    assert read_task(save("b.parquet", "nonsense")).labels == ("0", "1")
    with pytest.raises(CheckpointError, match=r"a.parquet: the train split has no examples of 'horse'"):
        read_task(save("a.parquet", ["zebra", "ape", "horse"]))
    files_by_split = {"train": save("a.parquet", ["zebra", "ape"]), "test": save("b.parquet", ["ape", "zebra"])}
    with pytest.raises(CheckpointError, match=r"b.parquet calls label 0 'ape', which was 'zebra' before"):
        read_task(files_by_split)
