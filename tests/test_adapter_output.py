"""Experts that are adapters, end to end: as one adapter that peft loads, aligned, fitted, and what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.aligning import HEADS, write_tables

import orthomerge
from orthomerge.aligning import align
from orthomerge.checkpoints.lora import read_adapter
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.cli.app import app
from orthomerge.errors import CheckpointError, IncompatibleError, NumericalError, OutputError, RecipeError
from orthomerge.manifest import read_manifest
from orthomerge.merged import export, load, verify
from orthomerge.models.load import quiet
from orthomerge.planning import make_plan
from orthomerge.recipe import Align, Expert, Fit, Recipe

BATCH = {"input_ids": torch.randint(5, 90, (6, 9), generator=torch.Generator().manual_seed(7))}
ATTENTION = ["query", "value"]
# Each expert in its own way: rank, scale and layers differ.
OPTIONS: dict[str, dict[str, Any]] = {
    "two": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION},
    "three": {"r": 2, "lora_alpha": 5, "target_modules": ["query", "key"], "use_rslora": True},
    "five": {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["value"],
        "rank_pattern": {"layer.1.attention.self.value": 4},
        "alpha_pattern": {"layer.0.attention.self.value": 3},
    },
}
SUM = 3 + 2 + 4  # no layer needs more


def classifier(base: Path, labels: int) -> Any:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(base, num_labels=labels)


def save_adapter(base: Path, folder: Path, labels: int, *, merged: Path | None = None, **options: Any) -> None:
    """An adapter with random factors and head; and, if asked for, the full model that it makes."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(labels)
        adapted: Any = get_peft_model(
            classifier(base, labels), LoraConfig(**{"modules_to_save": ["classifier"], **options})
        )
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.data = (0.05 if "lora" in name else 0.3) * torch.randn(parameter.shape)
        adapted.save_pretrained(str(folder), save_embedding_layers=False)
        if merged is not None:
            adapted.merge_and_unload().save_pretrained(merged)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "adapter-cache"))


