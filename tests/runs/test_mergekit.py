"""mergekit's configs: what they become, what is refused, and one merge from file to folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build
from orthomerge.merging.methods import make_method
from orthomerge.models.manifest import read_manifest
from orthomerge.runs.mergekit import translate
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe, read_recipe

TIES = """
merge_method: ties
base_model: org/base
models:
  - model: org/base
  - {model: org/a, parameters: {weight: 0.5, density: 0.4}}
  - {model: ./runs/b, parameters: {weight: 0.2, density: 0.4}}
parameters: {normalize: false, int8_mask: true, lambda: 1.5}
dtype: torch.bfloat16
"""
WEIGHTS = {"two": 0.6, "three": 0.4}


def config(text: str, **changes: Any) -> dict[str, Any]:
    document = yaml.safe_load(text) | changes
    return {key: value for key, value in document.items() if value is not ...}


def translated(document: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe, once it is sure that recipe and method accept it."""
    mapping = translate(document, where="merge.yml")
    recipe = build(Recipe, mapping, where="merge.yml")
    make_method(recipe.method, recipe.parameters, tasks=tuple(recipe.experts), seed=recipe.seed)
    return mapping


def listed(**parameters: Any) -> list[dict[str, Any]]:
    """Two models with the same options."""
    return [{"model": name, "parameters": parameters} for name in ("a", "b")]


def test_ties_becomes_mergekits_reading_of_it() -> None:
    assert translated(config(TIES)) == {
        "experts": {"a": "org/a", "b": "./runs/b"},
        "base": "org/base",
        "method": "ties@mergekit",
        "parameters": {"density": 0.4, "weights": [0.5, 0.2], "scale": 1.5, "normalize": False},
        "dtype": "bfloat16",
    }
    # Keys that change nothing
    assert translated(config(TIES, dtype=None))["dtype"] == "keep"
    assert translated(config(TIES, tokenizer_source="base")) == translated(config(TIES))


def weighted(*weights: Any) -> list[dict[str, Any]]:
    """Models with weights of their own; None: without one."""
    options = [{} if weight is None else {"weight": weight} for weight in weights]
    return [{"model": name, "parameters": own} for name, own in zip("ab", options, strict=True)]


SLERP = {"merge_method": "slerp", "parameters": {"t": 0.5}}
STOCK = {"merge_method": "model_stock", "parameters": {}}
DARE = {"density": 0.5, "weights": [1.0, 1.0], "scale": 1.0, "normalize": False}


@pytest.mark.parametrize(
    ("method", "models", "shared", "ours", "expected"),
    [
        # mergekit's defaults, not ours
        ("ties", weighted(0.5, 0.5), {}, "ties@mergekit",
         {"density": 1.0, "weights": [0.5, 0.5], "scale": 1.0, "normalize": True}),
        ("dare_linear", listed(weight=1, density=0.5), {}, "dare@mergekit", DARE),
        ("dare_ties", listed(weight=1, density=0.5), {}, "dare_ties@mergekit", DARE),
        ("task_arithmetic", weighted(0.5, 0.5), {"lambda": 0.5}, "task_arithmetic", {"scale": [0.25, 0.25]}),
        # divided by the sum, unless the weights cancel
        ("task_arithmetic", weighted(3, 1), {"normalize": True}, "task_arithmetic", {"scale": [0.75, 0.25]}),
        ("task_arithmetic", weighted(1, -1), {"normalize": True}, "task_arithmetic", {"scale": [1.0, -1.0]}),
        # a model's own option comes first; a number may be text
        ("task_arithmetic", weighted(0.1, None), {"weight": 0.7}, "task_arithmetic", {"scale": [0.1, 0.7]}),
        ("task_arithmetic", weighted("5e-1", 1), {}, "task_arithmetic", {"scale": [0.5, 1.0]}),
        ("breadcrumbs", weighted(0.5, 0.5), {}, "breadcrumbs", {"density": 1.0, "gamma": 0.01, "scale": [0.5, 0.5]}),
        ("breadcrumbs", listed(weight=0.5, density=0.8), {}, "breadcrumbs",
         {"density": 0.8, "gamma": 0.01, "scale": [0.5, 0.5]}),
        ("model_stock", listed(), {}, "model_stock", {}),
    ],
)  # fmt: skip
def test_methods_on_task_vectors(method: str, models: Any, shared: Any, ours: str, expected: dict[str, Any]) -> None:
    recipe = translated({"merge_method": method, "base_model": "c", "models": models, "parameters": shared})
    assert (recipe["method"], recipe["parameters"], recipe["base"]) == (ours, expected, "c")
    if method.startswith("dare"):
        rule: Any = make_method(ours, expected, tasks=("a", "b"))
        assert rule.rescale


