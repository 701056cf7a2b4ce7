"""Fitted merges: as large as any other, equal to what was fitted, whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligning import HEADS, contents, stock, write_tables

import orthomerge
from orthomerge.cli.app import app
from orthomerge.errors import IncompatibleError, NumericalError, RecipeError
from orthomerge.fitting.kinds import Fitted, Setting
from orthomerge.fitting.realign import Realign
from orthomerge.manifest import access_class, read_manifest
from orthomerge.merged import load, verify
from orthomerge.merging.methods import FITTED
from orthomerge.recipe import Fit, Recipe

QUICK: dict[str, dict[str, Any]] = {
    "realign": {"steps": 4, "look": 2, "batch": 4},
    "moma": {"steps": 4, "look": 2, "batch": 4},
    "adamerging": {"steps": 4, "look": 2, "batch": 4},
    "concrete_ta": {"steps": 4, "batch": 4},
    "concrete_am": {"steps": 2, "batch": 4},
    "fisher": {"inputs": 8},
    "regmean": {"inputs": 16},
    "regmean_pp": {"inputs": 16},
    "lm_cocktail": {"inputs": 8},
    "model_tailor": {"inputs": 16},
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "fitting-cache"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


@pytest.fixture
def recipe(berts: Path, tables: Path) -> Recipe:
    return Recipe(
        experts={task: str(berts / task) for task in HEADS},
        base=str(berts / "base"),
        method="realign",
        parameters=QUICK["realign"],
        fit=Fit({task: str(tables / f"{task}.csv") for task in HEADS}, device="cpu"),
    )


def sizes(out: Path) -> dict[str, int]:
    """Of everything that a user serves."""
    files = {path.relative_to(out).as_posix(): path.stat().st_size for path in out.rglob("*") if path.is_file()}
    return {name: size for name, size in files.items() if name.startswith(("encoder/", "heads/"))}


@pytest.mark.parametrize("method", FITTED)
def test_a_fitted_merge_is_as_large_as_any_other(method: str, recipe: Recipe, tmp_path: Path) -> None:
    plain = orthomerge.merge(replace(recipe, method="task_arithmetic", parameters={}, fit=None), out=tmp_path / "plain")
    made = orthomerge.merge(replace(recipe, method=method, parameters=QUICK[method]), out=tmp_path / "fitted")
    assert sizes(made.out) == sizes(plain.out)
    assert not verify(made.out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    about = made.manifest["fit"]
    assert about["access"] == access_class(made.manifest) == "inductive"
    assert {task: found["inputs"] for task, found in about["tasks"].items()} == dict.fromkeys(HEADS, 60)
    assert all(found["extra"]["parameters"] == 0 for found in about["tasks"].values())
    assert json.loads(json.dumps(made.manifest)) == made.manifest


def test_the_output_is_what_was_fitted(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Setting, Fitted]] = []
    fit = Realign.fit

    def watched(self: Realign, setting: Setting) -> Fitted:
        kept.append((setting, fit(self, setting)))
        return kept[-1][1]

    monkeypatch.setattr(Realign, "fit", watched)
    out = orthomerge.merge(recipe, out=tmp_path / "out").out
    (setting, made), model = kept[0], load(out)
    found = setting.layout.flat(dict(model.encoder.named_parameters()))
    torch.testing.assert_close(found, made.weights, rtol=0, atol=0)
    rows = setting.inputs.rows["five"][:9]
    batch = setting.inputs.batch(rows)
    setting.encoder.load(made.weights)
    expected = made.classifiers["five"](setting.encoder.features(batch))
    torch.testing.assert_close(model.logits("five", batch), expected, rtol=1e-4, atol=1e-5)
    orthomerge.export(out, "five", tmp_path / "five")
    torch.testing.assert_close(stock(tmp_path / "five")(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_the_same_recipe_gives_the_same_bytes(recipe: Recipe, tmp_path: Path) -> None:
    first, second = (orthomerge.merge(recipe, out=tmp_path / name).out for name in ("one", "two"))
    ours, theirs = (
        {name: data for name, data in contents(out).items() if name.startswith(("encoder/", "heads/"))}
        for out in (first, second)
    )
    assert ours == theirs


def test_test_inputs_make_it_transductive(recipe: Recipe, tmp_path: Path) -> None:
    assert recipe.fit is not None
    made = orthomerge.merge(replace(recipe, fit=replace(recipe.fit, split="test", limit=12)), out=tmp_path / "out")
    assert access_class(made.manifest) == "transductive"
    assert made.manifest["fit"]["tasks"]["two"]["inputs"] == 12


def test_realign_is_what_inputs_without_a_method_mean(recipe: Recipe) -> None:
    assert replace(recipe, method="auto").method == "realign"
    assert replace(recipe, method="auto", fit=None).method == "task_arithmetic"


def test_heads_can_be_aligned_on_top(recipe: Recipe, tables: Path, tmp_path: Path) -> None:
    from orthomerge.recipe import Align

    data = {task: str(tables / f"{task}.csv") for task in HEADS}
    block = Align(data, "surgery", {"steps": 5})
    given = replace(recipe, method="moma", parameters=QUICK["moma"], align=block)
    made = orthomerge.merge(given, out=tmp_path / "out")
    assert {"fit", "alignment"} <= set(made.manifest)
    assert made.manifest["alignment"]["tasks"]["two"]["extra"]["parameters"] > 0
    assert not verify(made.out)


def test_in_half_precision(recipe: Recipe, tmp_path: Path) -> None:
    made = orthomerge.merge(replace(recipe, dtype="bfloat16"), out=tmp_path / "out")
    assert {tensor.dtype for tensor in load(made.out).encoder.state_dict().values() if tensor.is_floating_point()} == {
        torch.bfloat16
    }


def test_other_families(vit_experts: Any, tmp_path: Path) -> None:
    """Pictures, whose modules have other names in memory than on disk."""
    recipe = vit_experts
    made = orthomerge.merge(recipe, out=tmp_path / "out")
    assert not verify(made.out)
    assert load(made.out).features({"pixel_values": torch.zeros(2, 3, 8, 8)}).shape[0] == 2


@pytest.fixture
def vit_experts(tmp_path: Path) -> Recipe:
    import numpy as np
    from transformers import ViTConfig, ViTForImageClassification

    random = np.random.default_rng(0)
    config: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
    }
    torch.manual_seed(0)
    base = ViTForImageClassification(ViTConfig(**config, num_labels=2))
    base.vit.save_pretrained(tmp_path / "base")
    experts, data = {}, {}
    for number, classes in enumerate((2, 3)):
        expert = ViTForImageClassification(ViTConfig(**config, num_labels=classes))
        with torch.no_grad():
            for ours, theirs in zip(expert.vit.parameters(), base.vit.parameters(), strict=True):
                ours.copy_(theirs + 0.02 * torch.randn(theirs.shape))
        expert.save_pretrained(tmp_path / f"e{number}")
        labels = np.arange(40) % classes
        names = np.array([f"LABEL_{label}" for label in range(classes)])
        images = random.integers(0, 255, (40, 8, 8, 3), dtype=np.uint8)
        file = tmp_path / f"e{number}.npz"
        np.savez(file, x_train=images, y_train=labels, x_test=images, y_test=labels, label_names=names)
        experts[f"e{number}"], data[f"e{number}"] = str(tmp_path / f"e{number}"), str(file)
    quick = {**QUICK["realign"], "copies": 60}
    return Recipe(experts=experts, base=str(tmp_path / "base"), parameters=quick, fit=Fit(data, device="cpu"))


def test_a_failed_fit_leaves_nothing(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Realign, setting: Setting) -> Fitted:
        raise NumericalError("the loss is nan at step 3 of 4; lower 'lr'")

    monkeypatch.setattr(Realign, "fit", failing)
    with pytest.raises(NumericalError):
        orthomerge.merge(recipe, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_fit_goes_on(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle, the second run ends with the bytes of one that was never stopped."""
    from orthomerge.fitting import loop

    monkeypatch.setattr(loop, "_BETWEEN", 0.0)
    whole = orthomerge.merge(recipe, out=tmp_path / "whole").out
    look, stops = loop.Loop._look, [4]

    def stopped(self: loop.Loop, step: int, *rest: Any) -> None:
        if step in stops:
            stops.clear()
            raise KeyboardInterrupt
        look(self, step, *rest)

    monkeypatch.setattr(loop.Loop, "_look", stopped)
    with pytest.raises(KeyboardInterrupt):
        orthomerge.merge(recipe, out=tmp_path / "again")
    assert (tmp_path / ".again.fitting").is_dir()
    assert not (tmp_path / "again").exists()
    again = orthomerge.merge(recipe, out=tmp_path / "again").out
    assert not (tmp_path / ".again.fitting").exists()
    for name, data in contents(whole).items():
        if name.startswith(("encoder/", "heads/")):
            assert data == (again / name).read_bytes(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fit": None}, "none are given"),
        ({"method": "ties", "parameters": {}}, "looks at no inputs"),
        ({"parameters": {"step": 3}}, "did you mean 'steps'"),
        ({"parameters": {"steps": 0}}, "'steps' must be at least 1"),
        ({"vector": "two + three"}, "cannot be fitted"),
    ],
)
def test_what_a_plan_refuses(change: dict[str, Any], message: str, recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        orthomerge.merge(replace(recipe, **change), out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_inputs_of_every_expert_are_needed(recipe: Recipe, tmp_path: Path) -> None:
    assert recipe.fit is not None
    fewer = replace(recipe.fit, data={task: path for task, path in recipe.fit.data.items() if task != "five"})
    with pytest.raises(RecipeError, match="no inputs of 'five'"):
        orthomerge.merge(replace(recipe, fit=fewer), out=tmp_path / "out")


def test_data_of_another_task_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    assert recipe.fit is not None
    swapped = replace(recipe.fit, data={**recipe.fit.data, "two": recipe.fit.data["three"]})
    with pytest.raises(IncompatibleError, match="two"):
        orthomerge.merge(replace(recipe, fit=swapped), out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_from_the_command_line(berts: Path, tables: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    given = ["merge", "--base", str(berts / "base"), "--out", str(tmp_path / "out"), "--device", "cpu", "--quiet"]
    for task in HEADS:
        given += ["--expert", f"{task}={berts / task}", "--data", f"{task}={tables / task}.csv"]
    result = CliRunner().invoke(app, [*given, "--limit", "20", "--set", "steps=2", "--set", "batch=4"])
    assert result.exit_code == 0, result.output
    assert "realign on unlabelled inputs of train (inductive): two 20, three 20, five 20" in result.output
    assert read_manifest(tmp_path / "out")["method"]["name"] == "realign"
    refused = CliRunner().invoke(app, [*given, "--method", "ties", "--force"])
    assert isinstance(refused.exception, RecipeError)