@pytest.fixture(scope="module")
def folder(berts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TASK: adapters; TASK-full: the models that they make; TASK.csv: inputs."""
    place = tmp_path_factory.mktemp("adapters")
    for task, labels in HEADS.items():
        save_adapter(berts / "base", place / task, labels, merged=place / f"{task}-full", **OPTIONS[task])
    return write_tables(place)


@pytest.fixture
def recipe(berts: Path, folder: Path) -> Recipe:
    experts: dict[str, Expert | str] = {
        task: Expert(str(folder / task), labels=tuple(f"{task}-{number}" for number in range(labels)))
        for task, labels in HEADS.items()
    }
    return Recipe(experts, base=str(berts / "base"), method="task_arithmetic", parameters={"scale": 0.7})


def full(recipe: Recipe) -> Recipe:
    """The same experts as full models."""
    return replace(
        recipe, experts={task: replace(given, path=f"{given.path}-full") for task, given in recipe.tasks.items()}
    )


def logits(out: Path, task: str) -> torch.Tensor:
    with torch.no_grad():
        return load(out).logits(task, BATCH)


def with_peft(base: Path, out: Path, task: str) -> torch.Tensor:
    """As a user of peft: the stock classifier, the adapter on it, the head of the task in its place."""
    with quiet():
        from peft import PeftModel

        model = classifier(base, HEADS[task])
        head = load_file(out / "heads" / task / "head.safetensors")
        model.classifier.load_state_dict({"weight": head["weight"], "bias": head["bias"]})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # peft warns of missing keys
            adapted = PeftModel.from_pretrained(model, str(out / "adapter")).eval()
    with torch.no_grad():
        found: torch.Tensor = adapted(**BATCH).logits
    return found


@pytest.mark.parametrize(
    ("method", "parameters", "rank"),
    [
        ("task_arithmetic", {"scale": 0.7}, SUM),
        ("average", {}, SUM),
        ("knots", {"merger": "ties", "density": 0.5}, SUM),
        ("ties", {"density": 0.1}, 32),
        ("tsv_m", {}, 32),
    ],
)
def test_one_adapter_is_the_merged_model(
    method: str, parameters: dict[str, Any], rank: int, recipe: Recipe, berts: Path, tmp_path: Path
) -> None:
    recipe = replace(recipe, method=method, parameters=parameters)
    orthomerge.merge(recipe, out=tmp_path / "model")
    result = orthomerge.merge(replace(recipe, adapter_rank=rank), out=tmp_path / "out")
    assert verify(tmp_path / "out") == []
    assert max(result.manifest["adapter"]["error"].values()) < 1e-6
    for task in HEADS:
        expected = logits(tmp_path / "model", task)
        torch.testing.assert_close(with_peft(berts / "base", tmp_path / "out", task), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits(tmp_path / "out", task), expected, rtol=1e-4, atol=1e-5)


def test_what_is_written(recipe: Recipe, berts: Path, tmp_path: Path) -> None:
    result = orthomerge.merge(replace(recipe, adapter_rank=5), out=tmp_path / "out")
    out = tmp_path / "out"
    config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (5, 5, None)
    assert config["base_model_name_or_path"] == str(berts / "base")
    modules = [f"bert.encoder.layer.{n}.attention.self.{name}" for n in (0, 1) for name in ("key", "query", "value")]
    assert config["target_modules"] == modules
    tensors = load_file(out / "adapter/adapter_model.safetensors")
    assert len(tensors) == 2 * len(modules)
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(5, 32), (32, 5)}
    adapter = read_adapter(out / "adapter")
    assert {name.removesuffix(".weight") for name in adapter.factors} == set(modules)
    manifest = read_manifest(out, adapter=True)
    assert manifest == json.loads(json.dumps(result.manifest))
    # One expert has the key, with rank 2; two have the others, with rank 5 or more.
    error = manifest["adapter"]["error"]
    assert error[modules[0]] < 1e-6
    assert 0 < error["bert.encoder.layer.1.attention.self.value"] < 1
    assert not (out / "encoder").exists()
    assert "PeftModel.from_pretrained" in (out / "README.md").read_text()
    again = orthomerge.merge(replace(recipe, adapter_rank=5), out=tmp_path / "again")
    assert again.manifest["files"] == result.manifest["files"]
    half = orthomerge.merge(replace(recipe, adapter_rank=SUM, dtype="bfloat16"), out=tmp_path / "half")
    assert 1e-4 < max(half.manifest["adapter"]["error"].values()) < 1e-2


def test_from_the_command_line(recipe: Recipe, folder: Path, berts: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    experts = [word for task in HEADS for word in ("--expert", f"{task}={folder / task}")]
    command = ["merge", "--base", str(berts / "base"), *experts, "--method", "knots", "--set", "merger=ties"]
    settings = ["--set", "density=0.3", "--set", "adapter_rank=9", "--out", str(tmp_path / "out"), "--quiet"]
    done = CliRunner().invoke(app, [*command, *settings])
    assert done.exit_code == 0, done.output
    assert read_manifest(tmp_path / "out", adapter=True)["method"]["parameters"]["merger"] == "ties"
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "out")]).exit_code == 0


def test_written_whole_or_not_at_all(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = replace(recipe, adapter_rank=4)
    orthomerge.merge(recipe, out=tmp_path / "out")
    with pytest.raises(OutputError, match="exists already"):
        orthomerge.merge(recipe, out=tmp_path / "out")
    orthomerge.merge(recipe, out=tmp_path / "out", force=True)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orthomerge.adapter_output.write_classifier", fail)
    with pytest.raises(OutputError, match="nothing was left behind"):
        orthomerge.merge(recipe, out=tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert verify(tmp_path / "out") == []
    (tmp_path / "out/adapter/adapter_model.safetensors").write_bytes(b"")
    (problem,) = verify(tmp_path / "out")
    assert problem.startswith("adapter/adapter_model.safetensors has 0 bytes")


def test_vision(tmp_path: Path) -> None:
    """Modules of a ViT have other names than the tensors that transformers saves; peft wants those of the modules."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import LoraConfig, PeftModel, get_peft_model
        from transformers import ViTConfig, ViTForImageClassification, ViTModel

        sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = ViTConfig(**sizes, intermediate_size=24, image_size=8, patch_size=4, num_labels=3)
        ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "base")
        for seed, task in enumerate(("a", "b")):
            torch.manual_seed(seed)
            model = ViTForImageClassification.from_pretrained(tmp_path / "base", num_labels=3)
            lora = LoraConfig(r=2, target_modules=["q_proj", "fc1"], modules_to_save=["classifier"])
            adapted: Any = get_peft_model(model, lora)
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.data = 0.1 * torch.randn(parameter.shape)
            adapted.save_pretrained(str(tmp_path / task))
        experts: dict[str, Expert | str] = {task: str(tmp_path / task) for task in ("a", "b")}
        recipe = Recipe(experts, base=str(tmp_path / "base"), method="knots", parameters={"density": 0.5})
        orthomerge.merge(recipe, out=tmp_path / "model")
        orthomerge.merge(replace(recipe, adapter_rank=4), out=tmp_path / "out")
        stock: Any = ViTForImageClassification.from_pretrained(tmp_path / "base", num_labels=3)
        put: Any = PeftModel.from_pretrained(stock, str(tmp_path / "out/adapter")).eval()
    pixels = {"pixel_values": torch.randn(3, 3, 8, 8)}
    with torch.no_grad():
        expected = load(tmp_path / "model").features(pixels)
        states = put.base_model.model.vit(**pixels).last_hidden_state[:, 0]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(load(tmp_path / "out").features(pixels), expected, rtol=1e-4, atol=1e-5)

    tensors = load_file(tmp_path / "b/adapter_model.safetensors")
    old = {
        key.replace("vit.layers.", "vit.encoder.layer.").replace(
            ".attention.q_proj.", ".attention.attention.query."
        ): each
        for key, each in tensors.items()
    }
    save_file(old, tmp_path / "b/adapter_model.safetensors")
    orthomerge.merge(recipe, out=tmp_path / "same")
    with pytest.raises(IncompatibleError, match=r"two experts know .* made by different versions of transformers"):
        orthomerge.merge(replace(recipe, adapter_rank=4), out=tmp_path / "other")


