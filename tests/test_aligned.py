"""Aligned outputs of other families, and classifiers that are more than a head."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.aligning import contents, merge_berts, stock, write_tables
from tests.models.conftest import _build
from tests.models.test_zero_shot import write_tokenizer

import orthomerge
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid
from orthomerge.alignment.surgery import SurgeryHead
from orthomerge.classifiers import load_classifier, load_head, rebuilt
from orthomerge.data.processing import load_processor
from orthomerge.data.reading import read_task
from orthomerge.data.task import Examples, Modality, Task
from orthomerge.errors import CheckpointError, RecipeError
from orthomerge.features.features import FeaturePair, Features
from orthomerge.heads import Head, Linear
from orthomerge.manifest import read_manifest
from orthomerge.merged import load
from orthomerge.models.load import quiet
from orthomerge.recipe import Expert, HeadNames, Recipe

TASKS = ("two", "three")
Given = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "aligned-cache"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def merged(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(berts, tmp_path_factory.mktemp("merged") / "out")


@pytest.fixture
def given(berts: Path, tables: Path) -> Given:
    return {
        "data": {task: tables / f"{task}.csv" for task in TASKS},
        "experts": {task: berts / task for task in TASKS},
        "aligner": "ridge",
        "device": "cpu",
    }


def nudged(model: Any, seed: int) -> Any:
    """A copy whose weights differ a little, as a fine-tuned one's do."""
    generator = torch.Generator().manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return twin


def save(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


# Families


@dataclass(frozen=True)
class Ids:
    """A processor for models without tokenizer: inputs are texts of numbers."""

    modality: Modality = "text"
    pad: int = 1

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        rows = [[int(word) for word in text.split()] for text in inputs]
        ids = torch.full((len(rows), max(map(len, rows))), self.pad)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.tensor(row)
        return {"input_ids": ids, "attention_mask": (ids != self.pad).long()}

    def digest(self) -> str:
        return f"ids {self.pad}"


@pytest.mark.parametrize("name", ["roberta", "electra"])
def test_a_head_with_a_hidden_layer(name: str, tmp_path: Path) -> None:
    """Logits of the exported stock model are those of head(A f + shift), the map before it was folded."""
    base = _build(f"{name.title()}ForSequenceClassification", name, 0)
    save(base, tmp_path / "base")
    expert = nudged(base, 1)
    save(expert, tmp_path / "one")
    recipe = Recipe({"one": str(tmp_path / "one")}, base=str(tmp_path / "base"), parameters={"scale": 0.5})
    orthomerge.merge(recipe, out=tmp_path / "out")
    random, processor = np.random.default_rng(0), Ids(pad=base.config.pad_token_id)
    texts = [" ".join(map(str, random.integers(5, 50, random.integers(3, 9)))) for _ in range(80)]
    labels = load_head(tmp_path / "out/heads/one").labels
    task = Task("one", labels, "text", {"train": Examples(texts, None, "train")})
    options: Given = {"aligner": "orthogonal", "options": {"kappa": 0.01}, "device": "cpu", "processor": processor}
    data, experts = {"one": task}, {"one": tmp_path / "one"}
    orthomerge.align(tmp_path / "out", data=data, experts=experts, to=tmp_path / "to", **options)
    assert len(contents(tmp_path / "to/heads")["one/head.safetensors"]) == len(
        contents(tmp_path / "out/heads")["one/head.safetensors"]
    )
    orthomerge.export(tmp_path / "to", "one", tmp_path / "exported")
    alone = orthomerge.merge(Recipe({"one": str(tmp_path / "one")}, method="average"), out=tmp_path / "alone").out
    batch, head = processor(texts), load_head(tmp_path / "out/heads/one")
    assert head.hidden is not None
    with torch.no_grad():
        ours, theirs = (load(folder).features(batch) for folder in (tmp_path / "out", alone))
        pair = FeaturePair(Features(ours, "one", "train"), Features(theirs, "one", "train"))
        found = choose_rigid(Problem.of(pair, head), kappa=0.01, bias=True)
        whole = head.with_tensors({key: tensor.double() for key, tensor in head.tensors().items()})
        unfolded = whole(ours.double() @ found.A.T + (0 if found.shift is None else found.shift))
        logits = stock(tmp_path / "exported")(**batch).logits.double()
    assert not torch.equal(found.A, torch.eye(len(found.A), dtype=torch.float64))
    assert (logits - unfolded).abs().max() <= 1e-5 * unfolded.abs().max()


@pytest.mark.parametrize("aligner", ["ridge", "orthogonal", "surgery"])
def test_clip_whose_head_normalises_and_is_in_no_checkpoint(tmp_path: Path, aligner: str) -> None:
    base = _build("CLIPModel", "clip", 0)
    save(base, tmp_path / "base")
    write_tokenizer(tmp_path / "base")
    with quiet():
        import transformers

        tower = transformers.CLIPVisionModel(base.config.vision_config)
        tower.load_state_dict(nudged(base, 1).vision_model.state_dict())
    save(tower, tmp_path / "pets")
    expert = Expert(str(tmp_path / "pets"), head=HeadNames(classes=("cat", "dog"), templates=("the {}",)))
    recipe = Recipe({"pets": expert}, base=str(tmp_path / "base"), parameters={"scale": 0.5})
    out = orthomerge.merge(recipe, out=tmp_path / "out").out
    images = list(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))
    task = Task("pets", ("cat", "dog"), "image", {"train": Examples(images, None, "train")})
    experts = {"pets": tmp_path / "pets"}
    given: Given = {"data": {"pets": task}, "aligner": aligner, "device": "cpu"}
    given["options"] = {"steps": 5} if aligner == "surgery" else {}
    with pytest.raises(RecipeError, match="is not a whole model with a config and a head of its own; give the base"):
        orthomerge.align(out, experts=experts, to=tmp_path / "to", **given)
    orthomerge.align(out, experts=experts, base=tmp_path / "base", to=tmp_path / "to", **given)
    old, new = (load(folder) for folder in (out, tmp_path / "to"))
    batch = load_processor(out / "encoder", modality="image")(images)
    with torch.no_grad():
        # However long the features are, only their direction counts, before and after.
        features = old.features(batch)
        if aligner != "surgery":
            torch.testing.assert_close(new.head("pets")(features), new.head("pets")(3 * features))
        assert not torch.allclose(new.logits("pets", batch), old.logits("pets", batch))
    names = {"pets/head.safetensors", "pets/labels.json"} | (
        {"pets/extra.safetensors"} if aligner == "surgery" else set()
    )
    assert contents(tmp_path / "to/heads").keys() == names


