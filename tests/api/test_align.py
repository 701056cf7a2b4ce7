"""Aligned heads: no larger, equal to what was fitted, the same for the same inputs, and on the very same encoder."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.berts import COUNTS, HEADS, contents, merge_berts
from tests.models.making import build, nudged, stock, write_tokenizer

import orthomerge as om
from orthomerge.alignment.aligners import Alignment
from orthomerge.alignment.linear_maps import Ridge
from orthomerge.alignment.problem import Problem
from orthomerge.alignment.rigid import choose_rigid
from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.data.reading import read_task, unlabelled_tasks
from orthomerge.data.task import Examples, Modality, Task
from orthomerge.files.folders import LOCAL
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.experts import reopen_experts
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Head, Linear, SurgeryHead, head_of, rebuilt
from orthomerge.models.manifest import read_manifest
from orthomerge.models.saved import verify_folder
from orthomerge.models.skeleton import quiet
from orthomerge.runs.models import plan, write
from orthomerge.runs.recipe import Recipe
from orthomerge.runs.sections import Align

TASKS = ("two", "three")
CHEAP = {"steps": 5, "epochs": 2}


@pytest.fixture(scope="module")
def data(tables: Path) -> dict[str, Any]:
    """Inputs of two of the three tasks."""
    return {task: tables / f"{task}.csv" for task in TASKS}


@pytest.fixture(scope="module")
def merged(berts: Path) -> om.Model:
    experts = {name: berts / name for name in HEADS}
    return om.merge(experts, "task_arithmetic", base=berts / "base", scale=0.5)


def parts(model: om.Model, task: str) -> dict[str, torch.Tensor]:
    return head_of(model.heads[task]).tensors()


def same_heads(one: om.Model, other: om.Model) -> bool:
    return one.tasks == other.tasks and all(
        torch.equal(tensor, parts(other, task)[name]) for task in one.tasks for name, tensor in parts(one, task).items()
    )


def facts(model: om.Model) -> Any:
    return model.origin.facts["alignment"]


def test_from_a_folder_as_from_memory(merged: om.Model, data: dict[str, Any], tmp_path: Path) -> None:
    """A folder says itself where its experts are; what is written is what was fitted."""
    merged.save(tmp_path / "out")
    aligned = om.align(tmp_path / "out", data, aligner="ridge", limit=40, seed=3)
    assert same_heads(aligned, om.align(merged, data, aligner="ridge", limit=40, seed=3))
    aligned.save(tmp_path / "to")
    loaded = om.load(tmp_path / "to")
    assert same_heads(loaded, aligned)
    assert verify_folder(tmp_path / "to") == []
    before, after = contents(tmp_path / "out"), contents(tmp_path / "to")
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {*(f"{task}/head.safetensors" for task in TASKS), "README.md", "orthomerge.json", LOCAL}
    assert all(len(before[name]) == len(after[name]) for name in changed if name.endswith(".safetensors"))
    assert "aligned by `ridge`" in after["README.md"].decode()
    about = facts(loaded)
    shown = {key: about[key] for key in ("aligner", "options", "seed", "split", "limit", "access")}
    expected = {"aligner": "ridge", "options": {"strength": "auto"}, "seed": 3, "split": "train", "limit": 40}
    assert shown == {**expected, "access": "inductive"}
    assert list(about["tasks"]) == list(TASKS)
    for task, found in about["tasks"].items():
        chosen = unlabelled_tasks({task: data[task]}, merged.labels, "text", split="train", limit=40, seed=3)
        used = chosen[task]["train"]
        assert (found["inputs"], found["data"]) == (40, f"sha256:{used.digest()}")
        assert len(loaded.origin.inputs[task]) == 40
    assert loaded.origin.facts["notes"][-1].startswith("no data of 'five' was given to align it with")
    with pytest.raises(RecipeError, match="this model has been aligned already, by 'ridge'"):
        om.align(loaded, data)


def test_infinity_is_a_word_in_the_manifest(merged: om.Model, data: dict[str, Any], tmp_path: Path) -> None:
    aligned = om.align(merged, data, aligner="ridge", options={"strength": float("inf")})
    assert same_heads(aligned, merged)  # an infinite prior changes nothing
    aligned.save(tmp_path / "to")
    manifest = json.loads((tmp_path / "to/orthomerge.json").read_text(), parse_constant=pytest.fail)
    assert manifest["alignment"]["options"] == {"strength": "inf"}
    assert manifest["alignment"]["tasks"]["two"]["facts"] == {"strength": "inf"}


def unfolded_logits(found: Any, head: Head, features: torch.Tensor) -> torch.Tensor:
    """Logits of head(A f + shift) in float64, the map before it was folded into the head."""
    whole = head.to(torch.float64)
    return whole(features.double() @ found.A.T + (0 if found.shift is None else found.shift))


def test_logits_of_the_stock_class_are_those_of_the_unfolded_map(
    merged: om.Model, data: dict[str, Any], berts: Path, tmp_path: Path
) -> None:
    om.align(merged, data, aligner="orthogonal").save(tmp_path / "to")
    for task in TASKS:
        examples = read_task(data[task])["train"]
        batch = merged.processor.processor()(examples.inputs)
        with torch.no_grad():
            theirs = stock(berts / task).bert(**batch).pooler_output
            pair = FeaturePair(encode(merged, examples, task=task), Features(theirs, task, "train"))
            head = head_of(merged.heads[task])
            found = choose_rigid(Problem.of(pair, head), kappa="auto", bias=True)
            assert found.kappa < float("inf")
            test = read_task(data[task])["test"]
            unfolded = unfolded_logits(found, head, encode(merged, test, task=task).values)
            logits = stock(tmp_path / "to" / task)(**merged.processor.processor()(test.inputs)).logits.double()
        assert (logits - unfolded).abs().max() <= 1e-5 * unfolded.abs().max()


def test_an_aligner_gets_no_labels(merged: om.Model, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FeaturePair] = []

    def fit(self: Ridge, pair: FeaturePair, head: Head) -> Alignment:
        seen.append(pair)
        return Alignment(head)

    monkeypatch.setattr(Ridge, "fit", fit)
    om.align(merged, data, aligner="ridge")
    assert [pair.merged.task for pair in seen] == list(TASKS)
    assert all(part.labels is None for pair in seen for part in (pair.merged, pair.expert))
    assert all(len(pair.merged) == COUNTS["train"] for pair in seen)
    assert not torch.equal(seen[0].merged.values, seen[0].expert.values)


def test_the_test_split_must_be_asked_for(merged: om.Model, data: dict[str, Any], tmp_path: Path) -> None:
    aligned = om.align(merged, data, aligner="ridge", split="test")
    assert (aligned.origin.access, merged.origin.access) == ("transductive", "data-free")
    assert facts(aligned)["tasks"]["two"]["inputs"] == COUNTS["test"]
    aligned.save(tmp_path / "to")
    assert om.load(tmp_path / "to").origin.access == "transductive"
    assert "is transductive" in (tmp_path / "to/README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_keep_their_dtype_and_their_parts(
    dtype: torch.dtype, bias: bool, berts: Path, data: dict[str, Any], tmp_path: Path
) -> None:
    expert = Path(shutil.copytree(berts / "two", tmp_path / "two"))
    tensors = load_file(expert / "model.safetensors")
    heads = {key: t.to(dtype) if key.startswith("classifier") else t for key, t in tensors.items()}
    if not bias:
        del heads["classifier.bias"]
    save_file(heads, expert / "model.safetensors", metadata={"format": "pt"})
    model = om.merge({"two": expert}, "task_arithmetic", base=berts / "base", scale=0.5)
    for aligner, options in (("aligned-c", {"epochs": 2}), ("ridge", {}), ("affine", {}), ("orthogonal", {})):
        aligned = om.align(model, {"two": data["two"]}, aligner=aligner, options=options)
        assert {key: (t.dtype, t.shape) for key, t in parts(aligned, "two").items()} == {
            key: (t.dtype, t.shape) for key, t in parts(model, "two").items()
        }
        rounding = facts(aligned)["tasks"]["two"]["facts"].get("rounding")
        assert rounding is None if dtype == torch.float32 else 0 <= rounding < 0.3, rounding


# Other families


@dataclass(frozen=True)
class Ids:
    """A processor for models without tokenizer: inputs are texts of numbers."""

    modality: Modality = "text"
    pad: int = 1

    def __call__(self, inputs: Any) -> dict[str, torch.Tensor]:
        rows = [torch.tensor([int(word) for word in text.split()]) for text in inputs]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
        return {"input_ids": ids, "attention_mask": (ids != self.pad).long()}

    def digest(self) -> str:
        return f"ids {self.pad}"


@pytest.mark.parametrize("name", ["roberta", "electra"])
def test_a_head_with_a_hidden_layer(name: str, tmp_path: Path) -> None:
    base = build(f"{name.title()}ForSequenceClassification", name, 0)
    expert = nudged(base, 1, 0.05)
    model = om.merge({"one": expert}, "task_arithmetic", base=base, scale=0.5)
    random, processor = np.random.default_rng(0), Ids(pad=base.config.pad_token_id)
    texts = [" ".join(map(str, random.integers(5, 50, random.integers(3, 9)))) for _ in range(80)]
    examples = Examples(texts, None, "train")
    task = Task("one", model.labels["one"], "text", {"train": examples})
    how = Encoding(None, "cpu", processor=processor)
    aligned = om.align(model, {"one": task}, aligner="orthogonal", options={"kappa": 0.01}, encoding=how)
    om.export(aligned, tmp_path / "exported", task="one")
    head = head_of(model.heads["one"])
    assert head.hidden is not None
    with torch.no_grad():
        ours = encode(model, examples, task="one", how=how)
        pair = FeaturePair(ours, encode(reopen_experts(model).teacher("one"), examples, task="one", how=how))
        found = choose_rigid(Problem.of(pair, head), kappa=0.01, bias=True)
        unfolded = unfolded_logits(found, head, ours.values)
        logits = stock(tmp_path / "exported")(**processor(texts)).logits.double()
    assert not torch.equal(found.A, torch.eye(len(found.A), dtype=torch.float64))
    assert (logits - unfolded).abs().max() <= 1e-5 * unfolded.abs().max()


@pytest.mark.parametrize("aligner", ["ridge", "orthogonal", "surgery"])
def test_clip_whose_head_normalises_and_is_in_no_checkpoint(tmp_path: Path, aligner: str) -> None:
    base = build("CLIPModel", "clip", 0)
    with quiet():
        import transformers

        base.save_pretrained(tmp_path / "base")
        write_tokenizer(tmp_path / "base")
        tower = transformers.CLIPVisionModel(base.config.vision_config)
        tower.load_state_dict(nudged(base, 1, 0.05).vision_model.state_dict())
        tower.save_pretrained(tmp_path / "pets")
    heads: Any = {"pets": {"classes": ("cat", "dog"), "templates": ("the {}",)}}
    experts = om.open({"pets": tmp_path / "pets"}, base=tmp_path / "base", heads=heads)
    om.merge(experts, "task_arithmetic", scale=0.5).save(tmp_path / "out")
    images = list(np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8))
    examples = Examples(images, None, "train")
    task = Task("pets", ("cat", "dog"), "image", {"train": examples})
    options = {"steps": 5} if aligner == "surgery" else {}
    aligned = om.align(tmp_path / "out", {"pets": task}, aligner=aligner, options=options)
    old = om.load(tmp_path / "out")
    with torch.no_grad():
        features = encode(old, examples, task="pets").values
        if aligner != "surgery":  # however long the features are, only their direction counts, before and after
            torch.testing.assert_close(aligned.head("pets")(features), aligned.head("pets")(3 * features))
        assert not torch.allclose(aligned.head("pets")(features), old.head("pets")(features))
    aligned.save(tmp_path / "to")
    extra = {"extra.safetensors"} if aligner == "surgery" else set()
    assert {path.name for path in (tmp_path / "to/pets").iterdir()} == {"head.safetensors", "labels.json"} | extra


# Classifiers that are more than a head


def test_what_is_added_is_counted_kept_and_loaded(merged: om.Model, data: dict[str, Any], tmp_path: Path) -> None:
    options = {"rank": 3, "steps": 30}
    om.align(merged, {"two": data["two"]}, aligner="surgery", options=options).save(tmp_path / "to")
    loaded = om.load(tmp_path / "to")
    found = facts(loaded)["tasks"]["two"]
    assert found["extra"] == {"parameters": 2 * 3 * 32, "bytes": 4 * 2 * 3 * 32}
    assert found["facts"]["loss"] < found["facts"]["loss_before"]
    assert "adds 192 parameters" in (tmp_path / "to/README.md").read_text()
    classifier = loaded.head("two")
    assert isinstance(classifier, SurgeryHead)
    examples = read_task(data["two"])["test"]
    head = head_of(merged.heads["two"])
    with torch.no_grad():
        f = encode(merged, examples, task="two").values
        by_hand = head(f - (f @ classifier.down.T).relu() @ classifier.up.T)
        assert torch.equal(classifier(f), by_hand)
        module = loaded.module("cpu")(**merged.processor.processor()(examples.inputs))["two"]
        torch.testing.assert_close(module, by_hand, rtol=0, atol=1e-5)
        assert not torch.equal(by_hand, head(f))
    names = contents(tmp_path / "to")
    merged.save(tmp_path / "plain")
    assert names["two/head.safetensors"] == (tmp_path / "plain/two/head.safetensors").read_bytes()
    assert "two/config.json" not in names
    assert "three/config.json" in names
    assert verify_folder(tmp_path / "to") == []
    with pytest.raises(RecipeError, match="a 'surgery' module before the head, which transformers cannot store"):
        om.export(loaded, tmp_path / "stock", task="two")
    (tmp_path / "to/two/extra.safetensors").write_bytes(b"x" * 10)
    assert [problem.split()[0] for problem in verify_folder(tmp_path / "to")] == ["two/extra.safetensors"]


@pytest.mark.parametrize(
    ("kind", "tensors", "message"),
    [
        ("surgerry", {"x": torch.ones(1)}, r"'surgerry', which this version does not have \(did you mean"),
        ("ridge", {"x": torch.ones(1)}, "the aligner 'ridge', which this version does not have"),
        ("surgery", {"down": torch.ones(1, 4)}, "must hold 'down' and 'up'"),
        ("surgery", {"down": torch.ones(2, 4), "up": torch.ones(4, 3)}, r"got \(2, 4\) and \(4, 3\)"),
        ("surgery", {"down": torch.ones(2, 4).long(), "up": torch.ones(4, 2)}, "'down' must be floating-point"),
    ],
)
def test_extras_come_back_unless_they_are_damaged(kind: str, tensors: Any, message: str, tmp_path: Path) -> None:
    head = Head(Linear(torch.ones(2, 4)), ("a", "b"))
    with pytest.raises(CheckpointError, match=message):
        rebuilt(kind, head, tensors, where=tmp_path)
    for sound in ("surgery", "probsurgery"):
        made = rebuilt(sound, head, {"down": torch.ones(2, 4), "up": torch.ones(4, 2)}, where=tmp_path)
        assert (made.kind, made.labels) == (sound, ("a", "b"))


# The section `align` of a recipe


@pytest.fixture
def recipe(berts: Path, tables: Path) -> Recipe:
    return Recipe(
        {name: str(berts / name) for name in HEADS},
        base=str(berts / "base"),
        method="task_arithmetic",
        parameters={"scale": 0.5},
        seed=4,
        align=Align({task: str(tables / f"{task}.csv") for task in ("two", "five")}, "ridge", limit=40),
    )


def test_in_one_go_is_as_in_two(recipe: Recipe, berts: Path, tables: Path, tmp_path: Path) -> None:
    assert read_manifest(write(recipe, out=tmp_path / "one"))["alignment"]["seed"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    merge_berts(berts, tmp_path / "merged", seed=4)
    data = {task: tables / f"{task}.csv" for task in ("two", "five")}
    om.align(tmp_path / "merged", data, aligner="ridge", limit=40, seed=4).save(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert verify_folder(tmp_path / "one") == []


def problems(recipe: Recipe, **changed: Any) -> list[tuple[str, str]]:
    section: dict[str, Any] = {**vars(recipe.align), **changed}
    listed, _ = plan(Recipe(**{**vars(recipe), "align": Align(**section)}))
    return [(problem.where, problem.what) for problem in listed]


def test_a_plan_lists_what_is_wrong_with_the_section(recipe: Recipe) -> None:
    assert problems(recipe) == []
    assert problems(recipe, aligner="rigde", data={"tow": "nowhere.csv", "two": "no/where/x.npz"}) == [
        ("align", "unknown aligner 'rigde'"),
        ("align: data of 'tow'", "there is no such expert"),
        ("align: data of 'tow'", "nowhere.csv does not exist"),
        ("align: data of 'two'", "no/where/x.npz does not exist"),
    ]
    assert problems(recipe, options={"x": 1})[0][1].startswith("aligner ridge: unknown option 'x'")
    assert problems(recipe, data={"two": "~nobody-of-this-name/x.csv"})[0][1].endswith("does not exist")