def test_adapters_of_an_encoder_and_of_a_classifier(recipe: Recipe, berts: Path, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "two/adapter_model.safetensors")
    shutil.copytree(folder / "two", tmp_path / "bare")
    bare = {key.replace(".bert.", "."): tensor for key, tensor in tensors.items()}
    save_file(bare, tmp_path / "bare/adapter_model.safetensors")
    given = replace(recipe, experts={**recipe.experts, "two": str(tmp_path / "bare")})
    with pytest.raises(IncompatibleError, match=r"keep the encoder in different places \('', 'bert\.'\)"):
        make_plan(replace(given, adapter_rank=4)).check()
    orthomerge.merge(given, out=tmp_path / "out")


def test_what_lies_beside_an_adapter_is_believed(berts: Path, folder: Path, tmp_path: Path) -> None:
    """`orthomerge finetune --mode lora` writes the classifier's config too: labels, and how features are read."""
    shutil.copytree(folder / "two", tmp_path / "two")
    config = {"id2label": {"0": "no", "1": "yes"}, "orthomerge": {"pooling": "mean"}}
    (tmp_path / "two/config.json").write_text(json.dumps(config))
    recipe = Recipe({"two": str(tmp_path / "two")}, base=str(berts / "base"), method="average")
    job = make_plan(recipe).check()
    assert (job.experts["two"].labels, job.pooling) == (("no", "yes"), "mean")
    (tmp_path / "two/config.json").unlink()
    job = make_plan(recipe).check()
    assert (job.experts["two"].labels, job.pooling) == (("LABEL_0", "LABEL_1"), "pooler")


