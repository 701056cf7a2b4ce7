"""Tables of every kind come back as they were written, and bad rows are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.making import make_rows, refused, write

from orthomerge.core.errors import RecipeError
from orthomerge.data import rows as module
from orthomerge.data.reading import read_task

PACKED = [f"reviews{kind}{packed}" for kind in (".jsonl", ".json", ".csv", ".tsv") for packed in ("", ".gz")]


@pytest.mark.parametrize("name", [*PACKED, "reviews.parquet"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    task = read_task(write(tmp_path / name, make_rows()), validation=0)
    assert (task.name, task.modality, task.labels) == ("reviews", "text", ("zebra", "ape"))
    assert list(task.splits) == ["train", "test"]
    assert list(task["train"].inputs) == [f"train {n}" for n in range(20)]
    labels = task["test"].labels
    assert labels is not None
    assert labels.tolist() == [0, 1, 0, 1]


def test_a_folder_with_a_file_per_split(tmp_path: Path) -> None:
    for name, split in (("train.csv", "train"), ("dev.csv", "valid"), ("test.csv", "test")):
        write(tmp_path / name, [row | {"split": split} for row in make_rows(4, 2)])
    (tmp_path / "README.md").write_text("not a table")
    task = read_task(tmp_path)
    assert task.name == tmp_path.name
    assert {split: len(examples) for split, examples in task.splits.items()} == {"train": 6, "val": 6, "test": 6}
    assert all(examples.split == split for split, examples in task.splits.items())
    write(tmp_path / "train.jsonl", make_rows())
    refused(tmp_path, r"must be one file, .* got 'train.csv', 'train.jsonl'")


def test_splits_of_rows_that_name_none(tmp_path: Path) -> None:
    task = read_task(write(tmp_path / "test.csv", [{"text": "x", "label": 0}, {"text": "y", "label": 1}]))
    assert (task.name, list(task.splits)) == (tmp_path.name, ["test"])


def test_shards_in_order(tmp_path: Path) -> None:
    for place in (1, 0):
        write(tmp_path / f"train-0000{place}-of-00002.jsonl", make_rows(2 + place, 0))
    assert list(read_task(tmp_path, validation=0)["train"].inputs) == ["train 0", "train 1"] * 2 + ["train 2"]
    (tmp_path / "train-00000-of-00002.jsonl").unlink()
    refused(tmp_path, r"the train split must be one file, or all shards of one")


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_other_columns(kind: str, tmp_path: Path) -> None:
    given = [{"review": "x", "stars": 1}, {"review": "y", "stars": 2}]
    path = write(tmp_path / f"a{kind}", given)
    task = read_task(path, text="review", label="stars", validation=0)
    assert task.labels == ("1", "2")
    assert list(task["train"].inputs) == ["x", "y"]
    wrong = r"has no column 'reviews'; did you mean 'review'\?; name it with `text`"
    refused(path, wrong, RecipeError, text="reviews", label="stars")
    wrong = r"has no column 'label'; known: review, stars; name it with `label`"
    refused(path, wrong, RecipeError, text="review")


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(lambda text: text.strip() != "")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts, min_size=2, max_size=5))
def test_any_text_survives(tmp_path: Path, inputs: list[str]) -> None:
    given_rows = [{"text": text, "label": n % 2} for n, text in enumerate(inputs)]
    for name in ("a.jsonl", "a.csv"):
        assert list(read_task(write(tmp_path / name, given_rows), validation=0)["train"].inputs) == inputs


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.tsv", b'text\tlabel\n"so\t0\nit" is\t1\n', ['"so', 'it" is']),  # no quoting
        ("a.csv", b"\xef\xbb\xbftext,label\r\n\r\nx,0\r\ny,1\r\n\r\n", ["x", "y"]),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "x", "label": 0}\n\n{"text": "y", "label": 1}', ["x", "y"]),
    ],
)
def test_quotes_byte_order_marks_and_blank_lines(name: str, data: bytes, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert list(read_task(tmp_path / name, validation=0)["train"].inputs) == expected


GOOD = {"text": "x", "label": 0, "split": "train"}
LABEL = "line 3 must have a whole number or a name as 'label', got"


def after_two_rows(path: Path, *lines: object) -> Path:
    rows = (GOOD, GOOD | {"text": "y", "label": 1}, *lines)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows))
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "line 3 is not valid JSON"),
        ("[1]", r"line 3 must be a JSON object, got list"),
        ('{"text": "a", "text": "b", "label": 1}', "line 3 has the key 'text' twice"),
        ({"text": "x", "split": "train"}, f"{LABEL} None"),
        (GOOD | {"label": True}, f"{LABEL} True"),
        (GOOD | {"label": 0.5}, f"{LABEL} 0.5"),
        (GOOD | {"text": list(range(99))}, r"line 3 must have a text as 'text', got \[0, 1.{35};"),
        (GOOD | {"text": " \t"}, "line 3 has an empty 'text'"),
        (GOOD | {"split": "trian"}, "line 3 must have split train, val or test, got 'trian'"),
        ({"text": "x", "label": 0}, "line 3 must have split train, val or test, got None"),
    ],
)
def test_bad_rows(line: object, message: str, tmp_path: Path) -> None:
    refused(after_two_rows(tmp_path / "a.jsonl", line), rf"a.jsonl has 1 bad row: {message}")


def test_bad_rows_are_counted(tmp_path: Path) -> None:
    message = r"has 5 bad rows: line 3 .*; line 4 .*; line 5 .*; and 2 more; correct or remove them"
    refused(after_two_rows(tmp_path / "a.jsonl", *["{"] * 5), message)


def test_empty_texts_may_be_kept_and_rows_of_other_splits_may_not(tmp_path: Path) -> None:
    path = after_two_rows(tmp_path / "a.jsonl", GOOD | {"text": ""})
    assert list(read_task(path, keep_empty=True, validation=0)["train"].inputs) == ["x", "y", ""]
    after_two_rows(tmp_path / "train.jsonl", GOOD | {"split": "test"})
    refused(tmp_path, "line 3 must have split train, as the others in this file, got 'test'")


def test_a_label_with_two_names(tmp_path: Path) -> None:
    given_rows = make_rows()
    given_rows[4]["label_name"] = "horse"
    given_rows[5]["label_name"] = ""
    first = "line 5 must have the name 'zebra' for label 0, as before, got 'horse'"
    second = "line 6 must have a name as 'label_name', got ''"
    refused(write(tmp_path / "a.jsonl", given_rows), f"{first}; {second}")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", "text,label\nx,0\ny\nz,1,2\n", "2 bad rows: line 3 has 1 columns instead of 2; line 4 has 3 columns"),
        ("a.csv", "text,label,text\nx,0,y\n", "has two columns called 'text'"),
        ("a.csv", 'text,label\n"x,0\ny,1\n', r"line 3 is not valid: unexpected end of data"),
        ("a.csv", 'text,label\n"x"y,0\n', r"line 2 is not valid: ',' expected after '\"'"),
        ("a.csv", f"text,label\n{'x' * 200_000},0\n", r"line 2 is not valid: field larger than field limit"),
        ("a.csv", "text,label\n", "is empty: it has no rows"),
        ("a.csv", b"text,label\ncaf\xe9,0\n", r"a.csv line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "x", "label": 0}\n{"text": "caf\xe9", "label": 0}\n', r"line 2 is not valid JSON"),
        ("a.json", '[{"text": "x", "label": 0}]', r"must hold one JSON object per line, got a list; .*jq"),
        ("a.csv.gz", b"plain", r"cannot read .*: Not a gzipped file"),
        ("a.parquet", b"plain", r"a.parquet cannot be read as parquet"),
        ("a.parquet.gz", b"plain", r"must not be gzipped: parquet is compressed already"),
    ],
)
def test_bad_files(name: str, data: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    refused(tmp_path / name, message)


def test_lines_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl.gz", make_rows())
    with monkeypatch.context() as patch:
        patch.setattr(module, "_MAX_LINE", 30)
        refused(path, r"line 1: a line must have at most 30 bytes")
    monkeypatch.setattr(module, "_MAX_BYTES", 200)
    refused(path, r"line 3: .* and all lines 200")


def test_damaged_files(tmp_path: Path) -> None:
    packed, parquet = write(tmp_path / "a.jsonl.gz", make_rows()), write(tmp_path / "a.parquet", make_rows(2000))
    whole, content = packed.read_bytes(), parquet.read_bytes()
    for path, data, message in (
        (packed, whole[:-20], r"cannot read .*a.jsonl.gz: Compressed file ended"),
        (packed, whole[:15] + bytes(8) + whole[23:], r"cannot read"),
        (parquet, content[:-9], r"a.parquet cannot be read as parquet"),
        (parquet, content[:4] + b"\xff" * 100 + content[104:], r"a.parquet cannot be read as parquet"),
    ):
        path.write_bytes(data)
        refused(path, message)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    (tmp_path / "a.parquet").touch()
    refused(tmp_path / "a.parquet", "needs pyarrow: pip install pyarrow", RecipeError)


def test_names_that_datasets_left_in_parquet(tmp_path: Path) -> None:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def save(name: str, names: object) -> Path:
        table = arrow.Table.from_pylist([{"text": "x", "label": 1}, {"text": "y", "label": 0}])
        features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        files.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), tmp_path / name)
        return tmp_path / name

    assert read_task(save("a.parquet", ["zebra", "ape"])).labels == ("zebra", "ape")
    assert read_task(save("b.parquet", "nonsense")).labels == ("0", "1")
    refused(save("a.parquet", ["zebra", "ape", "horse"]), r"a.parquet: the train split has no examples of 'horse'")
    (tmp_path / "data").mkdir()
    save("data/train.parquet", ["zebra", "ape"])
    save("data/test.parquet", ["ape", "zebra"])
    refused(tmp_path / "data", r"must have the name 'ape' for label 0, as before, got 'zebra'")
