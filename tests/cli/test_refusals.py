"""What commands refuse: the message and the exit code, before anything is built or written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.calling import refused

import orthomerge
from orthomerge.suites import digits

# Commands that would succeed, were it not for what is added to them.
STARTS = {
    "evaluate": "evaluate {tuned}/merged --data {words} --device cpu --batch 8 --protocol aligned-c --shots 2 "
    "--seeds 2 --out {out}",
    "suite": "evaluate --suite digits --folder {out} --out {out}",
    "align": "align {merged} --data=two={tables}/two.csv --data=three={tables}/three.csv --device cpu -q --out {out}",
    "finetune": "finetune --base {berts}/base --data {words}/mood.csv --set steps=1 --set device=cpu --out {out}",
    "negate": "negate {berts}/two --base {berts}/base --target two --device cpu --grid 1,0.5 "
    "--data=two={tables}/two.csv --data=three={tables}/three.csv --out {out}",
    "analogy": "analogy {berts}/two {berts}/three {berts}/five --base {berts}/base --device cpu --grid 0.5,1 "
    "--of three:five::two --data=other={tables}/two.csv --out {out}",
    "": "",
}
NO_MODELS = "give a suite, or folders of merged models and --data TASK=PATH"
REFUSALS = [
    ("", "merge", 2, "nothing to merge: give a recipe, or experts and their base, for example: orthomerge merge"),
    ("", "merge base tone topic --out m", 2, "Then type: orthomerge merge tone topic --base base --out OUT"),
    ("", "merge six=", 2, "must be written EXPERT or NAME=EXPERT, got 'six='"),
    ("", "merge a=b --set x", 2, "expected --set KEY=VALUE, got 'x'"),
    ("", "merge a=b --set x=[", 2, "cannot read the value"),
    ("", "merge a=b --dtype float61", 2, "--dtype must be keep | float32"),
    ("", "merge nowhere.yaml", 2, "cannot read the recipe nowhere.yaml"),
    ("", "run nowhere.yaml", 2, "cannot read the recipe nowhere.yaml"),
    ("", "merge a=b --method ties --data a=x", 2, "'ties' uses no inputs: --data is for fitted methods"),
    ("", "merge a=b --method ties --limit 3", 2, "--limit is for a method that is fitted to inputs"),
    ("", "inspect /nowhere --verify", 3, "is not an orthomerge output"),
    ("", "inspect /nowhere", 3, "does not exist"),
    ("", "list method", 2, "KIND must be methods | aligners"),
    ("", "list suites vison8", 2, "unknown suite 'vison8'; did you mean 'vision8'?"),
    ("", "reproduce build vison8", 2, "unknown suite 'vison8'; did you mean 'vision8'?"),
    ("", "reproduce build text8 --out {out}", 3, "give it with --data"),
    ("", "evaluate {tuned}/merged", 2, NO_MODELS),
    ("", "evaluate --data mood={words}/mood.csv", 2, NO_MODELS),
    ("", "evaluate --suite digist", 2, "did you mean 'digits'"),
    ("", "evaluate {tuned}/mood --data mood={words}/mood.csv", 3, "is not an orthomerge output"),
    ("", "evaluate {tuned}/merged --data moon={words}/mood.csv", 2, "did you mean 'mood'"),
    ("", "evaluate {tuned}/merged --data mood={words}/kind.csv", 4, "are not those of its expert"),
    ("evaluate", "--protocol alinged-c", 2, "unknown protocol 'alinged-c'; did you mean 'aligned-c'?"),
    ("evaluate", "--aligner rige", 2, "unknown aligner 'rige'; did you mean 'ridge'?"),
    ("evaluate", "--shots many", 2, "'shots' must be"),
    ("evaluate", "--shots 0", 2, "'shots' must be whole numbers per class, shares below 1, or all, got 0"),
    ("evaluate", "--shots 99", 2, "fewer than 99 shots"),
    ("evaluate", "--seeds 0", 2, "'seeds' must be at least 1, got 0"),
    (
        "evaluate",
        "--access inductiv",
        2,
        "--access must be inductive | transductive, got 'inductiv'; did you mean 'inductive'?",
    ),
    ("evaluate", "--data mood", 2, "expected --data TASK=PATH, got "),
    ("evaluate", "--expert moon=/nowhere", 2, "no task 'moon'; did you mean 'mood'?"),
    ("evaluate", "--device warp", 2, "unknown device 'warp'"),
    ("evaluate", "--margin 0", 2, "'margin' must be positive, got 0.0"),
    ("evaluate", "--against ties", 2, "there is no model 'ties' to compare with; known: expert, task_arithmetic"),
    ("evaluate", "--against task_arithmetics", 2, "did you mean 'task_arithmetic'"),
    ("suite", "--method tiess", 2, "did you mean 'ties'"),
    ("suite", "--method 'ties: denssity: 0.5'", 2, "unknown option 'denssity'"),
    ("suite", "--method 'ties:density: ['", 2, "cannot read the value"),
    ("suite", "--method ties --method 'ties: density: 0.5' --against 'ties(ties)'", 2, "did you mean 'ties (ties)'"),
    ("suite", "--method average --against avrage", 2, "no model has this name; did you mean 'average'?"),
    ("align", "--data tow=x.csv", 2, "did you mean 'two'"),
    ("align", "--data two=x.csv", 2, "have the same name"),
    ("align", "--expert two", 2, "expected --expert TASK=PATH, got 'two'"),
    ("align", "--aligner ridge --set strenght=1", 2, "did you mean 'strength'"),
    ("align", "--split dev", 2, "--split must be train | val | test, got 'dev'"),
    ("finetune", "--set steps", 2, "expected --set KEY=VALUE, got 'steps'"),
    ("finetune", "--set stepps=2", 2, "unknown option 'stepps'; did you mean 'steps'?"),
    ("finetune", "--set steps=two", 2, "'steps' must be whole number or nothing, got 'two'"),
    ("finetune", "--set mode=ful", 2, "did you mean 'full'?"),
    ("finetune", "--data /nowhere.csv", 3, "/nowhere.csv does not exist"),
    ("finetune", "--base /nowhere", 3, "does not exist"),
    ("negate", "--target tow", 2, "no data of 'tow'; give --data tow=PATH"),
    ("negate", "--control two", 2, "needs a head of the target 'two' and of a control task; give both"),
    ("negate", "--target three", 2, "task vector of 'three' needs its expert, which was not given; known: two"),
    ("negate", "--heads prob", 2, "--heads must be probe | expert, got 'prob'; did you mean 'probe'?"),
    ("negate", "--heads expert", 2, "scores 'three' with its expert's head; give its expert too"),
    ("negate", "--keep 2", 2, "share of the control to keep must be in (0, 1], got 2.0"),
    ("negate", "--data two", 2, "expected --data TASK=PATH, got 'two'"),
    ("negate", "--grid 0.1,x", 2, "'0.1,x' is not a list of numbers"),
    ("negate", "--data five=/nowhere.csv --control five", 3, "/nowhere.csv does not exist"),
    ("analogy", "--of three:five", 2, "an analogy must be a:b::c"),
    ("analogy", "--of three:four::two", 2, "task vector of 'four' needs its expert, which was not given"),
    ("analogy", "--data two=x.csv", 2, "an analogy is for one task, got --data of 2"),
    ("analogy", "--of two:five::three", 4, "labels of task 'other' are not those of its expert"),
    ("analogy", "--grid -1", 2, "a grid must hold positive numbers, got -1"),
]


@pytest.fixture
def places(
    berts: Path, tables: Path, merged_berts: Path, tuned: Path, word_tables: Path, tmp_path: Path
) -> dict[str, Path]:
    return {
        "berts": berts,
        "tables": tables,
        "merged": merged_berts,
        "tuned": tuned,
        "words": word_tables,
        "out": tmp_path / "out",
    }


@pytest.fixture(autouse=True)
def _no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**options: object) -> None:
        raise AssertionError("it was built")

    monkeypatch.setattr(digits, "build", build)


@pytest.mark.parametrize(("start", "more", "code", "message"), REFUSALS)
def test_refusals(start: str, more: str, code: int, message: str, places: dict[str, Path]) -> None:
    assert message in refused(*shlex.split(f"{STARTS[start]} {more}".format(**places)), code=code)
    assert not places["out"].exists()


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    return subprocess.run([sys.executable, "-m", "orthomerge", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("mrge", 2, "No such command 'mrge'. Did you mean 'merge'?\nTry: orthomerge -h"),
        ("merge --methd ties", 2, "'--method'"),
        ("align", 2, "Missing argument 'MODEL'"),
        ("inspect /nowhere", 3, "/nowhere"),
    ],
)
def test_a_message_alone_and_an_exit_code(words: str, code: int, message: str) -> None:
    ended = start(*words.split())
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith("orthomerge: ")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_traceback_for_who_asks_for_it() -> None:
    ended = start("inspect", "/nowhere", "-v")
    assert ended.returncode == 3
    assert "Traceback" in ended.stderr
    assert start("-V").stdout == f"orthomerge {orthomerge.__version__}\n"
    assert "Usage: orthomerge COMMAND" in start().stderr