def test_numbers_that_are_none(recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "two/adapter_model.safetensors")
    shutil.copytree(folder / "two", tmp_path / "bad")
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][3, 1] = float("nan")
    save_file(tensors, tmp_path / "bad/adapter_model.safetensors")
    given = replace(recipe, experts={**recipe.experts, "two": str(tmp_path / "bad")}, adapter_rank=4)
    with pytest.raises(NumericalError, match="holds NaN or infinity"):
        orthomerge.merge(given, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_knots_of_adapters_and_of_the_models_that_they_make(recipe: Recipe, tmp_path: Path) -> None:
    recipe = replace(recipe, method="knots", parameters={"merger": "task_arithmetic", "scale": 0.7})
    plain = replace(recipe, method="task_arithmetic", parameters={"scale": 0.7})
    for name, given in {"thin": recipe, "dense": full(recipe), "plain": plain}.items():
        orthomerge.merge(given, out=tmp_path / name)
    thin, dense, expected = (open_checkpoint(tmp_path / name / "encoder") for name in ("thin", "dense", "plain"))
    for key in expected:
        torch.testing.assert_close(thin[key], expected[key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dense[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["ties", "dare", "knots"])
def test_aligned_as_full_experts_are(method: str, recipe: Recipe, folder: Path, tmp_path: Path) -> None:
    data = {task: str(folder / f"{task}.csv") for task in HEADS}
    given = replace(recipe, method=method, parameters={}, align=Align(data, "ridge"))
    if method == "knots":  # element by element, noise of rounding in the full models would count in the trim
        given = replace(given, parameters={"merger": "task_arithmetic"})
    for name, one in {"thin": given, "full": full(given)}.items():
        manifest = orthomerge.merge(one, out=tmp_path / name).manifest
        assert manifest["alignment"]["aligner"] == "ridge"
    for task in HEADS:
        ours, theirs = (logits(tmp_path / name, task) for name in ("thin", "full"))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("method", "options"),
    [("realign", {"steps": 4, "look": 2, "batch": 4}), ("moma", {"steps": 4, "look": 2, "batch": 4}), ("regmean", {})],
)
def test_fitted_as_full_experts_are(
    method: str, options: dict[str, Any], recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    fit = Fit({task: str(folder / f"{task}.csv") for task in HEADS}, device="cpu", limit=24)
    given = replace(recipe, method=method, parameters=options, fit=fit)
    for name, one in {"thin": given, "full": full(given)}.items():
        orthomerge.merge(one, out=tmp_path / name)
    for task in HEADS:
        ours, theirs = (logits(tmp_path / name, task) for name in ("thin", "full"))
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


REFUSED: dict[str, tuple[Callable[[Recipe, Path, Path], Recipe], str]] = {
    "a full model": (
        lambda recipe, berts, folder: replace(recipe, experts={"two": str(folder / "two-full")}),
        r"it is a full model, and only adapters merge into an adapter; leave 'adapter_rank' out",
    ),
    "biases": (
        lambda recipe, berts, folder: _with(recipe, berts, folder, bias="lora_only", target_modules=ATTENTION),
        r"it stores 'bert\.encoder\.layer\.0\.attention\.self\.query\.bias', .* of the encoder whole",
    ),
    "an embedding": (
        lambda recipe, berts, folder: _with(recipe, berts, folder, target_modules=["word_embeddings"]),
        r"it adapts 'bert\.embeddings\.word_embeddings\.weight', which is no linear layer",
    ),
}


def _with(recipe: Recipe, berts: Path, folder: Path, **options: Any) -> Recipe:
    place = folder / f"odd-{len(list(folder.iterdir()))}"
    save_adapter(berts / "base", place, 2, **options)
    return replace(recipe, experts={"two": str(place)})


@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_make_no_adapter(case: str, recipe: Recipe, berts: Path, folder: Path, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    given = change(replace(recipe, adapter_rank=4), berts, folder)
    with pytest.raises(IncompatibleError, match=message):
        make_plan(given).check()
    with pytest.raises(IncompatibleError, match=message):
        orthomerge.merge(given, out=tmp_path / "out")
    if case != "a full model":
        orthomerge.merge(replace(given, adapter_rank=None), out=tmp_path / "out")


def test_recipes_that_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'adapter_rank' must be at least 1, got 0"):
        replace(recipe, adapter_rank=0)
    with pytest.raises(RecipeError, match="'align' needs a whole encoder; leave 'adapter_rank' out"):
        replace(recipe, adapter_rank=4, align=Align({"two": "x.csv"}))
    with pytest.raises(RecipeError, match="'fit' needs a whole encoder"):
        replace(recipe, adapter_rank=4, fit=Fit({"two": "x.csv"}), method="realign", parameters={})
    orthomerge.merge(replace(recipe, adapter_rank=4), out=tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds an adapter and no encoder"):
        export(tmp_path / "out", "two", tmp_path / "exported")
    with pytest.raises(CheckpointError, match="holds an adapter and no encoder"):
        align(tmp_path / "out", data={"two": "x.csv"}, experts={"two": "x"}, to=tmp_path / "aligned")


def test_an_adapter_that_its_base_does_not_know(recipe: Recipe, tmp_path: Path) -> None:
    orthomerge.merge(replace(recipe, adapter_rank=4), out=tmp_path / "out")
    path = tmp_path / "out/adapter/adapter_config.json"
    config = json.loads(path.read_text())
    with quiet():
        from transformers import BertConfig, BertModel

        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        BertModel(BertConfig(**small, vocab_size=99)).save_pretrained(tmp_path / "small")
    path.write_text(json.dumps({**config, "base_model_name_or_path": str(tmp_path / "small")}))
    with pytest.raises(IncompatibleError, match="which its base does not have"):
        load(tmp_path / "out")
