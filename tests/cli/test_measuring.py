"""`suite`, `finetune` and `evaluate` from the command line, on models that are made in a moment."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.calling import call, refused

from orthomerge.cli.app import app
from orthomerge.evaluation.records import read_records
from orthomerge.suites import digits
from orthomerge.suites.digits import digit_tasks
from orthomerge.suites.table import SUITES
from orthomerge.tuning.settings import Tuning

WORDS = {"mood": ("bad", "good"), "kind": ("film", "it", "not")}
COUNTS = {"train": 30, "val": 12, "test": 19}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MOOD.csv and KIND.csv: which word is in the text?"""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    for name, words in WORDS.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label", "split"))
            for split, count in COUNTS.items():
                for number in range(count):
                    label = number % len(words)
                    texts = [words[label], *random.choice(["a", "very", "was"], random.integers(1, 5))]
                    writer.writerow((" ".join(random.permutation(texts)), f"{words[label]}-label", split))
    return folder


@pytest.fixture(scope="module")
def made(berts: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts made by `finetune`, and `merged`."""
    folder = tmp_path_factory.mktemp("made")
    for name, words in WORDS.items():
        result = call(
            "finetune", "--base", berts / "base", "--data", tables / f"{name}.csv", "--out", folder / name,
            "--set", "steps=2", "--set", "device=cpu", "--set", "lr=1e-3", "--json", "--quiet",
        )  # fmt: skip
        document = json.loads(result.stdout)
        assert document["out"] == str(folder / name)
        assert all(isinstance(value, int | float) for value in document["metrics"].values())
        labels = json.loads((folder / name / "config.json").read_text())["id2label"]
        assert list(labels.values()) == [f"{word}-label" for word in sorted(words)]
    call(
        "merge", "--base", berts / "base", *(folder / name for name in WORDS),
        "--method", "task_arithmetic", "--set", "scale=0.5", "--out", folder / "merged", "--quiet",
    )  # fmt: skip
    return folder


def arguments(made: Path, tables: Path, out: Path) -> list[object]:
    given: list[object] = ["evaluate", made / "merged", "--out", out, "--device", "cpu", "--batch", 8]
    for name in WORDS:
        given += ["--data", f"{name}={tables / name}.csv", "--expert", f"{name}={made / name}"]
    return [*given, "--protocol", "current", "--protocol", "aligned-c", "--shots", 2, "--seeds", 2]


def test_suite_list() -> None:
    text = call("list", "suites").stdout
    assert all(name in text for name in SUITES)
    assert [row["suite"] for row in json.loads(call("list", "suites", "--json").stdout)] == list(SUITES)


def test_suite_build_and_evaluate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dataclasses import replace

    tasks = digit_tasks()
    small = {name: tasks[name] for name in ("parity", "size")}
    monkeypatch.setattr(digits, "digit_tasks", lambda: dict(small))
    for name, value in list(vars(digits).items()):
        if isinstance(value, Tuning):
            monkeypatch.setattr(digits, name, replace(value, steps=3))
    folder = tmp_path / "suite"
    built = call("reproduce", "build", "digits", "--out", folder, "--json")
    document = json.loads(built.stdout)
    assert document["suite"] == "digits"
    assert document["tasks"]["size"] == {
        "classes": 3,
        "train": 1168,
        "val": 180,
        "test": 449,
        "expert": str(folder / "experts" / "size"),
    }
    assert "449" in call("reproduce", "build", "digits", "--out", folder).stdout
    run = tmp_path / "run"
    given = ["evaluate", "--suite", "digits", "--folder", folder, "--out", run, "--device", "cpu"]
    given += ["--protocol", "current", "--method", "ties", "--method", "ties: density: 0.5"]
    text = call(*given, "--method", "average").stdout
    assert "No inputs used" in text
    names = {record.method: record.parameters for record in read_records(run / "records.jsonl")}
    assert list(names) == ["base", "expert", "mtl", "ties (ties)", "ties (ties-density=0.5)", "average"]
    assert names["ties (ties-density=0.5)"] == {"density": 0.5}
    assert "cannot read the value" in refused(*given, "--method", "ties:density: [", code=2)
    assert "did you mean 'ties'" in refused(*given, "--method", "tiess", code=2)


def test_evaluate_end_to_end(made: Path, tables: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    document: dict[str, Any] = json.loads(call(*arguments(made, tables, run), "--json").stdout)
    records = read_records(run / "records.jsonl")
    assert [found["value"] for found in document["records"]] == [record.value for record in records]
    assert document["comparisons"] == json.loads((run / "comparisons.json").read_text())
    assert document["notes"] == json.loads((run / "notes.json").read_text())
    # Two tasks: expert and merged, current and two seeds of aligned-c; and the merged model's joint rows.
    assert len(records) == 2 * 2 * (1 + 2) + 2
    assert {record.method for record in records} == {"expert", "task_arithmetic"}
    assert all(record.examples == COUNTS["test"] for record in records)
    aligned = [record for record in records if record.protocol == "aligned-c"]
    assert {(record.access, record.shots) for record in aligned} == {("inductive", 2)}
    assert {record.seed for record in aligned} == {0, 1}
    merged = next(record for record in records if record.method == "task_arithmetic")
    assert merged.parameters == {"scale": 0.5}
    assert "### Inductive" in (run / "table.md").read_text()
    # Once more, as a table: everything is in the cache, the run folder is written again.
    text = call(*arguments(made, tables, run)).stdout
    assert "No inputs used" in text
    assert "aligned-c, 2/class" in text
    assert "worst" in text
    assert "Against" in text
    assert "Comparable: the difference is less than 1 either way" in " ".join(text.split())
    assert read_records(run / "records.jsonl") == records


def test_evaluate_through_an_aligner(made: Path, tables: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = call(*arguments(made, tables, run), "--aligner", "ridge", "--access", "transductive").stdout
    assert "aligner ridge, 2/class" in text
    aligned = [record for record in read_records(run / "records.jsonl") if record.aligner is not None]
    assert {(record.aligner, record.protocol, record.access) for record in aligned} == {
        ("ridge", "current", "transductive")
    }
    assert len(aligned) == 2 * 2 * 2  # subjects, tasks, seeds
    assert {record.extra_parameters for record in aligned} == {0}


def test_a_reference_and_a_margin(made: Path, tables: Path, tmp_path: Path) -> None:
    given = [*arguments(made, tables, tmp_path / "run"), "--against", "task_arithmetic", "--margin", 30]
    document = json.loads(call(*given, "--json").stdout)
    comparisons = document["comparisons"]
    assert {(item["method"], item["reference"]) for item in comparisons} == {("expert", "task_arithmetic")}
    assert {item["equivalence"]["margin"] for item in comparisons} == {0.3}


def test_an_evaluation_that_fails_leaves_nothing(made: Path, tables: Path, tmp_path: Path) -> None:
    """And one that succeeds leaves records, no encoder."""
    given = ["evaluate", made / "merged", "--data", f"mood={tables / 'mood.csv'}", "--expert", f"mood={made / 'mood'}"]
    given += ["--out", tmp_path / "deep" / "run", "--device", "cpu"]
    assert "no model 'nobody'" in refused(*given, "--against", "nobody", code=2)
    assert not (tmp_path / "deep").exists()
    call(*given)
    names = {path.name for path in (tmp_path / "deep" / "run").iterdir()}
    assert names == {
        "orthomerge-run.json",
        "records.jsonl",
        "predictions",
        "comparisons.json",
        "notes.json",
        "table.md",
    }
    refused(*given, "--against", "nobody", code=2)
    assert {path.name for path in (tmp_path / "deep" / "run").iterdir()} == names


def test_experts_are_where_they_were(made: Path, tables: Path, tmp_path: Path) -> None:
    """Nobody names them again; whoever does must name the same ones."""
    given = ["evaluate", made / "merged", "--data", f"mood={tables / 'mood.csv'}", "--protocol", "aligned-c"]
    given += ["--out", tmp_path / "run", "--device", "cpu"]
    call(*given)
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert {record.method for record in records} == {"expert", "task_arithmetic"}
    call(*given, "--expert", f"mood={made / 'mood'}", "--no-references")
    alone = read_records(tmp_path / "run" / "records.jsonl")
    assert alone == [record for record in records if record.method != "expert"]
    message = refused(*given, "--expert", f"mood={made / 'kind'}", code=4)
    assert "is not the one that the model was made from: its hash differs" in message


def test_an_expert_that_knows_the_test_inputs(made: Path, tables: Path, tmp_path: Path) -> None:
    """Whatever the expert says is made the truth on test, and never on val."""
    from orthomerge.api.load import load
    from orthomerge.models.experts import reopen_experts

    with (tables / "mood.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    model = load(made / "merged")
    expert = reopen_experts(model, folder=made / "merged").teacher("mood")
    labels = model.labels["mood"]
    said = [labels.index(each["mood"].label) for each in expert.predict([row["text"] for row in rows], device="cpu")]
    for row, place in zip(rows, said, strict=True):
        if row["split"] != "train":
            row["label"] = labels[place if row["split"] == "test" else 1 - place]
    with (tmp_path / "mood.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("text", "label", "split"))
        writer.writeheader()
        writer.writerows(rows)
    given = ["evaluate", made / "merged", "--data", f"mood={tmp_path / 'mood.csv'}", "--protocol", "current"]
    given += ["--expert", f"mood={made / 'mood'}", "--out", tmp_path / "run", "--device", "cpu"]
    warning = "scores 100.0 on test but 0.0 on validation data"
    notes = json.loads(call(*given, "--json").stdout)["notes"]
    (note,) = (note for note in notes if warning in note)  # another one: the few words make the same text twice
    assert json.loads((tmp_path / "run" / "notes.json").read_text()) == notes
    assert f"warning: {note}" in call(*given).stdout


def test_mistakes_are_found_before_a_suite_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(**given: Any) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(digits, "build", build)
    given = ["evaluate", "--suite", "digits", "--folder", tmp_path / "suite", "--out", tmp_path / "run"]
    assert "did you mean 'ties'" in refused(*given, "--method", "tiess", code=2)
    assert "unknown option 'denssity'" in refused(*given, "--method", "ties: denssity: 0.5", code=2)
    assert "did you mean 'aligned-c'" in refused(*given, "--protocol", "alinged-c", code=2)
    assert "--shots must be" in refused(*given, "--shots", "many", code=2)
    message = refused(*given, "--method", "average", "--against", "avrage", code=2)
    assert message == "--against avrage: there is no such method here; did you mean 'average'?"
    two = ["--method", "ties", "--method", "ties: density: 0.5"]
    assert "did you mean 'ties (ties)'" in refused(*given, *two, "--against", "ties(ties)", code=2)
    with pytest.raises(AssertionError, match="it was built"):
        CliRunner().invoke(
            app, list(map(str, [*given, *two, "--against", "ties (ties-density=0.5)"])), catch_exceptions=False
        )


def test_two_outputs_of_one_method(made: Path, tables: Path, tmp_path: Path) -> None:
    call(
        "merge", "--base", made / "mood", *(made / name for name in WORDS),
        "--method", "task_arithmetic", "--out", tmp_path / "other", "--quiet",
    )  # fmt: skip
    given = arguments(made, tables, tmp_path / "run")
    call(*given[:2], tmp_path / "other", *given[2:])
    names = {record.method for record in read_records(tmp_path / "run" / "records.jsonl")}
    assert names == {"expert", "task_arithmetic (merged)", "task_arithmetic (other)"}


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--protocol", "alinged-c"], 2, "unknown protocol 'alinged-c'; did you mean 'aligned-c'?"),
        (["--aligner", "rige"], 2, "unknown aligner 'rige'; did you mean 'ridge'?"),
        (["--shots", "many"], 2, "--shots must be a whole number per class, a share below 1, or all, got 'many'"),
        (["--shots", "0"], 2, "--shots must be"),
        (["--shots", "1.5"], 2, "--shots must be"),
        (["--shots", "99"], 2, "fewer than 99 shots"),
        (["--seeds", "0"], 2, "'seeds' must be at least 1, got 0"),
        (
            ["--access", "inductiv"],
            2,
            "--access must be inductive | transductive, got 'inductiv'; did you mean 'inductive'?",
        ),
        (["--data", "mood"], 2, "expected --data TASK=PATH, got 'mood'"),
        (["--data", "mood=/nowhere.csv"], 2, "two --data TASK=PATH have the same name"),
        (["--expert", "moon=/nowhere"], 2, "no task 'moon'; did you mean 'mood'?"),
        (["--device", "warp"], 2, "unknown device 'warp'"),
        (["--margin", "0"], 2, "--margin must be a positive number of points, got 0"),
        (["--against", "task_arithmetics"], 2, "there is no model 'task_arithmetics' to compare with; did you mean"),
        (["--protocol", "current"], 2, "two protocols score 'expert' in the same way: current (data-free)"),
    ],
)
def test_mistakes_in_evaluate(
    made: Path, tables: Path, tmp_path: Path, more: list[str], code: int, message: str
) -> None:
    assert message in refused(*arguments(made, tables, tmp_path / "run"), *more, code=code)


def test_evaluate_without_what_it_needs(made: Path, tables: Path, tmp_path: Path) -> None:
    wanted = "give a suite, or folders of merged models and --data TASK=PATH"
    assert wanted in refused("evaluate", made / "merged", code=2)
    data = f"mood={tables / 'mood.csv'}"
    assert wanted in refused("evaluate", "--data", data, code=2)
    assert "did you mean 'digits'" in refused("evaluate", "--suite", "digist", code=2)
    given = ["--protocol", "aligned-c", "--shots", "2", "--out", tmp_path / "run", "--device", "cpu"]
    shutil.copytree(made / "merged", tmp_path / "moved")
    (tmp_path / "moved" / "orthomerge.local.json").unlink()
    message = refused("evaluate", tmp_path / "moved", "--data", data, *given, code=3)
    assert "the expert of 'mood' was not found; say where it is: --expert mood=PATH" in message
    assert "is not an orthomerge output" in refused("evaluate", made / "mood", "--data", data, *given, code=3)
    other = f"moon={tables / 'mood.csv'}"
    assert "did you mean 'mood'" in refused("evaluate", made / "merged", "--data", other, *given, code=2)
    kind = f"mood={tables / 'kind.csv'}"
    assert "are not those of its expert" in refused("evaluate", made / "merged", "--data", kind, *given, code=4)


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--set", "steps"], 2, "expected --set KEY=VALUE, got 'steps'"),
        (["--set", "stepps=2"], 2, "unknown option 'stepps'; did you mean 'steps'?"),
        (["--set", "steps=two"], 2, "'steps' must be whole number or nothing, got 'two'"),
        (["--set", "steps=["], 2, "cannot read the value '['"),
        (["--set", "mode=ful"], 2, "did you mean 'full'?"),
        (["--data", "/nowhere.csv"], 3, "/nowhere.csv does not exist"),
        (["--base", "/no where"], 3, "does not exist"),
    ],
)
def test_mistakes_in_finetune(
    berts: Path, tables: Path, tmp_path: Path, more: list[str], code: int, message: str
) -> None:
    given = ["finetune", "--base", berts / "base", "--data", tables / "mood.csv", "--out", tmp_path / "out"]
    assert message in refused(*given, "--set", "steps=1", "--set", "device=cpu", *more, code=code)
    assert not (tmp_path / "out").exists()


def test_finetune_says_what_it_wrote_and_replaces_nothing(berts: Path, tables: Path, tmp_path: Path) -> None:
    given = ["finetune", "--base", berts / "base", "--data", tables / "mood.csv", "--out", tmp_path / "out"]
    given += ["--set", "steps=1", "--set", "device=cpu"]
    result = call(*given)
    assert result.stdout.startswith(f"wrote {tmp_path / 'out'}: ")
    assert result.stderr
    assert "exists" in refused(*given, code=5)
    call(*given, "--force")


@pytest.mark.parametrize("command", [("list", "suites"), ("reproduce", "build")])
def test_unknown_suites(command: tuple[str, str], tmp_path: Path) -> None:
    message = refused(*command, "vison8", code=2)
    assert message == "unknown suite 'vison8'; did you mean 'vision8'?"


def test_a_suite_without_its_data(tmp_path: Path) -> None:
    assert "give it with --data" in refused("reproduce", "build", "text8", "--out", tmp_path / "s", code=3)


def test_merge_chooses_its_scale(berts: Path, made: Path, tables: Path, tmp_path: Path) -> None:
    given: list[object] = ["merge", "--base", berts / "base", "--method", "task_arithmetic", "--set", "scale=auto"]
    for name in WORDS:
        given += [made / name]
    planned = json.loads(call(*given, "--dry-run", "--json").stdout)
    assert planned["ok"]
    assert "give --data mood=PATH" in refused(*given, "--out", tmp_path / "out", code=2)
    data = [f"--data={name}={tables / name}.csv" for name in WORDS]
    result = call(*given, *data, "--out", tmp_path / "out")
    assert "accuracy on validation data, by scale" in result.stderr
    scale = json.loads((tmp_path / "out/orthomerge.json").read_text())["method"]["parameters"]["scale"]
    assert f"{scale:5.2f}" in next(line for line in result.stderr.splitlines() if line.endswith(" <"))
    assert "looks at no inputs" in refused(*given, "--set", "scale=0.3", *data, "--out", tmp_path / "x", code=2)
