"""Recipes: typed, strict, safe to read from anybody, and the same wherever they are read from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orthomerge.core.checks import parse_size
from orthomerge.core.errors import RecipeError
from orthomerge.models.opening import Expert, HeadNames
from orthomerge.runs.recipe import Recipe, parse_value, read_recipe

FULL = """
base: org/base@main
experts:
  sst2: org/sst2
  mnli:
    path: org/mnli
    prefix: module.bert.
    labels: [entailment, neutral, contradiction]
    head: {layers: [a, b], activation: tanh}
  "10": org/ten
method: ties
parameters: {density: 0.2, scale: 1}
out: out
dtype: bfloat16
max_shard_size: 100MiB
seed: 7
ignore: ["x.*"]
missing: base
check_base: false
"""


def read(folder: Path, text: str | bytes) -> Recipe:
    (folder / "recipe.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_recipe(folder / "recipe.yaml")


def test_a_full_recipe(tmp_path: Path) -> None:
    recipe, labels = read(tmp_path, FULL), ("entailment", "neutral", "contradiction")
    assert recipe.tasks == {
        "sst2": Expert("org/sst2"),
        "mnli": Expert("org/mnli", "module.bert.", labels, HeadNames(("a", "b"), "tanh")),
        "10": Expert("org/ten"),
    }
    assert (recipe.base, recipe.method, recipe.parameters) == ("org/base@main", "ties", {"density": 0.2, "scale": 1})
    assert (recipe.out, recipe.dtype, recipe.max_shard_size) == (str(tmp_path / "out"), "bfloat16", "100MiB")
    assert (recipe.seed, recipe.ignore, recipe.missing) == (7, ("x.*",), "base")
    assert (recipe.check_base, recipe.vector, recipe.family) == (False, None, None)
    assert recipe.absolute() == recipe
    assert read(tmp_path, "experts: {a: org/a}") == Recipe({"a": "org/a"})


def test_relative_paths_start_from_the_folder_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / "models/base", here / "a", there / "b", there / "models/c"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(there)
    long = "x" * 300
    references = {
        "a": ("./a", str(here / "a")),
        "b": ("b", str(here / "b")),  # not the one where we happen to be
        "up": ("{path: ../there/b}", str(here / "../there/b")),
        "c": ("org/name", "org/name"),
        "d": ("org/name@v1.0", "org/name@v1.0"),
        "e": (f"{tmp_path}/x", f"{tmp_path}/x"),
        "f": ("~/y", "~/y"),
        "g": ("./models/c", str(here / "models/c")),
        # Odd ones are errors when they are opened.
        "h": ('"a\\0b"', str(here / "a\0b")),
        "i": ("~nobody-of-this-name/x", "~nobody-of-this-name/x"),
        "j": (f"o/{long[:90]}@{long[:190]}", f"o/{long[:90]}@{long[:190]}"),
    }
    experts = ", ".join(f"{task}: {written}" for task, (written, _) in references.items())
    recipe = read(here, f"base: models/base\nexperts: {{{experts}}}\nout: results/out\n")
    paths = {task: expert.path for task, expert in recipe.tasks.items()}
    assert paths == {task: path for task, (_, path) in references.items()}
    assert (recipe.base, recipe.out) == (str(here / "models/base"), str(here / "results/out"))
    assert read(here, f"base: {long}\nexperts: {{a: org/a}}").base == str(here / long)
    monkeypatch.chdir(tmp_path)  # the same from anywhere, and by a relative name
    assert Path(read(Path("here"), "experts: {b: b}").tasks["b"].path).resolve() == here / "b"
    for out in ("/abs/out", "~/out", "~nobody-of-this-name/out"):
        assert read(tmp_path, f"experts: {{a: org/a}}\nout: {out}").out == out


WRONG: dict[str, tuple[bytes | str, str]] = {
    "empty": (b"", "recipe.yaml must be a mapping of options, got NoneType"),
    "a list": (b"- a\n- b", "recipe.yaml must be a mapping of options, got list"),
    "two documents": (b"a: 1\n---\nb: 2", "recipe.yaml is not valid YAML: expected a single document"),
    "not YAML": (b"a: [1", "recipe.yaml is not valid YAML"),
    "a tab": (b"a:\n\tb: 1", "recipe.yaml is not valid YAML"),
    "not UTF-8": (b"a: \xff", "recipe.yaml is not a text file"),
    "control characters": (b"a: \x00", "recipe.yaml is not valid YAML"),
    "code": (b"a: !!python/object/apply:os.system [id]", "recipe.yaml is not valid YAML: could not determine"),
    "alias": (b"a: &x [1]\nb: *x", r"recipe.yaml is not valid YAML: aliases \(\*name\) are not allowed in a recipe"),
    "twice": (b"base: x\nexperts: {}\nbase: y", r"recipe.yaml is not valid YAML: 'base' is given twice \(line 3\)"),
    "twice inside": (b"experts:\n  a: x\n  a: y", r"'a' is given twice \(line 3\)"),
    "twice as a number": (b"experts:\n  1: x\n  0x1: y", r"'1' is given twice \(line 3\)"),
    "twice as a word": (b"experts:\n  yes: x\n  true: y", r"'True' is given twice \(line 3\)"),
    "twice by merging": (b"experts:\n  <<: {a: x}\n  a: y", "'a' is given twice"),
    "a key that is a list": (b"? [a, b]\n: c", r"recipe.yaml is not valid YAML: [\s\S]*unhashable key"),
    "not true": (b"a: !!bool x", "recipe.yaml is not valid YAML"),
    "no number": (b"a: !!int ''", "recipe.yaml is not valid YAML"),
    "a day that never was": (b"a: 2020-13-45", "recipe.yaml is not valid YAML: month must be in"),
    "endless number": (b"a: " + b"1" * 9_999, "recipe.yaml is not valid YAML: .*4300"),
    "deep": (b"a: " + b"[" * 50_000, "recipe.yaml is not valid YAML: it is nested more than 50 levels deep"),
    "large": (b"# " + b"x" * (1 << 20), "recipe.yaml is larger than 1048576 bytes; that is not a recipe"),
    "unknown key": ("experts: {a: b}\nmetod: ties", r"recipe.yaml: unknown option 'metod'; did you mean 'method'\?"),
    "heads merged too": ("experts: {a: b}\nheads: average", "recipe.yaml: unknown option 'heads'"),
    "experts empty": ("experts: {}", "'experts' is empty; name at least one"),
    "name that YAML reads as a truth": ("experts: {no: b}", "the name False must be text; write it in quotes"),
    "name that YAML reads as a number": ("experts: {007: b}", "the name 7 must be text; write it in quotes"),
    "label that YAML reads as a truth": (
        "experts: {a: {path: b, labels: [yes, no]}}",
        r"'labels' must be list of text or nothing, got \[True, False\]",
    ),
    "no labels": ("experts: {a: {path: b, labels: []}}", "the expert .*b has an empty list of labels; name at least"),
    "dtype": ("experts: {a: b}\ndtype: bfloat61", r"keep \| float32 .*, got 'bfloat61'; did you mean 'bfloat16'\?"),
    "seed": ("experts: {a: b}\nseed: 1.5", "'seed' must be whole number, got 1.5"),
    "seed beyond belief": ("experts: {a: b}\nseed: 0x" + "f" * 5_000, "'seed' must be a whole number of at most 63 b"),
    "no layers": ("experts: {a: {path: b, head: {layers: []}}}", "'layers' of a head must be one or two names, got 0"),
    "two layers, nothing between": (
        "experts: {a: {path: b, head: {layers: [x, y]}}}",
        "an 'activation' must be given for two 'layers' of a head, and only then",
    ),
}


@pytest.mark.parametrize(("text", "match"), WRONG.values(), ids=WRONG.keys())
def test_recipes_that_make_no_sense(tmp_path: Path, text: bytes | str, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        read(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*nowhere.yaml: No such file or directory"):
        read_recipe(tmp_path / "nowhere.yaml")
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*: Is a directory"):
        read_recipe(tmp_path)
    with pytest.raises(RecipeError, match="/dev/zero is larger than"):
        read_recipe(Path("/dev/zero"))


def test_a_recipe_through_a_pipe(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"experts: {a: org/a}")
    os.close(writing)
    assert read_recipe(Path(f"/dev/fd/{reading}")).tasks == {"a": Expert("org/a")}
    os.close(reading)


def test_names_of_experts() -> None:
    names = ["a", "SST-2", "x.y_z+w", "0", "a" * 100]
    assert list(Recipe(dict.fromkeys(names, "x")).tasks) == names
    for bad in ("", ".", "..", ".hidden", "-x", "a/b", "../a", "a b", "a\n", "ä", "a\\b", "a\0", "_a", "a" * 101, "~"):
        with pytest.raises(RecipeError, match=r"name an expert and its folder; use letters, digits and _ \. \+ -"):
            Recipe({bad: "x"})
    with pytest.raises(RecipeError, match="names that differ in case only, the same to some file systems"):
        Recipe({"SST2": "x", "sst2": "y"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5gb", 5 * 10**9), (" 1.5 MiB ", 3 * 2**19), ("100", 100), (123456, 123456), ("1B", 1), ("0.5GiB", 2**29)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected
    assert Recipe({"a": "x"}, max_shard_size=text).max_shard_size == text


@pytest.mark.parametrize(
    "size",
    ["", "GB", "5 G B", "5PB", "-5GB", "0GB", "0.4B", "1e9", "5,5GB", "five", "9" * 400, "99999999TB", 0, -1, 1 << 62,
     pytest.param(1 << 20_000, id="beyond belief"), "inf", "nan"],
)  # fmt: skip
def test_sizes_that_are_none(size: str | int) -> None:
    with pytest.raises(RecipeError, match=r"a size must look like 5GB, 100MiB or 123456, got '.{0,60}; known units: B"):
        Recipe({"a": "x"}, max_shard_size=size)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.3", 0.3), ("3e-1", 0.3), ("1E3", 1000.0), ("-2e+2", -200.0), ("7", 7), ("true", True), ("[1, 2]", [1, 2]),
        ("{a: 1}", {"a": 1}), ("two + three", "two + three"), ("x.*", "x.*"), ("1e", "1e"), ("e3", "e3"),
        ("null", None),
    ],
)  # fmt: skip
def test_values_of_the_command_line(text: str, expected: object) -> None:
    assert parse_value(text) == expected
    assert type(parse_value(text)) is type(expected)


@pytest.mark.parametrize("text", ["[1", "*x", "!!bool x", "2020-13-45", "{a: 1, a: 2}", "!!python/name:os.system", "*"])
def test_values_that_cannot_be_read(text: str) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the value '.*; write it as YAML, for example 0.3, true or \["):
        parse_value(text)
