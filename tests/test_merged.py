"""Output folders that were damaged, or written by somebody who means harm: a message, and nothing read or replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import orthomerge
from orthomerge.checkpoints.files import RawFile
from orthomerge.errors import CheckpointError, OutputError
from orthomerge.manifest import is_plain_name
from orthomerge.merged import EXPORT, load_head, read_manifest
from orthomerge.models.load import quiet
from orthomerge.output import companions
from orthomerge.recipe import Recipe
from orthomerge.version import VERSION

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="session")
def merged(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "out"
    experts: Any = {name: str(berts / name) for name in ("two", "three")}
    orthomerge.merge(Recipe(experts=experts, base=str(berts / "base"), method="average"), out=out)
    return out


@pytest.fixture
def out(merged: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "out"))


def rewrite(path: Path, change: Change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def put(*keys: str, value: Any) -> Change:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def drop(*keys: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


# Exports


def test_an_export_says_what_it_is_and_is_replaced(out: Path, tmp_path: Path) -> None:
    orthomerge.export(out, "two", tmp_path / "to")
    assert json.loads((tmp_path / "to" / EXPORT).read_text()) == {
        "task": "two",
        "manifest": RawFile(out / "orthomerge.json").digest(),
        "orthomerge": VERSION,
    }
    orthomerge.export(out, "three", tmp_path / "to", force=True)
    assert json.loads((tmp_path / "to" / EXPORT).read_text())["task"] == "three"
    with quiet():
        from transformers import AutoModelForSequenceClassification

        _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "to", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_model_of_the_users_own_is_never_replaced(out: Path, berts: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(berts / "five", tmp_path / "own"))
    before = {path.name: path.read_bytes() for path in own.iterdir()}
    with pytest.raises(OutputError, match=r"own was not written by orthomerge \(it has no orthomerge-export.json\)"):
        orthomerge.export(out, "two", own, force=True)
    assert {path.name: path.read_bytes() for path in own.iterdir()} == before


# Manifests

DAMAGE: dict[str, tuple[Change, str]] = {
    "no files": (drop("files"), r"orthomerge\.json has no 'files'; the file is damaged"),
    "files is a list": (put("files", value=[]), r"'files' must be an object, got list; .* fetch the folder again"),
    "no heads": (drop("heads"), r"orthomerge\.json has no 'heads'"),
    "heads is a list": (put("heads", value=["two"]), r"'heads' must be an object, got list"),
    "no family": (drop("family"), r"has no 'family'"),
    "family is a number": (put("family", value=3), r"'family' must be a string, got int"),
    "no pooling": (drop("pooling"), r"has no 'pooling'"),
    "pooling is null": (put("pooling", value=None), r"'pooling' must be a string, got NoneType"),
    "encoder is a string": (put("encoder", value="x"), r"'encoder' must be an object, got str"),
    "no prefix": (drop("encoder", "prefix"), r"has no 'encoder\.prefix'"),
    "prefix is a list": (put("encoder", "prefix", value=[]), r"'encoder\.prefix' must be a string, got list"),
    "no method": (drop("method"), r"has no 'method'"),
    "method without name": (drop("method", "name"), r"has no 'method\.name'"),
    "parameters is null": (put("method", "parameters", value=None), r"'method\.parameters' must be an object"),
    "head is null": (put("heads", "two", value=None), r"the head of 'two' must have 'labels', a list of strings"),
    "labels are numbers": (put("heads", "two", "labels", value=[1, 2]), r"the head of 'two' must have 'labels'"),
    "task leaves": (put("heads", "../two", value={"labels": []}), r"'\.\./two' cannot name a task's folder"),
    "task is a path": (put("heads", "a/b", value={"labels": []}), r"'a/b' cannot name a task's folder"),
    "file is a string": (put("files", "README.md", value="x"), r"the file 'README\.md' must have a 'size' in bytes"),
    "size is a string": (put("files", "README.md", "size", value="1"), r"the file 'README\.md' must have a 'size'"),
    "hash is null": (put("files", "README.md", "hash", value=None), r"and a 'hash' of the form ALGORITHM:HEX"),
    "hash without algorithm": (put("files", "README.md", "hash", value="00"), r"a 'hash' of the form ALGORITHM:HEX"),
    "no inputs": (drop("inputs"), r"has no 'inputs'"),
    "no base": (drop("inputs", "base"), r"has no 'inputs\.base'"),
    "no expert": (drop("inputs", "experts", "two"), r"has no 'inputs\.experts\.two'"),
    "expert without name": (drop("inputs", "experts", "two", "name"), r"has no 'inputs\.experts\.two\.name'"),
    "files of the base": (put("inputs", "base", "files", value={}), r"'inputs\.base\.files' must be a list, got dict"),
    "seed is a string": (put("seed", value="0"), r"'seed' must be a whole number, got str"),
    "notes is null": (put("notes", value=None), r"'notes' must be a list, got NoneType"),
    "alignment is a list": (put("alignment", value=[]), r"'alignment' must be an object, got list"),
    "alignment without aligner": (put("alignment", value={}), r"has no 'alignment\.aligner'"),
    "alignment without tasks": (put("alignment", value={"aligner": "x"}), r"has no 'alignment\.tasks'"),
    "alignment without access": (
        put("alignment", value={"aligner": "x", "tasks": {}}),
        r"'alignment\.access' must be one of data-free, inductive, transductive, got None",
    ),
    "another format": (put("format", value=[2]), r"has format \[2\], this version reads 1; update orthomerge"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_manifest_is_an_error_everywhere(change: Change, message: str, out: Path, tmp_path: Path) -> None:
    rewrite(out / "orthomerge.json", change)
    for call in (
        lambda: read_manifest(out),
        lambda: orthomerge.verify(out),
        lambda: orthomerge.load(out),
        lambda: orthomerge.export(out, "two", tmp_path / "to"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (
            "family",
            "brt",
            r"orthomerge\.json has the model family 'brt', .* \(did you mean 'bert'\?\); update orthomerge",
        ),
        ("pooling", "clss", r"has the pooling 'clss', which family 'bert' does not have \(did you mean 'cls'\?\)"),
    ],
)
def test_an_unknown_family_or_pooling(part: str, value: str, message: str, out: Path, tmp_path: Path) -> None:
    rewrite(out / "orthomerge.json", put(part, value=value))
    for call in (lambda: orthomerge.load(out), lambda: orthomerge.export(out, "two", tmp_path / "to")):
        with pytest.raises(CheckpointError, match=message):
            call()


def test_a_manifest_behind_a_link_is_not_read(out: Path, tmp_path: Path) -> None:
    (out / "orthomerge.json").rename(tmp_path / "secret.json")
    (out / "orthomerge.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"orthomerge\.json is a link that leaves its folder; copy the file"):
        read_manifest(out)


# Names and links that leave

OUTSIDE = ["../../x", "encoder/../../x", "/etc/hostname", "./README.md", "encoder//x", "a\\..\\b", "a\0b", "\ud800", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_the_folder(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_plain_name(name)
    rewrite(out / "orthomerge.json", put("files", name, value={"size": 1, "hash": "sha256:00"}))
    for call in (read_manifest, orthomerge.load):
        with pytest.raises(CheckpointError, match=r"names files outside its own folder: .* do not trust this folder"):
            call(out)
    opened = watch(monkeypatch)
    (problem,) = orthomerge.verify(out)
    assert problem.endswith("is outside the folder, and was not read; do not trust this manifest")
    assert all(path.resolve().is_relative_to(out.resolve()) for path in opened)


def test_verify_does_not_follow_links_that_leave(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("README.md", "heads"):
        (out / name).rename(tmp_path / name)
        (out / name).symlink_to(tmp_path / name)
    (out / "more").symlink_to("/etc/hostname")
    (out / "loop").symlink_to("loop")
    opened = watch(monkeypatch)
    problems = orthomerge.verify(out)
    assert "README.md is behind a link that leaves the folder, and was not read" in problems
    assert "heads/two/labels.json is behind a link that leaves the folder, and was not read" in problems
    assert "heads is a link that leaves the folder, and was not written by the merge" in problems
    assert "more is a link that leaves the folder, and was not written by the merge" in problems
    assert "loop was not written by the merge" in problems
    assert len(problems) == 8
    assert opened
    assert all(path.resolve().is_relative_to(out.resolve()) for path in opened)


def test_verify_follows_links_that_stay(out: Path) -> None:
    (out / "README.md").rename(out / "card.md")
    (out / "README.md").symlink_to("card.md")
    assert orthomerge.verify(out) == ["card.md was not written by the merge"]


def test_verify_reports_a_name_that_no_file_can_have(out: Path) -> None:
    rewrite(out / "orthomerge.json", put("files", "x" * 300, value={"size": 1, "hash": "sha256:00"}))
    (problem,) = orthomerge.verify(out)
    assert "cannot be read: File name too long" in problem


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is opened to be hashed."""
    opened: list[Path] = []

    class Watched(RawFile):
        def __init__(self, path: Path, *, algorithm: str | None = None) -> None:
            opened.append(path)
            super().__init__(path, algorithm=algorithm)

    monkeypatch.setattr("orthomerge.merged.RawFile", Watched)
    return opened


