"""One folder and back: what is written, read and verified, and what is refused of folders that others have touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from tests.berts import contents
from tests.models.conftest import NAMES
from tests.models.making import flip_a_bit, reloaded, same_tensors, stock

import orthomerge as om
from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.files.documents import is_plain_name, read_json
from orthomerge.files.folders import LOCAL, MANIFEST
from orthomerge.files.raw_file import RawFile
from orthomerge.models.heads import head_of
from orthomerge.models.manifest import read_manifest
from orthomerge.models.processors import companions
from orthomerge.models.saved import verify_folder
from orthomerge.models.skeleton import quiet

# What is written


def test_the_layout(merged: Path, berts: Path) -> None:
    """Nothing of this machine is in what is published."""
    small = {"head.safetensors", "config.json", "model.safetensors.index.json"}
    linked = {"encoder.safetensors", "vocab.txt", "tokenizer_config.json"}
    assert {path.name for path in merged.iterdir()} == {"README.md", MANIFEST, LOCAL, *linked, *NAMES}
    for task in NAMES:
        assert {path.name for path in (merged / task).iterdir()} == small | linked
        assert all((merged / task / name).readlink() == Path("..") / name for name in linked)
    files = contents(merged)
    assert set(read_manifest(merged)["files"]) == set(files) - {MANIFEST, LOCAL}
    assert [name for name, data in files.items() if str(berts).encode() in data] == [LOCAL]


def test_a_digest_is_of_content(model: om.Model, merged: Path, tmp_path: Path) -> None:
    """The same in memory, when saved in one file or in shards, and when loaded from either."""
    experts: Any = model.origin.experts
    sharded = om.merge(experts, "task_arithmetic", scale=0.5)
    sharded.save(tmp_path / "sharded", max_shard_size="20KB")
    assert len(read_manifest(tmp_path / "sharded")["encoder"]["files"]) > 3
    digests = {model.digest, sharded.digest, om.load(merged).digest, om.load(tmp_path / "sharded").digest}
    assert len(digests) == 1
    content = {read_manifest(folder)["encoder"]["content"] for folder in (merged, tmp_path / "sharded")}
    assert content == {RawFile(merged / "encoder.safetensors").digest()}
    assert stock(tmp_path / "sharded/two").num_labels == 2
    assert verify_folder(tmp_path / "sharded") == []
    assert om.merge(experts, "task_arithmetic", scale=0.5, dtype="bfloat16").digest not in digests


def test_a_loaded_model_is_saved_as_the_same_bytes(merged: Path, tmp_path: Path) -> None:
    om.load(merged).save(tmp_path / "again")
    first, other = contents(merged), contents(tmp_path / "again")
    assert {name for name in first | other if first.get(name) != other.get(name)} <= {LOCAL}  # it has relative paths


def test_a_pipeline_gives_the_probabilities_of_predict(merged: Path) -> None:
    texts = ["a very good film", "it was not good"]
    with quiet():
        from transformers import pipeline

        answers = pipeline("text-classification", model=str(merged / "three"), top_k=None)(texts)
    for row, prediction in zip(answers, om.load(merged).predict(texts), strict=True):
        assert {each["label"]: each["score"] for each in row} == pytest.approx(prediction["three"].scores, abs=1e-5)


def test_a_task_folder_is_an_expert(merged: Path, berts: Path, tmp_path: Path) -> None:
    again = om.merge({"two": merged / "two"}, "average", base=berts / "base")
    assert same_tensors(again, om.load(merged))
    assert again.labels == {"two": ("two-0", "two-1")}
    assert reloaded(again, tmp_path / "again").digest == om.load(merged).digest


def test_heads_that_read_the_encoder_differently(model: om.Model, tmp_path: Path) -> None:
    """Pooling and maximum length are those of each head, in memory and from the folder; a stock class has one way."""
    heads: Any = dict(model.heads)
    heads["three"] = replace(heads["three"], pooling="mean", max_length=5)
    mixed = model.with_heads(heads)
    loaded = reloaded(mixed, tmp_path / "out")
    text = "it was a very good film and not a bad film"
    theirs, plain = loaded.predict(text), model.predict(text)
    assert mixed.predict(text) == theirs
    assert theirs["two"] == plain["two"]
    assert theirs["three"].scores != plain["three"].scores
    batch = loaded.processor.processor(5)([text])
    assert batch["input_ids"].shape == (1, 5)
    with torch.no_grad():
        features = loaded.encoder.module()(**batch).last_hidden_state.mean(1)
        by_hand = (features @ heads["three"].output.weight.T + heads["three"].output.bias).softmax(1)[0]
    assert list(theirs["three"].scores.values()) == pytest.approx(by_hand.tolist(), abs=1e-6)
    assert (tmp_path / "out/two/config.json").is_file()
    assert not (tmp_path / "out/three/config.json").exists()
    assert json.loads((tmp_path / "out/three/labels.json").read_text()) == ["three-0", "three-1", "three-2"]
    with pytest.raises(RecipeError, match="uses the pooling 'pooler', this head 'mean'"):
        om.export(loaded, tmp_path / "stock", task="three")


def test_live_models_and_their_tokenizer(live: Any, model: om.Model, tmp_path: Path) -> None:
    base, experts = live
    merged = om.merge(experts, "task_arithmetic", base=base, scale=0.5)
    assert same_tensors(merged, model)
    assert merged.digest == model.digest
    assert merged.predict("a good film") == model.predict("a good film")
    merged.save(tmp_path / "out")
    assert verify_folder(tmp_path / "out") == []
    assert not (tmp_path / "out" / LOCAL).exists()
    assert om.load(tmp_path / "out").predict("a good film") == model.predict("a good film")
    with torch.no_grad():
        experts["two"].bert.embeddings.word_embeddings.weight.add_(1)
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        merged.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("task", ["vocab.txt", "encoder.safetensors", "Encoder-00001-of-00002.safetensors"])
def test_a_task_with_the_name_of_a_file(task: str, berts: Path, tmp_path: Path) -> None:
    model = om.merge({task: berts / "two"}, "average", base=berts / "base")
    with pytest.raises(RecipeError, match="cannot name a task, because the output has a file of that name"):
        model.save(tmp_path / "out")


@pytest.mark.parametrize("command", ["cp -r out copy", "cp -rL out copy", "mkdir copy; tar c out | tar x -C copy"])
def test_a_copy_verifies_and_loads(command: str, out: Path, merged: Path) -> None:
    subprocess.run(command, shell=True, cwd=out.parent, check=True)
    shutil.rmtree(out)
    copy = next(path.parent for path in (out.parent / "copy").rglob("orthomerge.json"))
    assert verify_folder(copy) == []
    assert same_tensors(om.load(copy), om.load(merged))
    assert stock(copy / "two").num_labels == 2


def test_verify_says_what_changed(out: Path) -> None:
    flip_a_bit(out / "encoder.safetensors")
    (out / "two/config.json").unlink()
    (out / "extra.bin").write_bytes(b"x")
    changed = {f"{folder}encoder.safetensors has changed since it was written" for folder in ("", "two/", "three/")}
    problems = verify_folder(out)
    assert set(problems) == {*changed, "two/config.json is missing", "extra.bin was not written by the merge"}
    (out / LOCAL).unlink()
    assert verify_folder(out) == problems


def test_what_is_loaded_is_what_was_verified(out: Path) -> None:
    """Small files are compared when they are read, the encoder whenever it is read to the end."""
    model = om.load(out)
    flip_a_bit(out / "encoder.safetensors")
    with pytest.raises(CheckpointError, match=r"the encoder in .*out has changed since it was written"):
        om.load(out).predict("a film")
    (out / "vocab.txt").write_text((out / "vocab.txt").read_text().replace("good", "evil"))
    for read in (model.processor.processor, lambda: om.load(out)):
        with pytest.raises(CheckpointError, match=r"vocab\.txt has changed since it was written"):
            read()


def test_a_folder_of_the_first_version(out: Path) -> None:
    (out / MANIFEST).write_text(json.dumps({"format": 1, "orthomerge": "0.1.0"}))
    for call in (om.load, verify_folder):
        with pytest.raises(CheckpointError, match=r"was written by orthomerge 0\.1\.0, .*; merge again"):
            call(out)


# Manifests

GONE: Any = object()


def change(out: Path, *changes: tuple[str | tuple[str, ...], Any]) -> None:
    """Give values of the manifest another value, or none; their keys are separated by spaces."""
    document = json.loads((out / MANIFEST).read_text())
    for keys, value in changes:
        *above, last = keys.split() if isinstance(keys, str) else keys
        place = document
        for key in above:
            place = place[key]
        place[last] = value
        if value is GONE:
            del place[last]
    (out / MANIFEST).write_text(json.dumps(document))


DAMAGE: list[tuple[str, Any, str]] = [
    ("files", GONE, r"orthomerge\.json has no 'files'; the file is damaged"),
    ("files", [], r"'files' must be an object, got list; .* fetch the folder again"),
    ("files", {}, r"needs 'encoder\.safetensors', .* not listed among its 'files'"),
    ("files two/head.safetensors", GONE, r"needs 'two/head\.safetensors', not listed"),
    ("files vocab.txt", GONE, r"needs 'vocab\.txt', not listed among"),
    ("files README.md", "x", r"'files\.README\.md' must be an object, got 'x'"),
    ("files README.md size", "1", r"README\.md\.size' must be a whole number"),
    ("files README.md hash", None, r"README\.md\.hash' must be a string, got NoneT"),
    ("encoder", "x", r"'encoder' must be an object, got 'x'"),
    ("encoder files", [], r"names no file of the encoder; the file is damaged"),
    ("encoder prefix", GONE, r"has no 'encoder\.prefix'"),
    ("heads", GONE, r"orthomerge\.json has no 'heads'"),
    ("heads", ["two"], r"'heads' must be an object, got list"),
    ("heads two", None, r"'heads\.two' must be an object, got NoneType"),
    ("heads two extra", "surgery", r"needs 'two/extra\.safetensors', not listed"),
    ("heads two pooling", None, r"pooling' must be a string, got NoneType"),
    ("heads two activation", GONE, r"has no 'heads\.two\.activation'"),
    ("heads two activation", "system", r"must be null or tanh or relu or gelu, got 'system'"),
    ("heads two activation", ["tanh"], r"must be null or tanh or .*, got list"),
    ("heads two labels", [1, 2], r"labels\.1' must be a string, got 1"),
    ("heads two normalise", 1, r"normalise' must be true or false, got 1"),
    ("heads two max_length", True, r"max_length' must be null or a whole number, got True"),
    ("inputs base", GONE, r"has no 'inputs\.base'"),
    ("inputs experts two name", GONE, r"has no 'inputs\.experts\.two\.name'"),
    ("inputs base files", [3], r"base\.files\.1' must be an object, got 3"),
    ("seed", "0", r"'seed' must be a whole number, got '0'"),
    ("notes", None, r"'notes' must be a list, got NoneType"),
    ("alignment", {"tasks": {}, "access": "odd"}, r"'alignment\.access' must be data-free or .*, got 'odd'"),
    ("alignment", {"tasks": {}, "access": "inductive"}, r"has no 'alignment\.aligner'"),
    ("format", [2], r"must have format 2, got \[2\]; update orthomerge"),
]


UNKNOWN: list[tuple[str, Any, str]] = [
    ("heads two kind", "singel-label", r"know the kind of head of 'two', 'singel-label'; did you mean 'single-label'"),
    ("family", "brt", r"know the model family, 'brt'; did you mean 'bert'\?; update orthomerge"),
    ("heads two pooling", "clss", r"the pooling of 'two' \(family bert\), 'clss'; did you mean 'cls'"),
    ("heads two labels", ["a", "b", "c"], r"must hold 1 linear layer with 3 rows at the end, .* got weight \(2, 32\)"),
    ("heads two activation", "tanh", r"must hold 2 linear layers .*\(activation tanh\)"),
    ("heads two names weight", "nothing", "must hold the tensors 'classifier.bias', 'nothing', got"),
    ("encoder content", "sha256:00", r"the encoder in .* has changed since it was written"),
]


@pytest.mark.parametrize(("keys", "value", "message"), [*DAMAGE, *UNKNOWN])
def test_a_damaged_manifest_is_an_error_everywhere(keys: str, value: Any, message: str, out: Path) -> None:
    change(out, (keys, value))
    to = out.parent / "to"
    reading = (lambda out: om.load(out).predict("a film"), lambda out: om.export(out, to, task="two"))
    for call in reading if (keys, value, message) in UNKNOWN else (*reading, verify_folder):
        with pytest.raises(CheckpointError, match=message):
            call(out)
    assert not to.exists()


# Names and links that leave

OUTSIDE = ["../../x", "two/../../x", "/etc/hostname", "./README.md", "two//x", "a\\..\\b", "a\0b", "\ud800", ""]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_outside_the_folder(name: str, out: Path) -> None:
    assert not is_plain_name(name)
    change(out, (("files", name), {"size": 1, "hash": "sha256:00"}))
    for call in (om.load, verify_folder):
        with pytest.raises(CheckpointError, match=r"names files outside its own folder: .* do not trust this folder"):
            call(out)
    change(out, (("heads", f"{name}/b"), read_json(out / MANIFEST)["heads"]["two"]))
    with pytest.raises(CheckpointError, match="cannot name a task's folder; do not trust this folder"):
        om.load(out)


def test_verify_does_not_follow_links_that_leave(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("README.md", "two"):
        (out / name).rename(tmp_path / name)
        (out / name).symlink_to(tmp_path / name)
    (out / "more").symlink_to("/etc/hostname")
    (out / "loop").symlink_to("loop")
    reader = Mock(wraps=RawFile)
    monkeypatch.setattr("orthomerge.models.saved.RawFile", reader)
    problems = verify_folder(out)
    for name in ("README.md", "two/config.json"):
        assert f"{name} is behind a link that leaves the folder, so it was not read" in problems
    for name in ("two", "more", "loop"):
        assert f"{name} was not written by the merge" in problems
    reader.assert_called()
    assert all(call.args[0].resolve().is_relative_to(out.resolve()) for call in reader.call_args_list)


def test_verify_follows_links_that_stay_and_reports_a_name_that_no_file_can_have(out: Path) -> None:
    (out / "README.md").rename(out / "card.md")
    (out / "README.md").symlink_to("card.md")
    change(out, (("files", "x" * 300), {"size": 1, "hash": "sha256:00"}))
    problem, other = verify_folder(out)
    assert "cannot be read: File name too long" in problem
    assert other == "card.md was not written by the merge"


READ = [MANIFEST, LOCAL, "encoder.safetensors", "two/head.safetensors", "vocab.txt", "tokenizer_config.json"]


@pytest.mark.parametrize("name", READ)
def test_a_file_behind_a_link_that_leaves_is_not_read(name: str, out: Path, tmp_path: Path) -> None:
    (out / name).rename(tmp_path / "secret")
    (out / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"is (behind )?a link that leaves (its|the) folder"):
        om.load(out)


# Heads


def sized(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name.replace("_", "."): torch.zeros(shape) for name, shape in shapes.items()}


HEADS: dict[str, tuple[dict[str, torch.Tensor], str | None]] = {
    "no weight": (sized(bias=(2,)), None),
    "hidden alone": (sized(weight=(2, 4), hidden_weight=(4, 4)), None),
    "hidden bias alone": (sized(weight=(2, 4), hidden_bias=(4,)), None),
    "another tensor": (sized(weight=(2, 4), scale=(1,)), None),
    "a flat weight": (sized(weight=(8,)), None),
    "a scalar": (sized(weight=()), None),
    "three axes": (sized(weight=(2, 4, 4)), None),
    "integers": ({"weight": torch.zeros(2, 4, dtype=torch.int64)}, None),
    "a short bias": (sized(weight=(2, 4), bias=(1,)), None),
    "a scalar bias": (sized(weight=(2, 4), bias=()), None),
    "hidden misfits": (sized(weight=(2, 4), hidden_weight=(3, 4)), "tanh"),
    "hidden is a scalar": (sized(weight=(2, 4), hidden_weight=()), "tanh"),
    "hidden bias misfits": (sized(weight=(2, 4), hidden_weight=(4, 4), hidden_bias=(3,)), "tanh"),
}


def replace_head(out: Path, tensors: dict[str, torch.Tensor], activation: str | None) -> None:
    """Another head for the task `two`, properly listed."""
    path = out / "two/head.safetensors"
    save_file(tensors, path)
    change(out, ("files two/head.safetensors", {"size": path.stat().st_size, "hash": RawFile(path).digest()}))
    change(out, ("heads two names", {name: name for name in tensors}), ("heads two activation", activation))


@pytest.mark.parametrize(("tensors", "activation"), HEADS.values(), ids=HEADS)
def test_a_damaged_head(tensors: dict[str, torch.Tensor], activation: str | None, out: Path) -> None:
    replace_head(out, tensors, activation)
    layers = "1 linear layer" if activation is None else "2 linear layers"
    with pytest.raises(CheckpointError, match=rf"two/head\.safetensors must hold {layers} with 2 rows at the end, as"):
        om.load(out)


def test_a_head_of_two_layers_is_read(out: Path) -> None:
    replace_head(out, sized(weight=(2, 3), hidden_weight=(3, 4), hidden_bias=(3,), bias=(2,)), "tanh")
    assert head_of(om.load(out).head("two")).width == 4


# Companions


def test_companions_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "models--a--b/snapshots/0", tmp_path / "models--a--b/blobs/1"
    for folder in (snapshot / "topic", blob.parent):
        folder.mkdir(parents=True)
    blob.write_text("x")
    for folder, up in ((snapshot, "../.."), (snapshot / "topic", "../../..")):
        (folder / "vocab.txt").symlink_to(f"{up}/blobs/1")
        assert companions(folder) == [folder / "vocab.txt"]


def test_companions_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").symlink_to("words")
    with pytest.raises(CheckpointError, match=r"vocab\.txt is a link to nothing; fetch the file again"):
        companions(tmp_path)
    (tmp_path / "words").write_text("x")
    assert companions(tmp_path) == [tmp_path / "vocab.txt"]
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", (64 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"json must have at most 67108864 bytes, .*, got 67108865; fetch it"):
        companions(tmp_path)
