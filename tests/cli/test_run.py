"""`orthomerge run` from the command line: what it prints, a real kill, and the example."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.berts import contents, write_tables
from tests.calling import call, refused
from tests.runs.making import PLAIN, lay_out

from orthomerge.models.saved import verify_folder

ROOT = Path(__file__).parents[2]


def test_the_example(berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copyfile(ROOT / "examples" / "run.yaml", tmp_path / "run.yaml")
    write_tables(tmp_path)
    shutil.copytree(berts / "base", tmp_path / "base")
    for task, name in (("mood", "two"), ("topic", "three")):
        shutil.copytree(berts / name, tmp_path / task)
        (tmp_path / f"{name}.csv").rename(tmp_path / f"{task}.csv")
    monkeypatch.chdir(tmp_path)
    result = call("run", "run.yaml")
    lines = result.stderr.splitlines()
    assert lines[0] == "[1/5] merge"
    assert any(line.startswith("[5/5] report: done in ") for line in lines)
    assert "[5/5] report: drawing" in result.stderr
    assert "Inductive: inputs from train or val, scored on test" in result.stdout
    assert "The experts reach" in result.stdout
    assert result.stdout.endswith("model: runs/run/models/ties-auto\nreport: runs/run/report.html\n")
    assert verify_folder(Path("runs/run/models/ties-auto")) == []
    assert "Mood and topic in one encoder" in Path("runs/run/report.html").read_text()
    document = json.loads(call("run", tmp_path / "run.yaml", "--out", "runs/run", "--json").stdout)
    assert {stage["state"] for stage in document["stages"].values()} == {"found"}
    assert document["evaluation"]["tasks"].keys() == {"mood", "topic"}
    again = call("run", "run.yaml", "--quiet")
    assert again.stderr == ""
    assert "nothing to do: everything is done" in again.stdout


KILLED = """
import os, signal, sys
from orthomerge.cli.app import main
write = sys.stderr.write
def killing(text):
    write(text)
    if "[2/2] evaluate: encoding two" in text:
        os.kill(os.getpid(), signal.SIGKILL)
sys.stderr.write = killing
main()
"""


def test_a_real_kill(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, PLAIN)
    command = [sys.executable, "-c", KILLED, "run", str(recipe), "--out", str(tmp_path / "run")]
    killed = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    result = call("run", recipe, "--out", tmp_path / "run")
    assert "[1/2] merge: found, unchanged" in result.stderr
    assert "done in" in result.stdout
    whole = call("run", recipe, "--out", tmp_path / "other", "--quiet")
    assert "merge, evaluate" in whole.stdout
    ours, theirs = contents(tmp_path / "run"), contents(tmp_path / "other")
    assert ours.keys() == theirs.keys()
    same = [name for name in ours if not name.endswith(("run.json", "entry.json"))]
    assert [name for name in same if ours[name] != theirs[name]] == []


def test_mistakes(berts: Path, tmp_path: Path) -> None:
    recipe = lay_out(berts, tmp_path, PLAIN.replace("protocols", "protcols"))
    assert "did you mean 'protocols'" in refused("run", recipe, "--out", tmp_path / "run", code=2)
    recipe.write_text(PLAIN + "out: base\n")
    assert refused("run", recipe, "--out", tmp_path / "run", "--quiet", code=5).startswith("the output")