# Heads

LABELS: dict[str, tuple[Change, str]] = {
    "no labels": (drop("labels"), r"labels\.json: 'labels' must be a list of strings, got None; .* damaged"),
    "labels is a string": (put("labels", value="ab"), r"'labels' must be a list of strings, got 'ab'"),
    "labels are numbers": (put("labels", value=[0, 1]), r"'labels' must be a list of strings, got \[0, 1\]"),
    "no activation": (drop("activation"), r"'activation' must be null or one of tanh, relu, gelu"),
    "an odd activation": (put("activation", value="system"), r"'activation' must be null .*, got 'system'"),
    "activation is a list": (put("activation", value=["tanh"]), r"'activation' must be null .*, got \['tanh'\]"),
    "no normalise": (drop("normalise"), r"'normalise' must be true or false, got None"),
    "normalise is a number": (put("normalise", value=1), r"'normalise' must be true or false, got 1"),
    "a label too many": (put("labels", value=["a", "b", "c"]), r"head\.safetensors has 2 rows, .* 3 labels"),
    "activation alone": (put("activation", value="tanh"), r"has no hidden layer, but the activation .* is tanh"),
}


@pytest.mark.parametrize(("change", "message"), LABELS.values(), ids=LABELS)
def test_damaged_labels(change: Change, message: str, out: Path, tmp_path: Path) -> None:
    rewrite(out / "heads/two/labels.json", change)
    for call in (
        lambda: load_head(out / "heads/two"),
        lambda: orthomerge.load(out),
        lambda: orthomerge.export(out, "two", tmp_path / "to"),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()


def sized(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("_", "."): torch.zeros(shape) for name, shape in shapes.items()}


HEADS: dict[str, tuple[dict[str, torch.Tensor], str | None, str]] = {
    "no weight": (sized(bias=(2,)), None, r"head\.safetensors has no 'weight', .* fetch the folder again"),
    "hidden alone": (sized(weight=(2, 4), hidden_weight=(4, 4)), None, r"has a hidden layer, .* is null; they go"),
    "hidden bias alone": (sized(weight=(2, 4), hidden_bias=(4,)), None, r"holds 'hidden\.bias', which is no part"),
    "a stranger": (sized(weight=(2, 4), scale=(1,)), None, r"holds 'scale', which is no part of this head"),
    "a flat weight": (sized(weight=(8,)), None, r"'weight' is \(8,\) torch\.float32, not that of a linear layer"),
    "a scalar": (sized(weight=()), None, r"'weight' is \(\) torch\.float32, not that of a linear layer"),
    "integers": ({"weight": torch.zeros(2, 4, dtype=torch.int64)}, None, r"'weight' is \(2, 4\) torch\.int64"),
    "a short bias": (sized(weight=(2, 4), bias=(1,)), None, r"do not fit together \(.*bias \(1,\)"),
    "hidden misfits": (sized(weight=(2, 4), hidden_weight=(3, 4)), "tanh", r"layers that do not fit together"),
    "hidden bias misfits": (
        sized(weight=(2, 4), hidden_weight=(4, 4), hidden_bias=(3,)),
        "tanh",
        r"layers that do not fit together",
    ),
}


@pytest.mark.parametrize(("tensors", "activation", "message"), HEADS.values(), ids=HEADS)
def test_a_damaged_head(tensors: dict[str, torch.Tensor], activation: str | None, message: str, out: Path) -> None:
    rewrite(out / "heads/two/labels.json", put("activation", value=activation))
    save_file(tensors, out / "heads/two/head.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_head(out / "heads/two")


def test_a_head_of_two_layers_is_read(out: Path) -> None:
    rewrite(out / "heads/two/labels.json", put("activation", value="tanh"))
    tensors = sized(weight=(2, 3), hidden_weight=(3, 4), hidden_bias=(3,), bias=(2,))
    save_file(tensors, out / "heads/two/head.safetensors")
    assert load_head(out / "heads/two").width == 4


# The encoder


def test_an_encoder_without_weights_is_not_exported(out: Path, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1, dtype=torch.int64)}, out / "encoder/model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder holds no weights in floating point; fetch it again"):
        orthomerge.export(out, "two", tmp_path / "to")


