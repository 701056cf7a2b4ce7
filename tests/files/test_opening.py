"""Opening whatever people have, and refusing what only looks like it."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from orthomerge.core.errors import CheckpointError
from orthomerge.files import hub
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.files.lora import Adapter
from orthomerge.files.opening import locate, open_checkpoint, open_expert

A, B, C = torch.ones(2, 3), torch.arange(4.0), torch.tensor([7, 8])
TENSORS = {"a.weight": A, "b.weight": B, "c": C}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_INDEX = "pytorch_model.bin.index.json"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(reference: str) -> tuple[Path, str]:
        raise AssertionError(f"the hub was asked for {reference}")

    monkeypatch.setattr(hub, "fetch", fetch)


def write_index(folder: Path, places: dict[str, Any], *, name: str = INDEX, total: object = None) -> None:
    metadata = {} if total is None else {"metadata": {"total_size": total}}
    (folder / name).write_text(json.dumps({**metadata, "weight_map": places}))


def sharded(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": A, "c": C}, folder / ONE)
    save_file({"b.weight": B}, folder / TWO)
    write_index(folder, {"a.weight": ONE, "c": ONE, "b.weight": TWO}, total=A.nbytes + B.nbytes + C.nbytes)
    return folder


def check(found: Checkpoint, expected: dict[str, torch.Tensor] = TENSORS) -> None:
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_one_file_of_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    found = open_checkpoint(str(tmp_path))
    check(found)
    assert (found.path, found.config, found.revision) == (tmp_path, {"model_type": "bert"}, None)
    assert found.reference == str(tmp_path)
    assert [file.path.name for file in found.files] == ["model.safetensors"]


def test_shards_of_safetensors(tmp_path: Path) -> None:
    found = open_checkpoint(sharded(tmp_path))
    check(found)
    assert (found.path, found.config, found.origin("b.weight")) == (tmp_path, None, tmp_path / TWO)
    assert [file.path.name for file in found.files] == [ONE, TWO]


def test_one_pickle_and_shards_of_pickles_with_tied_weights(tmp_path: Path) -> None:
    torch.save({**TENSORS, "tied": A}, tmp_path / "pytorch_model.bin")
    found = open_checkpoint(tmp_path)
    check(found)
    assert found.aliases == {"tied": "a.weight"}
    assert torch.equal(found["tied"], A)

    (tmp_path / "shards").mkdir()
    torch.save({"a.weight": A, "tied": A}, tmp_path / "shards" / "pytorch_model-00001-of-00002.bin")
    torch.save({"b.weight": B, "c": C}, tmp_path / "shards" / "pytorch_model-00002-of-00002.bin")
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    # torch counts tied weights as often as they are named
    places = {"a.weight": one, "tied": one, "b.weight": two, "c": two}
    write_index(tmp_path / "shards", places, name=PICKLED_INDEX, total=999)
    found = open_checkpoint(tmp_path / "shards")
    check(found)
    assert found.aliases == {"tied": "a.weight"}


def test_safetensors_win_over_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    save_file(TENSORS, tmp_path / "model.safetensors")
    check(open_checkpoint(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    check(open_checkpoint(sharded(tmp_path)))


def test_a_link_to_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob-that-was-never-fetched")
    with pytest.raises(CheckpointError, match=r"cannot open .*model.safetensors: No such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".ckpt"])
def test_bare_files_of_each_kind(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"Weights of mine{suffix}"
    if suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        torch.save({"epoch": 3, "state_dict": TENSORS}, path)
    found = open_checkpoint(str(path))
    check(found)
    assert (found.path, found.config, found.reference) == (path, None, str(path))
    # The same file, alone in a folder, under whatever name.
    check(open_checkpoint(str(tmp_path)))


def test_a_path_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/x.safetensors") == (tmp_path / "x.safetensors", None)


def test_the_cache_of_the_hub_is_made_of_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    sharded(snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../../blobs") / str(number))
    check(open_checkpoint(snapshot))
    (tmp_path / "elsewhere").symlink_to(snapshot)
    check(open_checkpoint(tmp_path / "elsewhere"))


def test_a_hub_id_is_asked_of_the_hub_only_when_no_such_path_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(reference: str) -> tuple[Path, str]:
        asked.append(reference)
        return tmp_path / "snapshot", "c" * 40

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    for folder in ("org/name", "snapshot"):
        (tmp_path / folder).mkdir(parents=True)
        save_file(TENSORS, tmp_path / folder / "model.safetensors")
    assert open_checkpoint("org/name").revision is None
    assert asked == []
    found = open_checkpoint("org/other@main")
    assert (found.revision, found.reference, found.path) == ("c" * 40, "org/other@main", tmp_path / "snapshot")
    assert asked == ["org/other@main"]
    # What a program names as a path is never taken for a hub id.
    with pytest.raises(CheckpointError, match="out/encoder does not exist"):
        open_checkpoint(Path("out/encoder"))
    assert asked == ["org/other@main"]


def _adapter(folder: Path) -> Path:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q"], "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {
        "base_model.model.q.lora_A.weight": torch.ones(1, 3),
        "base_model.model.q.lora_B.weight": torch.ones(2, 1),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_an_expert_but_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = open_expert(_adapter(tmp_path))
    assert isinstance(found, Adapter)
    assert found.reference == str(tmp_path)
    with pytest.raises(CheckpointError, match="is a LoRA adapter, not a full model; adapters can be experts, the base"):
        open_checkpoint(tmp_path)
    monkeypatch.setattr(hub, "fetch", lambda reference: (tmp_path, "d" * 40))
    assert open_expert("org/adapter").revision == "d" * 40


NOWHERE = {
    "no path": ("nowhere", "'nowhere' does not exist, and is not a hub id of the form"),
    "absolute": ("/nowhere/at/all", "'/nowhere/at/all' does not exist"),
    "a mistyped file": ("org/model.safetensors", "'org/model.safetensors' does not exist"),
    "empty name": ("no where/x", "'no where/x' does not exist"),
    "null byte": ("a\0b", r"'a\\x00b' does not exist"),
    "too long": ("x" * 300, r"cannot be opened \(File name too long\), and is not a hub id"),
    "no such user": ("~nobody-of-this-name/x", r"cannot be opened \(Could not determine home.*, and is not a hub id"),
}


@pytest.mark.parametrize(("reference", "match"), NOWHERE.values(), ids=NOWHERE.keys())
def test_paths_that_do_not_exist(reference: str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        open_expert(reference)


def test_a_link_that_runs_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "x")
    with pytest.raises(CheckpointError, match="x' does not exist"):
        open_expert(str(tmp_path / "x"))


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(CheckpointError, match=rf"cannot read {tmp_path}: Permission denied"):
        open_expert(tmp_path)


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    for name in ("x.txt", "x", "x.onnx"):
        (tmp_path / name).write_text("?")
        with pytest.raises(
            CheckpointError, match=rf"{name} is not a checkpoint: give a folder, or a file that ends in"
        ):
            open_checkpoint(tmp_path / name)
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(CheckpointError, match=f"{device} is not a checkpoint"):
            open_checkpoint(device)
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"x.safetensors is not a regular file"):
        open_checkpoint(tmp_path / "x.safetensors")


def test_folders_without_weights_or_with_too_many(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no weights: expected model.safetensors or pytorch_model.bin, or"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_checkpoint(tmp_path)
    for name in "abcd":
        save_file(TENSORS, tmp_path / f"{name}.safetensors")
    several = r"several weight files \('a.safetensors', 'b.safetensors', 'c.safetensors' and 1 more\)"
    with pytest.raises(CheckpointError, match=f"{several}.*name the file itself if it has another name"):
        open_checkpoint(tmp_path)


def test_a_whole_file_beside_an_index(tmp_path: Path) -> None:
    save_file(TENSORS, sharded(tmp_path) / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"holds both model.safetensors and .*index.json: one of them is left over"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("quantised", "shown"), [({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, "unknown"), ("int8", "int8")]
)
def test_quantised_models(tmp_path: Path, quantised: Any, shown: str) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    with pytest.raises(CheckpointError, match=rf"is quantised \({shown}\); merge the original float weights"):
        open_checkpoint(tmp_path)


def test_a_broken_config(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "model_type": "vit"}')
    with pytest.raises(CheckpointError, match=r"config.json names 'model_type' twice"):
        open_checkpoint(tmp_path)


OUTSIDE = "points outside its own folder, to .*; do not trust this file"
SHARDS: dict[str, tuple[str, str]] = {
    "parent": ("../x.safetensors", OUTSIDE),
    "deeper": ("sub/x.safetensors", OUTSIDE),
    "through": ("sub/../x.safetensors", OUTSIDE),
    "here": ("./x.safetensors", OUTSIDE),
    "absolute": ("/etc/x.safetensors", OUTSIDE),
    "empty": ("", OUTSIDE),
    "dots": ("..", OUTSIDE),
    "dot": (".", OUTSIDE),
    "backslash": ("..\\x.safetensors", OUTSIDE),
    "null byte": ("x\0.safetensors", OUTSIDE),
    "trailing slash": ("x.safetensors/", OUTSIDE),
    "device": ("/dev/zero", OUTSIDE),
    "a pickle": ("x.bin", r"points to 'x.bin', which is not a .safetensors file; do not trust this file"),
    "no suffix": ("x", "which is not a .safetensors file"),
    "missing": ("x.safetensors", r"index.json names the shard 'x.safetensors', which is missing; fetch it again"),
    "a name too long": ("x" * 300 + ".safetensors", r"File name too long"),
}


@pytest.mark.parametrize(("shard", "match"), SHARDS.values(), ids=SHARDS.keys())
def test_an_index_that_points_elsewhere(tmp_path: Path, shard: str, match: str) -> None:
    folder = sharded(tmp_path / "model")
    (folder / "sub").mkdir()
    save_file({"b.weight": B}, tmp_path / "x.safetensors")
    save_file({"b.weight": B}, folder / "sub" / "x.safetensors")
    torch.save({"b.weight": B}, folder / "x.bin")
    write_index(folder, {"a.weight": ONE, "c": ONE, "b.weight": shard})
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(folder)


def test_a_pickle_index_that_points_to_safetensors(tmp_path: Path) -> None:
    save_file({"b.weight": B}, tmp_path / "x.safetensors")
    write_index(tmp_path, {"b.weight": "x.safetensors"}, name=PICKLED_INDEX)
    with pytest.raises(CheckpointError, match=r"points to 'x.safetensors', which is not a .bin file"):
        open_checkpoint(tmp_path)


def _link_out(shard: Path) -> None:
    shard.rename(shard.parent.parent / "secret.safetensors")
    shard.symlink_to("../secret.safetensors")


def _link_device(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to("/dev/zero")


def _link_nowhere(shard: Path) -> None:
    shard.unlink()
    shard.symlink_to("nowhere")


def _fifo(shard: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


def _folder(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_link_out, "is a link that leaves its folder; copy the file there instead"),
        (_link_device, "is a link that leaves its folder"),
        (_link_nowhere, "names the shard .*, which is missing"),
        (_fifo, "is not a regular file"),
        (_folder, "is not a regular file"),
    ],
)
def test_shards_that_are_no_plain_files(tmp_path: Path, change: Callable[[Path], None], match: str) -> None:
    change(sharded(tmp_path / "model") / TWO)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path / "model")


def test_a_link_within_the_folder_is_fine(tmp_path: Path) -> None:
    (sharded(tmp_path) / TWO).rename(tmp_path / "real.safetensors")
    (tmp_path / TWO).symlink_to("real.safetensors")
    check(open_checkpoint(tmp_path))


def _places(**changes: str) -> dict[str, str]:
    return {"a.weight": ONE, "c": ONE, "b.weight": TWO} | {name.replace("_", "."): to for name, to in changes.items()}


INDEXES: dict[str, tuple[str, str]] = {
    "not JSON": ("{", "index.json is not valid JSON"),
    "a list": ("[]", "index.json must be a JSON object, got list"),
    "no map": ("{}", "index.json must have a 'weight_map' from tensor names to file names; fetch it again"),
    "empty map": ('{"weight_map": {}}', "must have a 'weight_map'"),
    "numbers": ('{"weight_map": {"a": 1}}', "must have a 'weight_map'"),
    "nested": ('{"weight_map": {"a": {"b": "c"}}}', "must have a 'weight_map'"),
    "twice": ('{"weight_map": {"a": "b", "a": "c"}}', "index.json names 'a' twice"),
    "deep": ('{"weight_map":' + "[" * 100_000, "index.json is not valid JSON"),
    "in the other shard": (
        json.dumps({"weight_map": _places(c=TWO)}),
        f"{ONE} holds 'c', which {INDEX} does not place there",
    ),
    "not in the index": (
        json.dumps({"weight_map": {"a.weight": ONE, "b.weight": TWO}}),
        f"{ONE} holds 'c', which {INDEX} does not place there",
    ),
    "not in the shard": (
        json.dumps({"weight_map": _places(d=TWO)}),
        f"{INDEX} places 'd' in {TWO}, which does not hold it",
    ),
    "total too small": (
        json.dumps({"metadata": {"total_size": 55}, "weight_map": _places()}),
        "says the shards hold 55 bytes, but they hold 56; a shard is of another save",
    ),
}


@pytest.mark.parametrize(("text", "match"), INDEXES.values(), ids=INDEXES.keys())
def test_an_index_that_does_not_fit(tmp_path: Path, text: str, match: str) -> None:
    (sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("metadata", [None, [], {"total_size": "56"}, {"total_parameters": 12}])
def test_an_index_that_says_no_size(tmp_path: Path, metadata: object) -> None:
    (sharded(tmp_path) / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": _places()}))
    check(open_checkpoint(tmp_path))


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"a.weight": A * 2, "b.weight": B}, sharded(tmp_path) / TWO)
    with pytest.raises(CheckpointError, match=f"{TWO} holds 'a.weight', which {INDEX} does not place there"):
        open_checkpoint(tmp_path)


def test_a_shard_cut_short_is_named(tmp_path: Path) -> None:
    shard = sharded(tmp_path) / TWO
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{TWO} was cut short: 1 bytes of its last tensors are missing"):
        open_checkpoint(tmp_path)


class _Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_an_evil_pickle_runs_nothing(tmp_path: Path) -> None:
    folder, target = tmp_path / "model", tmp_path / "evil"
    folder.mkdir()
    for name in ("pytorch_model.bin", "x.pt"):
        (folder / name).write_bytes(pickle.dumps({"a": _Evil(target)}))
        with pytest.raises(CheckpointError, match=name):
            open_checkpoint(folder / name)
    torch.save({"a": A, "b": _Evil(target)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
        open_checkpoint(folder)
    assert not target.exists()
    pickle.loads((folder / "x.pt").read_bytes())
    assert target.exists()  # so the test would notice


def test_odd_names_in_a_pickle_are_refused(tmp_path: Path) -> None:
    for name in ("../x", "a\0", "__metadata__"):
        torch.save({name: A}, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=r"x.pt holds a tensor with the name .* which no framework writes"):
            open_checkpoint(tmp_path / "x.pt")