def test_linear() -> None:
    recipe = translated({"merge_method": "linear", "models": listed(weight=2)})
    assert (recipe["method"], recipe["parameters"]) == ("average", {"weights": [2.0, 2.0]})
    assert "base" not in recipe
    document = {"merge_method": "linear", "base_model": "c", "models": [{"model": "a"}, {"model": "b"}]}
    recipe = translated(document | {"parameters": {"weight": 0.3}})  # counts the base among the models
    assert (recipe["experts"], recipe["base"]) == ({"a": "a", "b": "b", "c": "c"}, "c")
    with pytest.raises(RecipeError, match="'base_model' among the models of a linear merge, and 'c' has no weight"):
        translated(document | {"models": listed(weight=0.3)})
    plain = {"merge_method": "linear", "parameters": {"normalize": False}}  # an average if weights sum to one
    assert translated(plain | {"models": listed(weight=0.5)})["parameters"] == {"weights": [0.5, 0.5]}
    with pytest.raises(RecipeError, match=r"weights that sum to 0\.6 scale the whole model"):
        translated(plain | {"models": listed(weight=0.3)})


@pytest.mark.parametrize("models", [["b", "a"], ["a", "b"], ["b"]])
def test_slerp_goes_from_base_model_to_the_other(models: list[str]) -> None:
    document = {"merge_method": "slerp", "base_model": "a", "models": [{"model": model} for model in models]}
    recipe = translated(document | {"parameters": {"t": 0.25}})
    assert list(recipe["experts"].values()) == ["a", "b"]
    assert recipe["parameters"] == {"t": 0.25}
    assert "base" not in recipe