def test_a_config_behind_a_link_is_not_exported(out: Path, tmp_path: Path) -> None:
    (out / "encoder/config.json").rename(tmp_path / "secret.json")
    (out / "encoder/config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"config\.json is a link that leaves its folder"):
        orthomerge.export(out, "two", tmp_path / "to")


def test_a_module_of_other_shapes_is_not_filled(out: Path) -> None:
    save_file({"weight": torch.zeros(2, 4)}, out / "encoder/model.safetensors")
    with pytest.raises(CheckpointError, match=r"which has 'weight \(2, 4\) instead of \(2, 3\)'; build it as"):
        orthomerge.load(out, encoder=torch.nn.Linear(3, 2, bias=False))


# Companions


def test_a_companion_behind_a_link_is_not_copied(berts: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    base = Path(shutil.copytree(berts / "base", tmp_path / "base"))
    for folder in (base, out / "encoder"):
        (folder / "vocab.txt").unlink()
        (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    message = r"vocab\.txt is a link that leaves its folder; copy the file there instead"
    with pytest.raises(CheckpointError, match=message):
        companions(base)
    with pytest.raises(CheckpointError, match=message):
        orthomerge.export(out, "two", tmp_path / "to")
    given = Recipe(experts={"two": str(berts / "two")}, base=str(base), method="average")
    with pytest.raises(CheckpointError, match=message):
        orthomerge.merge(given, out=tmp_path / "again")
    assert not (tmp_path / "to").exists()
    assert not (tmp_path / "again").exists()


def test_companions_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0", tmp_path / "models--a--b/blobs"
    (snapshot / "encoder").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("x")
    (snapshot / "vocab.txt").symlink_to("../../blobs/1")
    (snapshot / "encoder/vocab.txt").symlink_to("../../../blobs/1")
    assert companions(None, snapshot) == [snapshot / "vocab.txt"]
    assert companions(snapshot / "encoder", within=snapshot) == [snapshot / "encoder/vocab.txt"]


def test_a_companion_that_is_a_link_inside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("x")
    (tmp_path / "vocab.txt").symlink_to("words")
    assert companions(tmp_path) == [tmp_path / "vocab.txt"]


def test_a_companion_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").symlink_to("words")
    with pytest.raises(CheckpointError, match=r"vocab\.txt is a link to nothing; fetch the file again"):
        companions(tmp_path)


def test_a_companion_of_unbelievable_size(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is 67108865 bytes long; more than 67108864 is not"):
        companions(tmp_path)
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(64 << 20)
    assert companions(tmp_path) == [tmp_path / "tokenizer.json"]
