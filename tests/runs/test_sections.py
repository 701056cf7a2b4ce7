"""The blocks `evaluate`, `diagnose` and `report` of a recipe: strict, anchored, and what they ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from orthomerge.core.errors import RecipeError
from orthomerge.runs.recipe import Recipe, read_recipe
from orthomerge.runs.sections import Diagnose, Evaluate, Report, Scoring, protocols_of


def read(folder: Path, text: str) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(f"experts: {{a: org/a}}\n{text}\n")
    return read_recipe(path)


SCORED = "evaluate: {data: {a: x.csv}, protocols: [%s]}"


def test_all_blocks(tmp_path: Path) -> None:
    text = """
base: org/base
evaluate:
  data: {a: a.csv}
  protocols:
    - current
    - {protocol: knn, shots: [1, 0.5, all], seeds: 3, access: [inductive, transductive]}
    - {aligner: [auto, ridge], shots: 5, options: {}}
  support: val
  references: false
diagnose: {aligner: ridge, points: 10, scales: true}
report: {title: x}"""
    recipe = read(tmp_path, text)
    assert recipe.evaluate == Evaluate(
        {"a": str(tmp_path / "a.csv")},
        (
            "current",
            Scoring("knn", shots=(1, 0.5, "all"), seeds=3, access=("inductive", "transductive")),
            Scoring(aligner=("auto", "ridge"), shots=5),
        ),
        support="val",
        references=False,
    )
    assert recipe.diagnose == Diagnose("ridge", points=10, scales=True)
    assert recipe.report == Report("x")
    assert recipe.absolute() == recipe
    protocols = protocols_of(recipe.evaluate.scorings, recipe.evaluate.support)
    ways = [(protocol.aligner or protocol.name, protocol.shots, protocol.seeds) for protocol in protocols]
    assert ways[:3] == [("current", None, 1), ("knn", 1, 3), ("knn", 1, 3)]
    assert ways[5:] == [("knn", None, 1), ("knn", None, 1), ("auto", 5, 5), ("ridge", 5, 5)]
    assert {protocol.support for protocol in protocols[1:]} == {"val"}
    detail = recipe.diagnosis.detail(seed=0)
    assert (detail.aligner, detail.points) == ("ridge", 10)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("evalute: {data: {a: x.csv}}", "unknown option 'evalute'; did you mean 'evaluate'"),
        ("evaluate: {}", "'evaluate': 'data' is missing"),
        ("evaluate: {data: {}}", "'evaluate' has no data"),
        ("evaluate: {data: {a: x.csv}, protocol: [knn]}", "unknown option 'protocol'; did you mean 'protocols'"),
        ("evaluate: {data: {a: x.csv}, protocols: []}", "'protocols' is empty"),
        (SCORED % "{shot: 1}", "item 1: unknown option 'shot'; did you mean 'shots'"),
        (SCORED % "{shots: 0}", "'shots' must be whole numbers per class"),
        (SCORED % "{shots: 1.5}", "'shots' must be whole numbers per class"),
        (SCORED % "{shots: []}", "must not be empty lists"),
        (SCORED % "{seeds: 0}", "'seeds' must be at least 1"),
        (SCORED % "{protocol: knn, aligner: ridge}", "a 'protocol' or an 'aligner'"),
        (SCORED % "{access: free}", "'access' must be"),
        ("evaluate: {data: {a: x.csv}, support: test}", r"'support' must be train \| val"),
        ("evaluate: {data: {a: x.csv}, batch: 0}", "'batch' must be at least 1, got 0"),
        ("evaluate: {data: {a: x.csv}, margin: 0}", "'margin' must be positive, got 0"),
        ("evaluate: {data: {a: x.csv}}\ndiagnose: {point: 3}", "unknown option 'point'; did you mean 'points'"),
        ("evaluate: {data: {a: x.csv}}\nreport: {titel: x}", "unknown option 'titel'; did you mean 'title'"),
        ("align: {aligner: ridge}", "'align': 'data' is missing"),
        ("align: {data: {}}", "'align' has no data"),
        ("align: {data: {a: x.csv}, algner: ridge}", "unknown option 'algner'; did you mean 'aligner'"),
        ("align: {data: {a: x.csv}, split: tset}", r"must be train \| val \| test, got 'tset'; did you mean 'test'"),
        ("align: {data: {a: x.csv}, limit: 0}", "'limit' must be at least 1, got 0"),
        ("align: {data: {a: x.csv}, limit: some}", "'limit' must be whole number or nothing"),
        ("align: {data: [x.csv]}", "'data' must be mapping to text"),
        ("sweep: {method: [ties]}", "'sweep': unknown option 'method'; did you mean 'methods'"),
        ("sweep: {methods: [{name: ties}]}", "unknown option 'name'"),
        ("sweep: {scales: [0.1, x]}", "'scales' item 2 must be number, got 'x'"),
        ("sweep: {scales: [.inf]}", "'scales' must be finite numbers, got inf"),
        ("sweep: {seeds: 0}", "'seeds' must be at least 1, got 0"),
        ("sweep: {aligners: []}", "'aligners' is empty"),
        ("sweep: {choose: train}", r"'choose' must be val \| test"),
        ("evaluate: {data: {a: x.csv}}\ndiagnose: {scales: true}", "'scales' merges again, which needs a base"),
        ("diagnose: true", "'diagnose' needs data: give a section 'evaluate' too"),
        ("report: {title: x}", "'report' needs data"),
    ],
)
def test_mistakes(tmp_path: Path, block: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, block)
