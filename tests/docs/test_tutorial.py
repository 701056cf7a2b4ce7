"""The tutorial's commands and code, run in their order on small checkpoints."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.berts import write_tables
from tests.docs.reading import ROOT, blocks

from orthomerge.cli.app import app


def _run(kind: str, text: str, names: dict[str, Any]) -> None:
    if kind == "python":
        exec(compile(text, "tutorial.md", "exec"), names)
    elif kind == "yaml":
        Path("recipe.yaml").write_text(text)
    elif kind == "bash":
        for line in text.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "orthomerge", line
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"


@pytest.mark.filterwarnings("default")  # of the libraries that a reader would see, too
def test_the_tutorial_does_what_it_says(berts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "cache"))
    for source, name, classes in (("base", "base", 0), ("two", "sentiment", 2), ("three", "topic", 3)):
        shutil.copytree(berts / source, tmp_path / name)
        if classes:
            write_tables(tmp_path, {source: classes}).joinpath(f"{source}.csv").rename(tmp_path / f"{name}.csv")
    names: dict[str, Any] = {}
    for kind, text in blocks(ROOT / "docs" / "tutorial.md"):
        _run(kind, text, names)
    for name in ("merged", "aligned", "merged-and-aligned", "sentiment-merged"):
        assert (tmp_path / name).is_dir(), name
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "run-of-recipe" / "report.html").is_file()
    assert [set(prediction) for prediction in names["predictions"]] == [{"sentiment", "topic"}] * 2
