"""`negate` and `analogy` from the command line, on models that are made in a moment."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.calling import call, refused

from orthomerge.api.load import load
from orthomerge.data.labels import match_labels
from orthomerge.data.reading import read_task
from orthomerge.evaluation.probe import fit_probe
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.features import Features
from orthomerge.models.load import quiet
from orthomerge.models.processors import load_processor

# The labels are those of the experts. `other` has those of `two` the wrong way round: any change is for the better.
LABELS = {"two": ("bad", "good"), "three": ("film", "it", "not"), "other": ("good", "bad")}
COUNTS = {"train": 40, "val": 24, "test": 19}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which word is in the text?"""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    for name, words in LABELS.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("text", "label", "split"))
            for split, count in COUNTS.items():
                for number in range(count):
                    label = number % len(words)
                    text = " ".join([words[label]] * 3 + list(random.choice(["a", "very", "was"], 2)))
                    writer.writerow((text, f"{'two' if name == 'other' else name}-{label}", split))
    return folder


@pytest.fixture(scope="module")
def fitted(berts: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts `two` and `three` with heads that read the base's features, as those of the paper's models do."""
    folder = tmp_path_factory.mktemp("fitted")
    processor = load_processor(berts / "base", modality="text")
    with quiet(), torch.no_grad():
        from transformers import BertForSequenceClassification, BertModel

        base = BertModel.from_pretrained(berts / "base").eval()
        for name in ("two", "three"):
            expert = BertForSequenceClassification.from_pretrained(berts / name)
            labels = tuple(expert.config.id2label.values())
            train = match_labels(read_task(tables / f"{name}.csv"), labels)["train"]
            values = base(**processor(train.inputs)).pooler_output
            head = fit_probe(Features(values, name, "train", torch.tensor(train.labels)), labels)
            expert.classifier.weight.copy_(head.output.weight)
            expert.classifier.bias.copy_(head.output.bias)
            expert.save_pretrained(folder / name)
    return folder


def negating(berts: Path, tables: Path, *experts: Path) -> list[object]:
    return [
        "negate", "--base", berts / "base", "--target", "two", "--device", "cpu", "--grid", "1,0.5",
        *(path for path in experts or (berts / "two",)),
        *(f"--data={name}={tables / name}.csv" for name in ("two", "three")),
    ]  # fmt: skip


def alike(berts: Path, tables: Path, fitted: Path) -> list[object]:
    return [
        "analogy", "--base", berts / "base", "--device", "cpu", "--grid", "0.5,1", "--of", "three:five::two",
        *(path for path in (fitted / "two", berts / "three", berts / "five")),
        f"--data=other={tables / 'other.csv'}",
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The encoder of an output, under the names of checkpoints."""
    return {key.removeprefix("bert."): tensor for key, tensor in load_file(folder / "encoder.safetensors").items()}


def test_negate(berts: Path, tables: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Next to nothing has to be kept, or it would hang on a single input which scale is taken.
    result = call(*negating(berts, tables), "--keep", 0.01, "--out", out, "--json")
    document = json.loads(result.stdout)
    assert document["out"] == str(out)
    assert document["heads"] == "probe"
    found = document["negated"]
    assert [point["scale"] for point in found["curve"]] == [0.0, 0.5, 1.0]
    assert found["target"] == "two"
    assert found["base"]["three"]["examples"] == COUNTS["test"]
    assert found["kept"] == pytest.approx(found["edited"]["three"]["value"] / found["base"]["three"]["value"])
    assert set(document["random"]) == set(found)
    best = min(found["curve"], key=lambda point: (point["target"], point["scale"]))
    assert found["scale"] == best["scale"] > 0
    # The output is the base minus so much of the task vector, and is like every other output.
    assert "as it was written" in call("inspect", out, "--verify").stdout
    base, expert = open_checkpoint(str(berts / "base")), open_checkpoint(str(berts / "two"))
    for key, tensor in weights(out).items():
        torch.testing.assert_close(tensor, base[key] - found["scale"] * (expert[f"bert.{key}"] - base[key]))
    call("export", out, "--task", "two", "--out", tmp_path / "two")
    assert (tmp_path / "two/config.json").exists()


def test_what_negate_prints(berts: Path, tables: Path, tmp_path: Path) -> None:
    result = call(*negating(berts, tables), "--keep", 0.01, "--out", tmp_path / "out")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["test", "accuracy", "scale", "two", "three", "control", "kept"]
    assert [line.split("  ")[0].strip() for line in lines[1:4]] == ["base", "minus two", "random vector"]
    assert "scored with probes on the base's features" in result.stdout
    assert lines[-1] == f"wrote {tmp_path / 'out'}, verified; heads: two"
    assert "minus two: scale 0.5: two " in result.stderr
    assert "random vector: scale 1: two " in result.stderr
    assert call(*negating(berts, tables), "--quiet").stderr == ""


def test_negate_by_the_experts_heads(berts: Path, fitted: Path, tables: Path, tmp_path: Path) -> None:
    more = ["--heads", "expert", "--keep", 0.01]
    message = refused(*negating(berts, tables), *more, code=2)
    assert "reads 'three' by its expert's head; give its expert too" in message
    message = refused(*negating(berts, tables, fitted / "two", berts / "three"), *more, code=2)
    assert "of the control 'three' right on validation data" in message  # that head is random
    assert "choose a control that the base can do" in message
    given = [*negating(berts, tables, fitted / "three", fitted / "two"), *more]
    document = json.loads(call(*given, "--out", tmp_path / "out", "--json").stdout)
    assert document["heads"] == "expert"
    # These heads are the probes that would be fitted else; the control's comes along into the output.
    probed = json.loads(call(*negating(berts, tables), "--keep", 0.01, "--json").stdout)
    assert document["negated"] == probed["negated"]
    assert load(tmp_path / "out").heads.keys() == {"three", "two"}
    assert "scored with the experts' heads" in call(*given).stdout


def test_a_control_that_nothing_spares(berts: Path, tables: Path, tmp_path: Path) -> None:
    given = [*negating(berts, tables), "--keep", 1.0, "--grid", "300"]
    assert "scale 0 is the base: nothing of the grid forgets and keeps" in call(*given).stdout
    message = refused(*given, "--out", tmp_path / "out", code=2)
    assert "no scale of the grid forgets 'two' and keeps 100% of the control" in message
    assert "was not written" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--target", "tow"], 2, "no data of 'tow'; give --data tow=PATH"),
        (["--control", "five"], 2, "no data of 'five'; give --data five=PATH"),
        (["--control", "two"], 2, "needs the head of 'two', which is to be forgotten, and of a control task"),
        (["--target", "three"], 2, "task vector of 'three' is wanted, but its expert was not given; known: two"),
        (["--heads", "prob"], 2, "--heads must be probe | expert, got 'prob'; did you mean 'probe'?"),
        (["--keep", "2"], 2, "share of the control to keep must be in (0, 1], got 2.0"),
        (["--grid", "0.1,x"], 2, "'0.1,x' is not a list of numbers"),
        (["--data", "two"], 2, "expected --data TASK=PATH, got 'two'"),
        (["--data", "five=/nowhere.csv", "--control", "five"], 3, "/nowhere.csv does not exist"),
        (["--base", "/no where"], 3, "does not exist"),
    ],
)
def test_mistakes_in_negate(berts: Path, tables: Path, more: list[str], code: int, message: str) -> None:
    assert message in refused(*negating(berts, tables), *more, code=code)


