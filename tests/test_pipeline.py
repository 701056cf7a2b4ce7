"""From checkpoints to a folder and back: merged, loaded, exported, verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import orthomerge
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.errors import IncompatibleError, OutputError, RecipeError
from orthomerge.merging.methods import METHODS
from orthomerge.models.load import quiet
from orthomerge.recipe import Expert, HeadNames, Recipe

QUICK: dict[str, dict[str, Any]] = {"wudi": {"steps": 5}}


def recipe(berts: Path, *names: str, **more: Any) -> Recipe:
    chosen = names or ("two", "three", "five")
    return Recipe(experts={name: str(berts / name) for name in chosen}, base=str(berts / "base"), **more)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def stock_logits(folder: Path) -> torch.Tensor:
    with quiet():
        from transformers import AutoModelForSequenceClassification

        model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**batch()).logits
    return logits


@pytest.mark.parametrize("method", METHODS)
def test_every_method_merges_heads_of_two_three_and_five_classes(method: str, berts: Path, tmp_path: Path) -> None:
    chosen = ("two", "five") if method == "slerp" else ("two", "three", "five")
    orthomerge.merge(recipe(berts, *chosen, method=method, parameters=QUICK.get(method, {})), out=tmp_path / "out")
    model = orthomerge.load(tmp_path / "out")
    assert orthomerge.verify(tmp_path / "out") == []
    for task in chosen:
        orthomerge.export(tmp_path / "out", task, tmp_path / task)
        with torch.no_grad():
            ours = model.logits(task, batch())
        torch.testing.assert_close(ours, stock_logits(tmp_path / task), rtol=0, atol=1e-5)
        assert ours.shape == (4, {"two": 2, "three": 3, "five": 5}[task])


def test_average_is_the_mean_of_the_experts(berts: Path, tmp_path: Path) -> None:
    orthomerge.merge(recipe(berts, method="average"), out=tmp_path / "out")
    encoder = open_checkpoint(tmp_path / "out" / "encoder")
    experts = [open_checkpoint(berts / name) for name in ("two", "three", "five")]
    for key in encoder:
        mean = sum(expert[f"bert.{key}"] for expert in experts) / 3
        torch.testing.assert_close(encoder[key], mean, rtol=1e-5, atol=1e-6)


def test_one_expert_keeps_its_logits(berts: Path, tmp_path: Path) -> None:
    orthomerge.merge(recipe(berts, "three", method="average"), out=tmp_path / "out")
    with torch.no_grad():
        ours = orthomerge.load(tmp_path / "out").logits("three", batch())
    torch.testing.assert_close(ours, stock_logits(berts / "three"), rtol=0, atol=1e-5)


def test_a_pipeline_of_transformers_runs_on_an_export(berts: Path, tmp_path: Path) -> None:
    orthomerge.merge(recipe(berts, method="ties"), out=tmp_path / "out")
    orthomerge.export(tmp_path / "out", "five", tmp_path / "five")
    with quiet():
        from transformers import AutoTokenizer, pipeline

        texts = ["a very good film", "it was not good"]
        found = pipeline("text-classification", model=str(tmp_path / "five"), top_k=None)(texts)
        inputs = AutoTokenizer.from_pretrained(tmp_path / "out" / "encoder")(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        probabilities = orthomerge.load(tmp_path / "out").logits("five", dict(inputs)).softmax(-1)
    for row, scores in zip(probabilities, found, strict=True):
        ours = {f"five-{number}": float(value) for number, value in enumerate(row)}
        assert {entry["label"]: entry["score"] for entry in scores} == pytest.approx(ours, abs=1e-5)


def test_two_runs_write_the_same_bytes(berts: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        orthomerge.merge(recipe(berts, method="dare_ties", max_shard_size="20KB"), out=tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len([file for file in files if file.suffix == ".safetensors"]) > 4
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "BF16"), ("float16", "F16"), ("float64", "F64")])
def test_the_output_has_the_dtype_asked_for(dtype: Any, name: str, berts: Path, tmp_path: Path) -> None:
    orthomerge.merge(recipe(berts, method="average", dtype=dtype), out=tmp_path / "out")
    encoder = open_checkpoint(tmp_path / "out" / "encoder")
    assert {encoder.spec(key).dtype for key in encoder} == {name}
    assert json.loads((tmp_path / "out/encoder/config.json").read_text())["dtype"] == dtype
    orthomerge.export(tmp_path / "out", "two", tmp_path / "two")
    assert orthomerge.load(tmp_path / "out").encoder.dtype == getattr(torch, dtype)


def test_negation_and_analogy_are_one_line(berts: Path, tmp_path: Path) -> None:
    line = "three + (two - five)"
    given = recipe(berts, method="task_arithmetic", parameters={"scale": 1.0}, vector=line)
    orthomerge.merge(given, out=tmp_path / "out")
    merged, base = open_checkpoint(tmp_path / "out" / "encoder"), open_checkpoint(berts / "base")
    deltas = {
        name: {key: open_checkpoint(berts / name)[f"bert.{key}"] - base[key] for key in base}
        for name in ("two", "three", "five")
    }
    for key in base:
        expected = base[key] + deltas["three"][key] + deltas["two"][key] - deltas["five"][key]
        torch.testing.assert_close(merged[key], expected, rtol=1e-5, atol=1e-6)

    vectors = orthomerge.task_vectors(orthomerge.make_plan(recipe(berts)).check()).vectors
    analogy = vectors["three"] + (vectors["two"] - vectors["five"])
    key = "encoder.layer.0.output.dense.weight"
    torch.testing.assert_close(base[key] + analogy[key], merged[key], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((-0.5 * vectors["two"])[key], -0.5 * deltas["two"][key])
    total = sum(vectors.values())
    assert isinstance(total, orthomerge.TaskVector)
    assert torch.equal(total[key], (vectors["two"] + vectors["three"] + vectors["five"])[key])


def test_the_manifest_tells_everything_and_no_path_of_this_machine(berts: Path, tmp_path: Path) -> None:
    result = orthomerge.merge(recipe(berts, method="dare", seed=7), out=tmp_path / "out")
    text = (tmp_path / "out/orthomerge.json").read_text()
    manifest = json.loads(text)
    assert manifest == json.loads(json.dumps(result.manifest))
    assert manifest["method"] == {"name": "dare", "parameters": {"drop": 0.5, "scale": 0.3, "seed": 7}}
    assert set(manifest["inputs"]["experts"]) == {"two", "three", "five"}
    assert all(file["hash"].startswith("blake3:") for file in manifest["inputs"]["base"]["files"])
    assert str(berts) not in text
    assert str(berts) not in (tmp_path / "out/README.md").read_text()
    assert (tmp_path / "out/encoder/vocab.txt").exists()


def test_verify_finds_what_changed(berts: Path, tmp_path: Path) -> None:
    orthomerge.merge(recipe(berts, method="average"), out=tmp_path / "out")
    weights = tmp_path / "out/encoder/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (tmp_path / "out/heads/two/labels.json").unlink()
    (tmp_path / "out/encoder/extra.bin").write_bytes(b"x")
    assert orthomerge.verify(tmp_path / "out") == [
        "encoder/model.safetensors has changed since it was written",
        "heads/two/labels.json is missing",
        "encoder/extra.bin was not written by the merge",
    ]


def test_a_state_dict_with_other_names_is_resolved_against_the_base(berts: Path, tmp_path: Path) -> None:
    expert = open_checkpoint(berts / "two")
    wrapped = {f"module.{key}": expert[key] for key in expert}
    torch.save({"epoch": 3, "state_dict": wrapped}, tmp_path / "two.pth")
    for path in (berts / "two", tmp_path / "two.pth"):
        given = Recipe(experts={"two": str(path)}, base=str(berts / "base"), method="average")
        orthomerge.merge(given, out=tmp_path / path.name.replace(".", ""))
    one = open_checkpoint(tmp_path / "two" / "encoder")
    other = open_checkpoint(tmp_path / "twopth" / "encoder")
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_module_of_ones_own_merges_by_its_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    base = {f"backbone.{key}": value for key, value in encoder.state_dict().items()}
    torch.save(base, tmp_path / "base.pt")
    heads = {"x": 2, "y": 3}
    for name, classes in heads.items():
        tuned = {key: value + 0.01 * torch.randn_like(value) for key, value in base.items()}
        torch.save(
            tuned | {"fc.weight": torch.randn(classes, 4), "fc.bias": torch.randn(classes)}, tmp_path / f"{name}.pt"
        )
    experts: dict[str, Expert | str] = {
        name: Expert(str(tmp_path / f"{name}.pt"), head=HeadNames(layers=("fc",))) for name in heads
    }
    given = Recipe(experts=experts, base=str(tmp_path / "base.pt"), method="average", encoder_prefix="backbone")
    orthomerge.merge(given, out=tmp_path / "out")
    with pytest.raises(RecipeError, match="module of your own"):
        orthomerge.load(tmp_path / "out")
    model = orthomerge.load(tmp_path / "out", encoder=encoder)
    assert model.logits("y", {"input": torch.randn(7, 6)}).shape == (7, 3)
    with pytest.raises(RecipeError, match="no classifier that computes"):
        orthomerge.export(tmp_path / "out", "x", tmp_path / "x")


def test_an_output_is_replaced_only_when_asked(berts: Path, tmp_path: Path) -> None:
    given = recipe(berts, "two", method="average")
    orthomerge.merge(given, out=tmp_path / "out")
    with pytest.raises(OutputError, match="exists already; give --force"):
        orthomerge.merge(given, out=tmp_path / "out")
    orthomerge.merge(recipe(berts, "three", method="average"), out=tmp_path / "out", force=True)
    assert sorted(path.name for path in (tmp_path / "out/heads").iterdir()) == ["three"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_stranger_is_not_merged(berts: Path, tmp_path: Path) -> None:
    with quiet():
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(**json.loads((berts / "base/config.json").read_text()) | {"num_labels": 4})
        torch.manual_seed(99)
        BertForSequenceClassification(config).save_pretrained(tmp_path / "stranger")
    given = Recipe(experts={"s": str(tmp_path / "stranger")}, base=str(berts / "base"), method="average")
    with pytest.raises(IncompatibleError, match=r"expert 's' .* was not fine-tuned from the base .* cosine"):
        orthomerge.merge(given, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_out_there_is_nowhere_to_write(berts: Path) -> None:
    with pytest.raises(RecipeError, match="where to"):
        orthomerge.merge(recipe(berts))