@pytest.mark.parametrize(
    ("references", "names"),
    [
        (["org/bert-sst2@main", "/x/mnli/"], ["bert-sst2", "mnli"]),
        (["sst2/checkpoint-9", "mnli/checkpoint-9"], ["sst2-checkpoint-9", "mnli-checkpoint-9"]),
        (["a/x/m", "b/x/M", "c/x/m"], ["x-m", "x-M-2", "x-m-3"]),
        (["/", "a b(c)", "../_hidden"], ["expert", "a-b-c-", "hidden"]),
        (["c:\\models\\qnli", "x" * 200], ["qnli", "x" * 90]),
    ],
)
def test_names_of_experts_are_valid_and_differ(references: list[str], names: list[str]) -> None:
    models = [{"model": reference} for reference in references]
    recipe = translated({"merge_method": "linear", "models": models, "parameters": {"weight": 1}})
    assert list(recipe["experts"]) == names
    assert list(recipe["experts"].values()) == references


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge_method": "della"}, "'della' is not among those that mergekit and orthomerge share; known: b"),
        ({"merge_method": ["ties"]}, r"'merge_method' must be text, got \['ties'\]"),
        ({"merge_method": "tiess"}, "'tiess' is not among those .*; did you mean 'ties'"),
        ({"basemodel": "x"}, "unknown option 'basemodel'; did you mean 'base_model'"),
        ({"base_model": ...}, "ties needs the model that the others were fine-tuned from as 'base_model'"),
        ({"models": [{"model": "org/base"}]}, "only the base is listed under 'models'"),
        ({"models": ...}, "'models' is missing"),
        ({"models": ["org/a"]}, "'models' item 1 must be a mapping of options, got 'org/a'"),
        ({"slices": []}, "'slices' is not supported .*; only whole models can be merged here: list them under"),
        ({"modules": {"text": {}}}, "'modules' is not supported .*; only whole models"),
        ({"out_dtype": "float32"}, "unknown option 'out_dtype'; did you mean 'dtype'"),
        ({"models": [{"model": "a+lora"}]}, r"'a\+lora' puts an adapter on a model; .* as the expert"),
        ({"models": [{"model": "a"}, {"model": "a"}]}, "'a' is listed twice"),
        ({"models": [{"model": "a"}]}, "parameter 'weight' of model 'a' is missing; ties has no default for it"),
        ({"models": listed(weight=1, densty=0.5)}, "model 'a': 'densty' is not supported .*; did you mean 'density'"),
        ({"models": listed(weight=1, normalize=True)}, "'normalize' is not supported .*; known: density, weight"),
        ({"parameters": {"t": 0.5}}, "'parameters': 't' is not supported"),
        ({"models": listed(weight=[0.1, 0.9])}, r"'weight' of model 'a' must be one number, .* got \[0.1, 0.9\]"),
        ({"models": listed(weight={"value": 1})}, "'weight' of model 'a' must be one number, for all layers"),
        ({"models": listed(weight=True)}, "'weight' of model 'a' must be one number, .* got True"),
        ({"models": listed(weight=10**400)}, "'weight' of model 'a' must be one number, .* got 1000"),
        ({"models": listed(weight="much")}, "'weight' of model 'a' must be one number, .* got 'much'"),
        ({"parameters": {"normalize": "maybe"}}, "parameter 'normalize' must be true or false, got 'maybe'"),
        ({"tokenizer_source": "union"}, "tokenizer source 'union' rearranges the embeddings"),
        ({"tokenizer": {"source": "base"}}, "'tokenizer' is not supported .*; embeddings are never rearranged"),
        ({"chat_template": "auto"}, "unknown option 'chat_template'"),
        ({"models": [listed(weight=1, density=0.5)[0], listed(weight=1)[1]]}, r"'density' differs .* \('0.5', '1.0'\)"),
        ({"merge_method": "task_arithmetic", "models": listed(weight=1, density=0.5)}, "'density' does nothing in"),
        ({"random_seed": 7}, "'random_seed' is not supported .*; leave it out, or write a recipe of ours, which has"),
        ({**SLERP, "base_model": ..., "models": listed()}, "slerp needs 'base_model', the one of the two"),
        ({**SLERP, "models": listed()}, "slerp merges exactly 2 models, 'base_model' and another, got 3"),
        ({**SLERP, "models": listed()[:1], "parameters": {}}, "parameter 't' is missing; slerp has no default"),
        ({**SLERP, "models": listed()[:1], "parameters": {"t": [0, 1]}}, "parameter 't' must be one number"),
        ({**SLERP, "models": listed(weight=1)}, "model 'a': 'weight' is not supported"),
        ({**STOCK, "models": listed(density=0.5)}, "model 'a': 'density' is not supported"),
    ],
)
def test_what_cannot_be_said_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"merge.yml: .*{message}"):
        translated(config(TIES, **changes))


def test_a_mergekit_file_is_merged(berts: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "merge.yml"
    models = [{"model": str(berts / name), "parameters": {"weight": weight}} for name, weight in WEIGHTS.items()]
    document = {"merge_method": "task_arithmetic", "base_model": str(berts / "base"), "models": models}
    recipe.write_text(yaml.safe_dump({**document, "parameters": {"lambda": 0.5}}))
    heads = read_manifest(write(read_recipe(recipe), out=tmp_path / "out"))["heads"]
    assert {task: len(head["labels"]) for task, head in heads.items()} == {"two": 2, "three": 3}
    origin, *experts = (load_file(berts / name / "model.safetensors") for name in ("base", *WEIGHTS))
    for name, merged in load_file(tmp_path / "out" / "encoder.safetensors").items():
        start = origin[name.removeprefix("bert.")]
        vectors = [expert[name] - start for expert in experts]
        expected = start + 0.5 * sum(weight * vector for weight, vector in zip(WEIGHTS.values(), vectors, strict=True))
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-7)
