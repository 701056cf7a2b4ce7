"""A saved model opens its experts again: nobody names them twice, and hashes decide whether they are the right ones."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.conftest import NAMES
from tests.models.making import HEADS, TASKS, average, flip_a_bit, reloaded, same_tensors

import orthomerge as om
from orthomerge.core.errors import CheckpointError, IncompatibleError, RecipeError
from orthomerge.files.folders import LOCAL
from orthomerge.models.experts import reopen_experts


@pytest.fixture
def world(berts: Path, tmp_path: Path) -> Path:
    """A folder with `models` and, merged from them, `out`."""
    models = Path(shutil.copytree(berts, tmp_path / "world/models"))
    om.merge({name: models / name for name in NAMES}, "average", base=models / "base").save(tmp_path / "world/out")
    return tmp_path / "world"


def test_experts_where_they_were_and_moved_with_the_model(world: Path) -> None:
    """Absolute paths are stale after a move, relative ones hold."""
    assert reopen_experts(om.load(world / "out"), tasks=["three"]).tasks == ("three",)
    moved = world.rename(world.with_name("moved"))
    model = om.load(moved / "out")
    experts = reopen_experts(model)
    assert experts.tasks == NAMES
    assert experts.parts.base.path == moved / "models/base"
    assert same_tensors(om.merge(experts, "average"), model)
    model.save(moved / "deeper/again")
    again = moved.rename(moved.with_name("elsewhere"))
    assert reopen_experts(om.load(again / "deeper/again")).parts.base.path == again / "models/base"


def test_a_copy_of_the_model_alone_asks_where_they_are(world: Path, berts: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "out", tmp_path / "out", symlinks=True)
    shutil.rmtree(world)
    model = om.load(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"'two' was not found \(it was at .*models/two\).* --expert two=PATH"):
        reopen_experts(model)
    (tmp_path / "out" / LOCAL).unlink()
    model = om.load(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"'two' was not found; give its path: --expert two=PATH"):
        reopen_experts(model)
    places = {name: berts / name for name in NAMES}
    experts = reopen_experts(model, experts=places)
    assert not experts.has_base  # whole models are read without it
    assert same_tensors(om.merge(reopen_experts(model, experts=places, base=berts / "base"), "average"), model)


def test_another_expert_is_refused(world: Path, berts: Path) -> None:
    model = om.load(world / "out")
    with pytest.raises(IncompatibleError, match=r"the expert of 'two' at .*five is not the one .* its hash differs"):
        reopen_experts(model, experts={"two": berts / "five"})
    with pytest.raises(IncompatibleError, match=r"the base at .*three is not the one that the model was made from"):
        reopen_experts(model, base=berts / "three")
    with pytest.raises(RecipeError, match="there is no task 'tow'; did you mean 'two'"):
        reopen_experts(model, experts={"tow": "x"})
    with pytest.raises(RecipeError, match="must be a path, a hub id or a live model of transformers, got int"):
        reopen_experts(model, experts={"two": 3})
    path = world / "models/two/model.safetensors"
    stamp = path.stat()
    flip_a_bit(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(IncompatibleError, match=r"the expert of 'two' at .*models/two is not the one"):
        reopen_experts(model)


def test_live_experts_are_found_again_by_content(live: Any, berts: Path, tmp_path: Path) -> None:
    base, experts = live
    model = reloaded(om.merge(experts, "average", base=base), tmp_path / "out")
    folders = {name: berts / name for name in NAMES}
    assert reopen_experts(model, experts=folders, base=berts / "base").tasks == NAMES
    assert reopen_experts(model, experts=experts, base=base).tasks == NAMES
    with pytest.raises(IncompatibleError, match=r"the expert of 'two' at .* is not the one"):
        reopen_experts(model, experts={**folders, "two": berts / "five"}, base=berts / "base")
    with torch.no_grad():
        experts["three"].bert.encoder.layer[0].output.dense.bias.add_(1)
    with pytest.raises(IncompatibleError, match=r"the expert of 'three' at .* is not the one"):
        reopen_experts(model, experts=experts, base=base)


def test_zero_shot_heads_keep_their_classes(tmp_path: Path) -> None:
    model = reloaded(average("clip", tmp_path), tmp_path / "out")
    experts = reopen_experts(model)
    for task in TASKS:
        head = experts.opening.experts[task].head
        assert head is not None
        assert list(head.classes or ()) == HEADS[task]["classes"]
        assert torch.equal(experts.heads[task].output.weight, model.heads[task].output.weight)  # type: ignore[union-attr]
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"the base was not found \(it was at .*\); give its path: --base PATH"):
        reopen_experts(om.load(tmp_path / "out"))
    assert reopen_experts(om.load(tmp_path / "out"), base=tmp_path / "moved").heads.keys() == model.heads.keys()


def test_how_experts_were_read_is_kept(berts: Path, tmp_path: Path) -> None:
    """`ignore`, `missing`, `pooling`, labels and the head's layers."""
    two = Path(shutil.copytree(berts / "two", tmp_path / "two"))
    tensors = load_file(two / "model.safetensors")
    tensors["counter"] = torch.ones(1)
    tensors["fc.weight"], tensors["fc.bias"] = tensors.pop("classifier.weight"), tensors.pop("classifier.bias")
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    save_file(tensors, two / "model.safetensors", metadata={"format": "pt"})
    options: Any = {"ignore": ("counter",), "missing": "base", "pooling": "cls"}
    named: Any = {"labels": {"two": ["no", "yes"]}, "heads": {"two": {"layers": ["fc"]}}}
    experts = om.open({"two": two, "three": berts / "three"}, base=berts / "base", **options, **named)
    merged = om.merge(experts, "average")
    again = reopen_experts(reloaded(merged, tmp_path / "out"))
    assert again.opening == replace(experts.opening, experts=again.opening.experts, base=again.opening.base)
    assert (again.opening.ignore, again.opening.missing, again.opening.pooling) == (("counter",), "base", "cls")
    assert {task: again.heads[task].pooling for task in again.heads} == {"two": "cls", "three": "cls"}
    assert again.heads["two"].labels == ("no", "yes")
    assert same_tensors(om.merge(again, "average"), merged)
    shutil.rmtree(two)
    with pytest.raises(CheckpointError, match="the expert of 'two' was not found"):
        reopen_experts(om.load(tmp_path / "out"))