def test_a_head_without_bias_stays_without(berts: Path, given: Given, tables: Path, tmp_path: Path) -> None:
    expert = Path(shutil.copytree(berts / "two", tmp_path / "two"))
    tensors = load_file(expert / "model.safetensors")
    del tensors["classifier.bias"]
    save_file(tensors, expert / "model.safetensors", metadata={"format": "pt"})
    out = orthomerge.merge(Recipe({"two": str(expert)}, base=str(berts / "base")), out=tmp_path / "out").out
    options = {**given, "experts": {"two": expert}, "data": {"two": tables / "two.csv"}}
    for aligner in ("ridge", "affine", "orthogonal"):
        orthomerge.align(out, to=tmp_path / aligner, **{**options, "aligner": aligner})
        assert list(load_head(tmp_path / aligner / "heads/two").tensors()) == ["weight"]
        assert len(contents(tmp_path / aligner)["heads/two/head.safetensors"]) == len(
            contents(out)["heads/two/head.safetensors"]
        )


def test_experts_that_are_no_folders(merged: Path, berts: Path, given: Given, tmp_path: Path) -> None:
    """A bare state dict needs the base, which says what kind of model it is; the result is the folder's."""
    torch.save(load_file(berts / "two" / "model.safetensors"), tmp_path / "two.pth")
    bare = {**given, "experts": {"two": tmp_path / "two.pth"}, "data": {"two": given["data"]["two"]}}
    with pytest.raises(RecipeError, match=r"the expert of 'two' \(.*two.pth\) is not a whole model"):
        orthomerge.align(merged, to=tmp_path / "to", **bare)
    result = orthomerge.align(merged, to=tmp_path / "to", base=berts / "base", **bare)
    assert any("is not, byte for byte, the one that was merged" in note for note in result.manifest["notes"])
    orthomerge.align(merged, to=tmp_path / "whole", **{**bare, "experts": {"two": berts / "two"}})
    one, other = (load_head(tmp_path / name / "heads/two").output.weight for name in ("to", "whole"))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# Classifiers that are more than a head


