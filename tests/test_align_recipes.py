"""The block `align` of a recipe: strict, planned with the rest, and carried out in one go with the merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.aligning import HEADS, contents, merge_berts, write_tables

import orthomerge
from orthomerge.aligning import merge_aligned
from orthomerge.errors import OutputError, RecipeError
from orthomerge.evaluation.span import arithmetic
from orthomerge.planning import make_plan
from orthomerge.recipe import Align, Expert, HeadNames, Recipe, read_recipe


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path_factory.getbasetemp() / "recipe-cache"))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


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


def write(folder: Path, block: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(f"experts: {{a: org/a}}\nalign:\n  {block}\n")
    return path


def test_a_block_with_everything(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/b.csv").touch()
    block = """data: {a: inputs/a.csv, b: inputs/b.csv, c: org/name, d: org/name:config@v1, e: ~/e.csv, f: /abs/f.npz}
  aligner: orthogonal
  options: {kappa: 0.1}
  split: val
  limit: 100"""
    found = read_recipe(write(tmp_path, block)).align
    data = {
        "a": str(tmp_path / "inputs/a.csv"),
        "b": str(tmp_path / "inputs/b.csv"),
        "c": "org/name",
        "d": "org/name:config@v1",
        "e": "~/e.csv",
        "f": "/abs/f.npz",
    }
    assert found == Align(data, "orthogonal", {"kappa": 0.1}, "val", 100)
    assert read_recipe(write(tmp_path, "data: {a: /x.csv}")).align == Align({"a": "/x.csv"}, "auto")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("aligner: ridge", "'align': 'data' is missing"),
        ("{data: {}}", "nothing to align on"),
        ("{data: {a: x.csv}, algner: ridge}", "unknown option 'algner'; did you mean 'aligner'"),
        ("{data: {a: x.csv}, split: tset}", r"'split' must be train \| val \| test, got 'tset'; did you mean 'test'"),
        ("{data: {a: x.csv}, limit: 0}", "'limit' must be at least 1, got 0"),
        ("{data: {a: x.csv}, limit: some}", "'limit' must be whole number or nothing"),
        ("{data: [x.csv]}", "'data' must be mapping to text"),
    ],
)
def test_a_block_is_strict(block: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        read_recipe(write(tmp_path, block))


def test_in_one_go_is_as_in_two(recipe: Recipe, berts: Path, tables: Path, tmp_path: Path) -> None:
    result = orthomerge.merge(recipe, out=tmp_path / "one")
    assert result.manifest["alignment"]["seed"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]
    merge_berts(berts, tmp_path / "merged", seed=4)
    orthomerge.align(
        tmp_path / "merged",
        data={task: tables / f"{task}.csv" for task in ("two", "five")},
        experts={task: berts / task for task in ("two", "five")},
        aligner="ridge",
        limit=40,
        seed=4,
        to=tmp_path / "two",
    )
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert orthomerge.verify(tmp_path / "one") == []


def test_adapters_are_aligned_through_their_base(recipe: Recipe, berts: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from orthomerge.models.load import quiet

    with quiet():
        from transformers import BertForSequenceClassification

        model = BertForSequenceClassification.from_pretrained(berts / "two")
        config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
        peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    labels = ("two-0", "two-1")
    adapted: Any = {"two": Expert(str(tmp_path / "adapter"), labels=labels)}
    block = Align({"two": recipe.align.data["two"]} if recipe.align else {}, "ridge")
    given = Recipe(adapted, base=str(berts / "base"), check_base=False, align=block)
    assert orthomerge.merge(given, out=tmp_path / "out").manifest["alignment"]["tasks"]["two"]["inputs"] == 60
    with pytest.raises(RecipeError, match="an adapter needs the model that the experts were fine-tuned from"):
        orthomerge.merge(Recipe(adapted, method="average"), out=tmp_path / "none")


def problems(recipe: Recipe, **changed: Any) -> list[tuple[str, str]]:
    given: dict[str, Any] = {**vars(recipe.align), **changed}
    plan = make_plan(Recipe(**{**vars(recipe), "align": Align(**given)}))
    return [(problem.where, problem.what) for problem in plan.problems]


def test_a_plan_lists_what_is_wrong_with_the_block(recipe: Recipe) -> None:
    assert problems(recipe) == []
    assert problems(recipe, aligner="rigde", data={"tow": "nowhere.csv", "two": "no/where/x.npz"}) == [
        ("align", "unknown aligner 'rigde'"),
        ("align: data of 'tow'", "there is no such expert"),
        ("align: data of 'tow'", "nowhere.csv does not exist"),
        ("align: data of 'two'", "no/where/x.npz does not exist"),
    ]
    assert problems(recipe, options={"x": 1})[0][1].startswith("aligner ridge: unknown option 'x'")
    assert problems(recipe, data={"two": "~nobody-of-this-name/x.csv"})[0][1].endswith("does not exist")


def test_a_plan_says_that_a_module_of_the_users_own_cannot_be_aligned(berts: Path, tables: Path) -> None:
    expert = Expert(str(berts / "two"), head=HeadNames(("classifier",)))
    block = Align({"two": str(tables / "two.csv")}, "ridge")
    given = Recipe({"two": expert}, base=str(berts / "base"), family="generic", encoder_prefix="bert", align=block)
    assert "inputs cannot be encoded here" in next(p.what for p in make_plan(given).problems if p.where == "align")


def test_a_merge_that_cannot_be_aligned_leaves_nothing(recipe: Recipe, tmp_path: Path, tables: Path) -> None:
    align: Any = recipe.align
    bad = {"two": str(tables / "three.csv")}
    broken = Recipe(**{**vars(recipe), "align": Align(**{**vars(align), "data": bad})})
    with pytest.raises(orthomerge.OrthomergeError, match="labels of task 'two' are not those of its expert"):
        orthomerge.merge(broken, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OutputError, match="overlaps the input"):
        orthomerge.merge(recipe, out=Path(recipe.tasks["two"].path) / "out")
    with pytest.raises(RecipeError, match="the recipe has no block 'align'"):
        merge_aligned(Recipe({"a": "b"}), to=tmp_path / "out")


def test_edits_of_a_recipe_are_not_aligned(recipe: Recipe) -> None:
    assert arithmetic(recipe, {"two": 1.0}).align is None