def test_an_output_that_exists_is_noticed_first(berts: Path, fitted: Path, tables: Path, tmp_path: Path) -> None:
    for given in (negating(berts, tables), alike(berts, tables, fitted)):
        result = call(*given, "--out", tmp_path, code=5)
        assert "exists already; give --force" in str(result.exception)
        assert result.stderr == ""  # nothing had begun


def test_analogy(berts: Path, fitted: Path, tables: Path, tmp_path: Path) -> None:
    given = [*alike(berts, tables, fitted), "--independent", f"other={fitted / 'two'}"]
    document = json.loads(call(*given, "--out", tmp_path / "out", "--json").stdout)
    assert document["task"] == "other"
    assert document["out"] == str(tmp_path / "out")
    assert len(document["curve"]) == 9
    # Fine-tuned on `two` is what was given as the task's own expert, too.
    assert document["expert"] == document["auxiliary"]
    best = document["best"]
    assert best["accuracy"] == max(point["accuracy"] for point in document["curve"])
    base = open_checkpoint(str(berts / "base"))
    a, b, c = (open_checkpoint(str(berts / name)) for name in ("three", "five", "two"))
    for key, tensor in weights(tmp_path / "out").items():
        name = f"bert.{key}"
        edit = best["scale"] * (c[name] - base[key]) + best["shift"] * (b[name] - a[name])
        torch.testing.assert_close(tensor, base[key] + edit)
    assert load(tmp_path / "out").heads.keys() == {"two", "three", "five", "other"}


def test_an_analogy_that_is_no_better_than_the_base(berts: Path, fitted: Path, tables: Path, tmp_path: Path) -> None:
    given = [*alike(berts, tables, fitted)[:-1], f"--data=other={tables / 'two.csv'}"]
    assert "that is the base: nothing of the grid is better" in call(*given).stdout
    message = refused(*given, "--out", tmp_path / "out", code=2)
    assert "nothing of the grid is better for 'other' than the base itself" in message
    assert not (tmp_path / "out").exists()


def test_what_analogy_prints(berts: Path, fitted: Path, tables: Path) -> None:
    result = call(*alike(berts, tables, fitted))
    titles = [line.split("  ")[0].strip() for line in result.stdout.splitlines()[:4]]
    assert titles == ["test accuracy", "base", "fine-tuned on two", "analogy, unscaled"]
    assert "fine-tuned on other" not in result.stdout
    assert "scored with the head of two; coefficients chosen on validation data of other" in result.stdout
    assert "three:five::two: scale 0.5, shift 0.5: " in result.stderr


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--of", "three:five"], 2, "an analogy is written a:b::c"),
        (["--of", "three:four::two"], 2, "task vector of 'four' is wanted, but its expert was not given"),
        (["--data", "other"], 2, "expected --data TASK=PATH, got 'other'"),
        (["--data", "two=x.csv"], 2, "an analogy makes one task, got --data of 2"),
        (["--of", "two:five::three"], 4, "labels of task 'other' are not those of its expert"),
        (["--grid", "-1"], 2, "a grid must hold positive numbers, got -1"),
    ],
)
def test_mistakes_in_analogy(berts: Path, fitted: Path, tables: Path, more: list[str], code: int, message: str) -> None:
    assert message in refused(*alike(berts, tables, fitted), *more, code=code)
