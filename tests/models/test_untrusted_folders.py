"""Checkpoints of unknown authors: options of a config have no effect, links do not leave, no code runs, no network."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.making import same_tensors, stock

import orthomerge as om
from orthomerge.core.errors import CheckpointError, OrthomergeError
from orthomerge.files.folders import LOCAL
from orthomerge.files.opening import open_expert
from orthomerge.models.experts import reopen_experts
from orthomerge.runs.models import write
from orthomerge.runs.recipe import read_recipe


@pytest.fixture
def models(berts: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(berts, tmp_path / "models"))


def merged(models: Path) -> om.Model:
    return om.merge({name: models / name for name in ("two", "three")}, "average", base=models / "base")


# What a config may ask for; none of it has an effect, or reaches an output.
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_attn_implementation_internal")
SWITCHES = ("torchscript", "output_hidden_states", "output_attentions", "gradient_checkpointing")
OPTIONS: dict[str, Any] = {
    "transformers_weights": "other.safetensors",
    "compression_config": {"quant_method": "x"},
    "base_model_tp_plan": {"*": "colwise"},
    "_name_or_path": "/home/somebody/secret",
    "_commit_hash": "0" * 40,
    "api_key": "secret",
    "return_dict": False,
    **dict.fromkeys(("dtype", "torch_dtype"), "float16"),
    **dict.fromkeys(KERNELS, "org/kernel"),
    **dict.fromkeys(SWITCHES, True),
}


def change_json(path: Path, **change: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


@pytest.mark.parametrize("role", ["base", "two"])
def test_options_of_a_config_have_no_effect(role: str, models: Path, tmp_path: Path, offline: Mock) -> None:
    plain = merged(models)
    before = plain.predict("a good film")
    for folder in (models / "base", models / "two"):
        tensors = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
        torch.save(tensors, folder / "adapter_model.bin")
    change_json(models / role / "config.json", **OPTIONS)
    change_json(models / "base/tokenizer_config.json", name_or_path="org/name")
    model = merged(models)
    assert same_tensors(model, plain)
    assert model.digest == plain.digest
    assert model.predict("a good film") == before
    model.save(tmp_path / "out")
    for written in (tmp_path / "out/two/config.json", tmp_path / "out/orthomerge.json"):
        document = json.loads(written.read_text())
        config = document["encoder"]["config"] if "encoder" in document else document
        assert {config[key] for key in OPTIONS if key in config} <= {"float32"}
    assert stock(tmp_path / "out/two").num_labels == 2
    offline.assert_not_called()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "processor_config.json"])
def test_a_processor_with_code_is_neither_loaded_nor_copied(name: str, models: Path, tmp_path: Path) -> None:
    (models / "base" / name).write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}))
    model = merged(models)
    for call in (lambda: model.predict("a film"), lambda: model.save(tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"asks to run its own code \('auto_map'"):
            call()
    assert not (tmp_path / "out").exists()


def test_no_file_beside_the_known_ones_reaches_transformers(models: Path) -> None:
    """The tokenizer is loaded from a copy: code and templates in its folder are not there."""
    plain = merged(models).predict("a good film")
    (models / "base/evil.py").write_text("raise SystemExit")
    (models / "base/chat_template.jinja").write_text("{{ evil }}")
    (models / "base/config.json.bak").write_text("x")
    assert merged(models).predict("a good film") == plain


# Links


def as_adapter(folder: Path) -> None:
    """The classifier's config may lie beside it."""
    (folder / "model.safetensors").unlink()
    layer = "base_model.model.bert.encoder.layer.0.attention.self.query"
    tensors = {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


Form = Callable[[Path], None] | None
ABSOLUTE, RELATIVE = "secret", "../../secret"
LINKS: list[tuple[Form, str, str]] = [
    *((None, f"base/{name}", ABSOLUTE) for name in ("config.json", "vocab.txt")),
    *((None, f"base/{name}", RELATIVE) for name in ("model.safetensors", "tokenizer_config.json")),
    (None, "two/config.json", "../../blobs/config.json"),  # no cache of the hub
    *((as_adapter, f"two/{name}", ABSOLUTE) for name in ("config.json", "adapter_config.json")),
    *((as_adapter, "two/adapter_model.safetensors", RELATIVE), (pickled, "two/pytorch_model.bin", ABSOLUTE)),
]


@pytest.mark.parametrize(("form", "name", "target"), LINKS)
def test_a_file_behind_a_link_that_leaves(form: Form, name: str, target: str, models: Path, tmp_path: Path) -> None:
    if form is not None:
        form(models / "two")
    assert open_expert(models / "two")
    file, place = models / name, tmp_path / target.removeprefix("../../")
    place.parent.mkdir(exist_ok=True)
    file.rename(place)
    file.symlink_to(place if target == ABSOLUTE else target)
    with pytest.raises(CheckpointError, match="is a link that leaves its folder; copy the file there instead"):
        merged(models).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_link_is_followed(models: Path) -> None:
    plain = merged(models)
    folder = (models / "two").rename(models / "elsewhere")
    (models / "two").symlink_to(folder)
    assert same_tensors(merged(models), plain)


# The network


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Whoever asks for an address, or for a model of the hub, is refused and noted."""
    network = Mock(side_effect=OSError("there is no network"))
    monkeypatch.setattr(socket, "getaddrinfo", network)
    monkeypatch.setattr(socket.socket, "connect", network)
    monkeypatch.setattr("orthomerge.files.opening.fetch", network)
    return network


def test_a_path_is_never_asked_of_the_hub(
    berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: Mock
) -> None:
    """Neither one of a recipe, which is given by its bare name, nor a `Path`."""
    monkeypatch.chdir(tmp_path)
    for place in ("./models/gone", f"../{tmp_path.name}/models/gone"):
        Path("recipe.yaml").write_text(f"experts: {{two: {berts / 'two'}}}\nbase: {place}\nout: out\n")
        with pytest.raises(OrthomergeError, match="models/gone' does not exist"):
            write(read_recipe(Path("recipe.yaml")))
    for experts, base in (({"two": Path("org/two")}, berts / "base"), ({"two": berts / "two"}, Path("org/base"))):
        with pytest.raises(OrthomergeError, match="does not exist"):
            om.open(experts, base=base).check()
    offline.assert_not_called()


def test_what_a_saved_model_records_asks_for_nothing(models: Path, tmp_path: Path, offline: Mock) -> None:
    merged(models).save(tmp_path / "out")
    place = {"absolute": "org/name", "relative": "org/name"}
    change_json(tmp_path / "out" / LOCAL, places={"two": place, "three": place, "": place})
    model = om.load(tmp_path / "out")
    with pytest.raises(OrthomergeError, match="was not found"):
        reopen_experts(model)
    assert model.predict("a good film")
    offline.assert_not_called()
