"""`evaluate`, `align`, `finetune` and suites from the command line, on models that are made in a moment."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.berts import COUNTS as TABLE_COUNTS
from tests.berts import contents
from tests.calling import call, refused
from tests.cli.conftest import WORDS

from orthomerge.evaluation.records import Record, read_records
from orthomerge.suites import digits
from orthomerge.suites.digits import digit_tasks
from orthomerge.tuning.settings import Tuning

TASKS = ("two", "three")


def scoring(tuned: Path, word_tables: Path, run: Path) -> list[object]:
    words: list[object] = ["evaluate", tuned / "merged", "--data", word_tables, "--out", run, "--device", "cpu"]
    return [*words, "--batch", 8, "--protocol", "current", "--protocol", "aligned-c", "--shots", 2, "--seeds", 2]


def records_of(run: Path) -> list[Record]:
    return read_records(run / "records.jsonl")


def test_evaluate(tuned: Path, word_tables: Path, tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    words = scoring(tuned, word_tables, run)
    assert "no model 'nobody'" in refused(*words, "--against", "nobody", code=2)
    assert not run.parent.exists()
    document: dict[str, Any] = json.loads(call(*words, "--json").stdout)
    records = records_of(run)
    assert [record["value"] for record in document["records"]] == [record.value for record in records]
    assert document["comparisons"] == json.loads((run / "comparisons.json").read_text())
    assert document["notes"] == json.loads((run / "notes.json").read_text())
    # Two tasks: expert and merged, current and two seeds of aligned-c; and the merged model's joint rows.
    assert len(records) == 2 * 2 * (1 + 2) + 2
    assert {record.method for record in records} == {"expert", "task_arithmetic"}
    aligned = {(record.shots, record.seed) for record in records if record.protocol == "aligned-c"}
    assert aligned == {(2, 0), (2, 1)}
    # No encoder is written; and once more, as a table: everything is in the cache, the folder is written again.
    files = {"orthomerge-run.json", "records.jsonl", "predictions", "comparisons.json", "notes.json", "table.md"}
    text = " ".join(call(*words).stdout.split())
    assert {path.name for path in run.iterdir()} == files
    assert records_of(run) == records
    for part in ("No inputs used", "aligned-c, 2/class", "Comparable: the difference is less than 1 either way"):
        assert part in text
    assert document["notes"]
    assert all(f"warning: {' '.join(note.split())}" in text for note in document["notes"])


def test_protocols_references_and_margins(tuned: Path, word_tables: Path, tmp_path: Path) -> None:
    words = [*scoring(tuned, word_tables, tmp_path / "run"), "--against", "task_arithmetic", "--margin", 30]
    document = json.loads(call(*words, "--aligner", "ridge", "--access", "transductive", "--json").stdout)
    assert {(item["method"], item["reference"]) for item in document["comparisons"]} == {("expert", "task_arithmetic")}
    assert {item["equivalence"]["margin"] for item in document["comparisons"]} == {0.3}
    aligned = [record for record in records_of(tmp_path / "run") if record.aligner is not None]
    assert {(record.aligner, record.protocol, record.access) for record in aligned} == {
        ("ridge", "current", "transductive")
    }
    assert len(aligned) == 2 * 2 * 2  # subjects, tasks, seeds
    assert {record.extra_parameters for record in aligned} == {0}


def test_experts_are_where_they_were(tuned: Path, word_tables: Path, tmp_path: Path) -> None:
    words = ["evaluate", tuned / "merged", "--data", f"mood={word_tables / 'mood.csv'}", "--protocol", "aligned-c"]
    words += ["--out", tmp_path / "run", "--device", "cpu"]
    call(*words)
    records = records_of(tmp_path / "run")
    call(*words, "--expert", f"mood={tuned / 'mood'}", "--no-references")
    assert records_of(tmp_path / "run") == [record for record in records if record.method == "task_arithmetic"]


def test_columns_of_other_names(berts: Path, tuned: Path, word_tables: Path, tmp_path: Path) -> None:
    """Every command that reads tables reads theirs."""
    for name in WORDS:
        text = (word_tables / f"{name}.csv").read_text().replace("text,label,", "Sentence,Class,", 1)
        (tmp_path / f"{name}.csv").write_text(text)
    columns = ["--text-column", "Sentence", "--label-column", "Class"]
    words = scoring(tuned, tmp_path, tmp_path / "run")
    assert "no column 'text'; known: Class, Sentence, split; name it with `text` (--text-column)" in refused(
        *words, code=2
    )
    call(*words, *columns)
    call(*scoring(tuned, word_tables, tmp_path / "usual"))
    assert records_of(tmp_path / "run") == records_of(tmp_path / "usual")
    experts = [tuned / name for name in WORDS]
    method = ["--method", "fisher", "--set", "inputs=4", "--device", "cpu", "--quiet"]
    more = ["--base", berts / "base", *method, "--data", tmp_path, *columns]
    call("merge", *experts, *more, "--out", tmp_path / "fitted")
    call("align", tuned / "merged", "--data", tmp_path, *columns, "--device", "cpu", "-q", "-o", tmp_path / "aligned")


def test_two_outputs_of_one_method(tuned: Path, word_tables: Path, tmp_path: Path) -> None:
    experts = [tuned / name for name in WORDS]
    method = ("--method", "task_arithmetic")
    call("merge", *experts, "--base", tuned / "mood", *method, "--out", tmp_path / "other", "--quiet")
    words = scoring(tuned, word_tables, tmp_path / "run")
    call(*words[:2], tmp_path / "other", *words[2:])
    names = {record.method for record in records_of(tmp_path / "run")}
    assert names == {"expert", "task_arithmetic (merged)", "task_arithmetic (other)"}


# Aligned heads


def aligning(tables: Path, merged: Path, out: Path) -> list[object]:
    data = [f"--data={task}={tables / task}.csv" for task in TASKS]
    return ["align", merged, *data, "--device", "cpu", "--quiet", "--out", out]


def test_align(tables: Path, merged_berts: Path, tmp_path: Path) -> None:
    words = aligning(tables, merged_berts, tmp_path / "to")
    lines = call(*words, "--aligner", "ridge", "--limit", 30).stdout.splitlines()
    assert [line.split(";")[0] for line in lines[:2]] == [f"{task}: ridge on 30 inputs of train" for task in TASKS]
    assert all("strength" in line and line.endswith("nothing added") for line in lines[:2])
    assert lines[2] == "note: no data of 'five' was given to align it with; its head is as it was merged"
    assert lines[3] == f"wrote {tmp_path / 'to'}, verified"
    call("export", tmp_path / "to", "--task", "two", "--out", tmp_path / "two")


def test_an_aligner_that_adds_parameters(tables: Path, merged_berts: Path, tmp_path: Path) -> None:
    words = aligning(tables, merged_berts, tmp_path / "surgery")
    more = ["--aligner", "surgery", "--set", "rank=2", "--set", "steps=5", "--seed", 7, "--split", "test"]
    about = json.loads(call(*words, *more, "--json").stdout)["manifest"]["alignment"]
    assert (about["options"]["rank"], about["options"]["steps"], about["options"]["seed"]) == (2, 5, 7)
    assert (about["access"], about["tasks"]["two"]["inputs"]) == ("transductive", TABLE_COUNTS["test"])
    added = about["tasks"]["two"]["extra"]["parameters"]
    assert added == 2 * 2 * 32
    assert "parameters added" in call(*words, *more, "--force").stdout
    assert "cannot store" in refused("export", tmp_path / "surgery", "--task", "two", "-o", tmp_path / "two", code=2)


def test_merge_of_a_recipe_that_aligns(berts: Path, tables: Path, tmp_path: Path) -> None:
    (tmp_path / "two.csv").symlink_to(tables / "two.csv")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"base: {berts / 'base'}\nexperts: {{two: {berts / 'two'}, three: {berts / 'three'}}}\nmethod: average\n"
        "align: {aligner: ridge, data: {two: two.csv}}\nout: merged\n"
    )
    assert "align: inputs of the train split of two" in call("merge", path, "--dry-run").stdout
    assert json.loads(call("merge", path, "--dry-run", "--json").stdout)["align"]["tasks"] == ["two"]
    assert "two: ridge on 60 inputs of train; strength" in call("merge", path, "--quiet").stdout
    data = f"two={tables / 'two.csv'}"
    assert "does not use the section 'align'" in refused("negate", path, "--target", "two", "--data", data, code=2)


def test_a_scale_that_is_chosen(berts: Path, tables: Path, tmp_path: Path) -> None:
    """On validation data, before heads are aligned."""
    expert, path = Path(shutil.copytree(berts / "two", tmp_path / "two")), tmp_path / "recipe.yaml"
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(berts / "base" / name, expert)
    path.write_text(
        f"base: {berts / 'base'}\nexperts: {{two: {expert}}}\nparameters: {{scale: auto}}\n"
        f"align: {{aligner: ridge, data: {{two: {tables / 'two.csv'}}}}}\nout: merged\n"
    )
    assert "give --data two=PATH" in refused("merge", path, code=2)
    assert "no problems" in call("merge", path, "--dry-run").stdout
    data = f"--data=two={tables / 'two.csv'}"
    result = call("merge", path, data)
    assert "accuracy on validation data, by scale" in result.stderr
    manifest = json.loads(contents(tmp_path / "merged")["orthomerge.json"])
    scale = manifest["method"]["parameters"]["scale"]
    assert f"the best is {scale:g}\n" in result.stderr
    assert manifest["alignment"]["aligner"] == "ridge"
    assert "uses no inputs" in refused("merge", path, data, "--method", "average", "--force", code=2)


# Experts and suites


def test_finetune_says_what_it_wrote_and_replaces_nothing(berts: Path, word_tables: Path, tmp_path: Path) -> None:
    words = ["finetune", "--base", berts / "base", "--data", word_tables / "mood.csv", "--out", tmp_path / "out"]
    words += ["--set", "steps=1", "--set", "device=cpu"]
    result = call(*words)
    assert result.stdout.startswith(f"wrote {tmp_path / 'out'}: ")
    assert result.stderr
    assert "exists" in refused(*words, code=5)
    call(*words, "--force")


def test_suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {name: task for name, task in digit_tasks().items() if name in ("parity", "size")}
    monkeypatch.setattr(digits, "digit_tasks", lambda: dict(small))
    for name, value in list(vars(digits).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(digits, name, replace(value, steps=3))
    folder, run = tmp_path / "suite", tmp_path / "run"
    document = json.loads(call("reproduce", "build", "digits", "--out", folder, "--json").stdout)
    counts = {"classes": 3, "train": 1168, "val": 180, "test": 449, "expert": str(folder / "experts" / "size")}
    assert (document["suite"], document["tasks"]["size"]) == ("digits", counts)
    assert "449" in call("reproduce", "build", "digits", "--out", folder).stdout
    words = ["evaluate", "--suite", "digits", "--folder", folder, "--out", run, "--device", "cpu"]
    words += ["--protocol", "current", "--method", "ties", "--method", "ties:density: 0.5"]
    assert "No inputs used" in call(*words, "--method", "average").stdout
    names = {record.method: record.parameters for record in records_of(run)}
    assert list(names) == ["base", "expert", "mtl", "ties (ties)", "ties (ties-density=0.5)", "average"]
    assert names["ties (ties-density=0.5)"] == {"density": 0.5}