OPENING: dict[str, tuple[str, object]] = {
    r"opening: 'family' must be text or nothing, got 3": ("family", 3),
    r"'missing' must be error \| base, got 'zero'": ("missing", "zero"),
    r"opening: unknown option 'more'": ("more", 1),
}


def test_damaged_records(world: Path) -> None:
    path = world / "out/orthomerge.json"
    manifest = json.loads(path.read_text())
    for message, (key, value) in OPENING.items():
        path.write_text(json.dumps({**manifest, "opening": {**manifest["opening"], key: value}}))
        with pytest.raises(RecipeError, match=message):
            reopen_experts(om.load(world / "out"))
    damaged: list[Any] = [{}, {"places": [], "inputs": {}}, {"places": {"two": {"relative": "x"}}, "inputs": {}}]
    for document in damaged:
        (world / "out" / LOCAL).write_text(json.dumps(document))
        with pytest.raises(CheckpointError, match=r"orthomerge\.local\.json is damaged; remove it"):
            om.load(world / "out")


def test_a_base_is_no_task_of_that_name(berts: Path, tmp_path: Path) -> None:
    merged = om.merge({"base": berts / "two"}, "average", base=berts / "base")
    experts = reopen_experts(reloaded(merged, tmp_path / "out"))
    assert experts.parts.base.path == berts / "base"
    assert experts.parts.sources["base"].checkpoint.path == berts / "two"