@pytest.fixture(scope="module")
def operated(merged: Path, berts: Path, tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`two` behind a surgery module; the others as they were."""
    to = tmp_path_factory.mktemp("operated") / "to"
    options: Given = {"aligner": "surgery", "options": {"rank": 3, "steps": 30}, "device": "cpu"}
    experts: Any = {"two": berts / "two"}
    orthomerge.align(merged, data={"two": tables / "two.csv"}, experts=experts, to=to, **options)
    return to


def test_what_is_added_is_counted_kept_and_loaded(operated: Path, merged: Path, tables: Path) -> None:
    found = read_manifest(operated)["alignment"]["tasks"]["two"]
    size = (operated / "heads/two/extra.safetensors").stat().st_size
    assert found["extra"] == {"parameters": 2 * 3 * 32, "bytes": size}
    assert found["facts"]["loss"] < found["facts"]["loss_before"]
    card = (operated / "README.md").read_text()
    assert "adds 192 parameters" in card
    assert "export PATH --task three" in card  # `two` has no place in a stock model
    classifier = load(operated).head("two")
    assert isinstance(classifier, SurgeryHead)
    batch = load_processor(merged / "encoder", modality="text")(read_task(tables / "two.csv")["test"].inputs)
    model, head = load(merged), load_head(merged / "heads/two")
    with torch.no_grad():
        f = model.features(batch)
        by_hand = head(f - (f @ classifier.down.T).relu() @ classifier.up.T)
        assert torch.equal(load(operated).logits("two", batch), by_hand)
        assert not torch.equal(by_hand, head(f))
    assert contents(operated / "heads/two")["head.safetensors"] == contents(merged / "heads/two")["head.safetensors"]


def test_extras_are_verified_and_not_exported(operated: Path, tmp_path: Path) -> None:
    assert orthomerge.verify(operated) == []
    out = Path(shutil.copytree(operated, tmp_path / "out"))
    message = "a head behind a module of 'surgery', for which transformers has no place; use orthomerge.load"
    with pytest.raises(RecipeError, match=message):
        orthomerge.export(out, "two", tmp_path / "to")
    orthomerge.export(out, "three", tmp_path / "to")
    with pytest.raises(RecipeError, match=r"is a head behind a module of 'surgery', not a head"):
        load_head(out / "heads/two")
    (out / "heads/two/extra.safetensors").write_bytes(b"x" * 10)
    assert [problem.split()[0] for problem in orthomerge.verify(out)] == ["heads/two/extra.safetensors"]


LABELS = '{"labels": ["a", "b"], "activation": null, "normalise": false%s}'


@pytest.mark.parametrize(
    ("about", "tensors", "message"),
    [
        (', "extra": 3', {}, "'extra' must be the name of an aligner, got 3"),
        (', "extra": "surgerry"', {"x": torch.ones(1)}, r"'surgerry', which this version does not know \(did you mean"),
        (', "extra": "ridge"', {"x": torch.ones(1)}, "the aligner 'ridge', which this version does not know"),
        (', "extra": "surgery"', {}, "cannot open"),
        (', "extra": "surgery"', {"down": torch.ones(1, 4)}, "must hold 'down' and 'up'"),
        (', "extra": "surgery"', {"down": torch.ones(2, 4), "up": torch.ones(4, 3)}, r"got \(2, 4\) and \(4, 3\)"),
        (
            ', "extra": "surgery"',
            {"down": torch.ones(2, 4).long(), "up": torch.ones(4, 2)},
            "'down' must be in floating",
        ),
        ("", {"down": torch.ones(2, 4), "up": torch.ones(4, 2)}, "belongs to no aligner that labels.json names"),
    ],
)
def test_a_damaged_extra_is_an_error(about: str, tensors: Any, message: str, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 4)}, tmp_path / "head.safetensors")
    (tmp_path / "labels.json").write_text(LABELS % about)
    if tensors:
        save_file(tensors, tmp_path / "extra.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_classifier(tmp_path)


def test_both_kinds_of_extras_come_back(tmp_path: Path) -> None:
    head = Head(Linear(torch.ones(2, 4)), ("a", "b"))
    for kind in ("surgery", "probsurgery"):
        made = rebuilt(kind, head, {"down": torch.ones(2, 4), "up": torch.ones(4, 2)}, where=tmp_path)
        assert (made.kind, made.labels) == (kind, ("a", "b"))
