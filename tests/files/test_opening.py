"""Opening whatever people have, and refusing what only looks like it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from orthomerge.core.errors import CheckpointError
from orthomerge.files import opening
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

    monkeypatch.setattr(opening, "fetch", fetch)


def write_index(folder: Path, places: dict[str, Any], *, name: str = INDEX, total: object = None) -> None:
    metadata = {} if total is None else {"metadata": {"total_size": total}}
    (folder / name).write_text(json.dumps({**metadata, "weight_map": places}))


def sharded(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a.weight": A, "c": C}, folder / ONE)
    save_file({"b.weight": B}, folder / TWO)
    write_index(folder, {"a.weight": ONE, "c": ONE, "b.weight": TWO}, total=A.nbytes + B.nbytes + C.nbytes)
    return folder


def check(checkpoint: Checkpoint, expected: dict[str, torch.Tensor] = TENSORS) -> None:
    assert set(checkpoint) == set(expected)
    assert all(torch.equal(checkpoint[name], value) for name, value in expected.items())


def test_one_file_of_safetensors(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    checkpoint = open_checkpoint(str(tmp_path))
    check(checkpoint)
    assert (checkpoint.path, checkpoint.config, checkpoint.revision) == (tmp_path, {"model_type": "bert"}, None)
    assert checkpoint.reference == str(tmp_path)
    assert [file.path.name for file in checkpoint.files] == ["model.safetensors"]


def test_shards_of_safetensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded(tmp_path))
    check(checkpoint)
    assert (checkpoint.path, checkpoint.config, checkpoint.origin("b.weight")) == (tmp_path, None, tmp_path / TWO)
    assert [file.path.name for file in checkpoint.files] == [ONE, TWO]


def test_one_pickle_and_shards_of_pickles_with_tied_weights(tmp_path: Path) -> None:
    torch.save({**TENSORS, "tied": A}, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    check(checkpoint)
    assert checkpoint.aliases == {"tied": "a.weight"}
    assert torch.equal(checkpoint["tied"], A)

    shards = tmp_path / "shards"
    shards.mkdir()
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    torch.save({"a.weight": A, "tied": A}, shards / one)
    torch.save({"b.weight": B, "c": C}, shards / two)
    # torch counts tied weights as often as they are named
    write_index(shards, {"a.weight": one, "tied": one, "b.weight": two, "c": two}, name=PICKLED_INDEX, total=999)
    checkpoint = open_checkpoint(shards)
    check(checkpoint)
    assert checkpoint.aliases == {"tied": "a.weight"}


@pytest.mark.parametrize("suffix", [".safetensors", ".bin", ".pt", ".pth", ".ckpt"])
def test_bare_files_of_each_kind(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"Weights of mine{suffix}"
    if suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        torch.save({"epoch": 3, "state_dict": TENSORS}, path)
    checkpoint = open_checkpoint(str(path))
    check(checkpoint)
    assert (checkpoint.path, checkpoint.config, checkpoint.reference) == (path, None, str(path))
    # The same file, alone in a folder, under whatever name.
    check(open_checkpoint(str(tmp_path)))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(f"~/{path.name}") == (path, None)


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


def test_a_hub_id_is_asked_of_the_hub_only_if_no_path_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(reference: str) -> tuple[Path, str]:
        asked.append(reference)
        return tmp_path / "snapshot", "c" * 40

    monkeypatch.setattr(opening, "fetch", fetch)
    monkeypatch.chdir(tmp_path)
    for folder in ("org/name", "snapshot"):
        (tmp_path / folder).mkdir(parents=True)
        save_file(TENSORS, tmp_path / folder / "model.safetensors")
    assert open_checkpoint("org/name").revision is None
    assert asked == []
    other = open_checkpoint("org/other@main")
    assert (other.revision, other.reference, other.path) == ("c" * 40, "org/other@main", tmp_path / "snapshot")
    assert asked == ["org/other@main"]
    # What a program names as a path is never taken for a hub id.
    with pytest.raises(CheckpointError, match="out/encoder does not exist"):
        open_checkpoint(Path("out/encoder"))
    assert asked == ["org/other@main"]


def _adapter(folder: Path) -> Path:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q"], "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {"A": torch.ones(1, 3), "B": torch.ones(2, 1)}
    named = {f"base_model.model.q.lora_{side}.weight": value for side, value in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_an_expert_but_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = open_expert(_adapter(tmp_path))
    assert isinstance(adapter, Adapter)
    assert adapter.reference == str(tmp_path)
    with pytest.raises(CheckpointError, match="is a LoRA adapter, not a full model; adapters can be experts, the base"):
        open_checkpoint(tmp_path)
    monkeypatch.setattr(opening, "fetch", lambda reference: (tmp_path, "d" * 40))
    assert open_expert("org/adapter").revision == "d" * 40


Prepare = Callable[[Path], object]  # changes a folder with TENSORS in two shards; what it returns is opened instead


def text(name: str, content: str) -> Prepare:
    return lambda folder: (folder / name).write_text(content) and None


def index(places: Any, **metadata: Any) -> Prepare:
    return text(INDEX, json.dumps({**metadata, "weight_map": places}))


def shard(name: str) -> Prepare:
    """The second shard under another name in the index; there are files that it could lead to."""

    def prepare(folder: Path) -> None:
        (folder / "sub").mkdir()
        for path in (folder.parent / "x.safetensors", folder / "sub" / "x.safetensors"):
            save_file({"b.weight": B}, path)
        torch.save({"b.weight": B}, folder / "x.bin")
        write_index(folder, {**PLACES, "b.weight": name})

    return prepare


def instead(make: Callable[[Path], object]) -> Prepare:
    """Something else in the place of the second shard."""

    def prepare(folder: Path) -> None:
        (folder / TWO).rename(folder.parent / "secret.safetensors")
        make(folder / TWO)

    return prepare


def bare(name: str, make: Callable[[Path], object]) -> Prepare:
    """A file beside the folder, opened by itself."""

    def prepare(folder: Path) -> Path:
        make(folder.parent / name)
        return folder.parent / name

    return prepare


def only(*names: str) -> Prepare:
    """No shards, but these files of weights."""

    def prepare(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        for name in names:
            save_file(TENSORS, folder / name)

    return prepare


def dangling(folder: Path) -> None:
    only()(folder)
    torch.save(TENSORS, folder / "pytorch_model.bin")
    (folder / "model.safetensors").symlink_to(folder / "blob-that-was-never-fetched")


def pickle_index(folder: Path) -> None:
    only("x.safetensors")(folder)
    write_index(folder, {"b.weight": "x.safetensors"}, name=PICKLED_INDEX)


PLACES = {"a.weight": ONE, "c": ONE, "b.weight": TWO}
OUTSIDE = "points outside its own folder, to .*; do not trust this file"
LEAVES = "is a link that leaves its folder; copy the file there instead"
TOO_LONG = r"cannot be opened \(File name too long\), and is not a hub id"
SEVERAL = r"several weight files \('a.safetensors', 'b.safetensors', 'c.safetensors' and 1 more\).*name the file itself"
QUANTISED = r"is quantised \({}\); merge the original float weights"
# fmt: off
REFUSED: list[tuple[Prepare | str, str]] = [
    # references
    ("nowhere", "'nowhere' does not exist, and is not a hub id of the form"),
    ("org/model.safetensors", "'org/model.safetensors' does not exist"),
    ("a\0b", r"'a\\x00b' does not exist"),
    ("x" * 300, TOO_LONG),
    ("~nobody-of-this-name/x", r"cannot be opened \(Could not determine home.*, and is not a hub id"),
    ("/dev/zero", "/dev/zero is not a checkpoint"),
    (bare("circle", lambda path: path.symlink_to(path)), "circle' does not exist"),
    (bare("x.onnx", Path.touch), r"x.onnx is not a checkpoint: give a folder, or a file that ends in .safetensors,"),
    (bare("x.safetensors", os.mkfifo), r"x.safetensors is not a regular file"),
    # folders
    (only(), r"holds no weights: expected model.safetensors or pytorch_model.bin, or"),
    (only("a.safetensors", "b.safetensors", "c.safetensors", "d.safetensors"), SEVERAL),
    (dangling, r"cannot open .*model.safetensors: No such file"),
    (lambda folder: save_file(TENSORS, folder / "model.safetensors"), r"holds both model.safetensors and .*index.json"),
    (text("config.json", '{"quantization_config": {"quant_method": "gptq"}}'), QUANTISED.format("gptq")),
    (text("config.json", '{"quantization_config": "int8"}'), QUANTISED.format("int8")),
    (text("config.json", '{"model_type": '), r"config.json is not valid JSON"),
    # names of shards
    *((shard(name), OUTSIDE) for name in (
        "../x.safetensors", "sub/x.safetensors", "sub/../x.safetensors", "./x.safetensors", "/etc/x.safetensors", "",
        "..", "..\\x.safetensors", "x\0.safetensors", "x.safetensors/",
    )),
    (shard("x.bin"), r"points to 'x.bin', which is not a .safetensors file; do not trust this file"),
    (shard("x.safetensors"), r"index.json names the shard 'x.safetensors', which is missing; fetch it again"),
    (shard("x" * 300 + ".safetensors"), "File name too long"),
    (pickle_index, r"points to 'x.safetensors', which is not a .bin file"),
    # what lies in their places
    (instead(lambda path: path.symlink_to("../secret.safetensors")), LEAVES),
    (instead(lambda path: path.symlink_to("nowhere")), "names the shard .*, which is missing"),
    (instead(os.mkfifo), "is not a regular file"),
    (lambda folder: os.truncate(folder / TWO, (folder / TWO).stat().st_size - 1), f"{TWO} was cut short: 1 byte"),
    (lambda folder: save_file({"a.weight": A * 2, "b.weight": B}, folder / TWO),
     f"{TWO} has 'a.weight', which {INDEX} does not list"),
    # indexes
    (text(INDEX, "{"), "index.json is not valid JSON"),
    (text(INDEX, "{}"), "index.json must have a 'weight_map' from tensor names to file names; fetch it again"),
    (index({}), "must have a 'weight_map'"),
    (index({"a": 1}), "must have a 'weight_map'"),
    (index({**PLACES, "c": TWO}), f"{ONE} has 'c', which {INDEX} does not list"),
    (index({**PLACES, "d": TWO}), f"{INDEX} lists 'd' in {TWO}, which does not have it"),
    (index(PLACES, metadata={"total_size": 55}), "must have 55 bytes .its total_size., got 56; index and"),
    # pickles
    *((bare("x.pt", partial(torch.save, {name: A})), r"x.pt holds a tensor with the name .* which no framework writes")
      for name in ("../x", "a\0", "__metadata__")),
]
# fmt: on


@pytest.mark.parametrize(("prepare", "match"), REFUSED)
def test_what_is_refused(tmp_path: Path, prepare: Prepare | str, match: str) -> None:
    folder = sharded(tmp_path / "model")
    reference = prepare if isinstance(prepare, str) else prepare(folder) or folder
    with pytest.raises(CheckpointError, match=match):
        open_expert(str(reference))


def linked(folder: Path) -> None:
    (folder / TWO).rename(folder / "real.safetensors")
    (folder / TWO).symlink_to("real.safetensors")


def beside_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even looked at")


def whole_beside_pickles(folder: Path) -> None:
    only("model.safetensors")(folder)
    beside_pickles(folder)


NO_SIZES: tuple[object, ...] = (None, [], {"total_size": "56"}, {"total_parameters": 12})
ACCEPTED = [linked, beside_pickles, whole_beside_pickles, *(index(PLACES, metadata=metadata) for metadata in NO_SIZES)]


@pytest.mark.parametrize("prepare", ACCEPTED)
def test_what_is_accepted(tmp_path: Path, prepare: Prepare) -> None:
    prepare(sharded(tmp_path))
    check(open_checkpoint(tmp_path))


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(CheckpointError, match=rf"cannot read {tmp_path}: Permission denied"):
        open_expert(tmp_path)
