"""Help screens: what they say, how wide they are, and what they cost."""

from __future__ import annotations

import resource
import subprocess
import sys

import click
import pytest
from docs.generator.commands import command_tree
from syrupy.assertion import SnapshotAssertion
from tests.calling import call

from orthomerge.cli.app import app
from orthomerge.cli.flags import Command

HEAVY = ("torch", "transformers", "numpy", "yaml", "huggingface_hub", "safetensors", "rich")
COMMANDS = {" ".join(words): command for words, command in command_tree(app)}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("words", ["", *COMMANDS])
def test_screen(words: str, snapshot: SnapshotAssertion) -> None:
    text = call(*words.split(), "-h").stdout
    assert text == call(*words.split(), "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert text == snapshot


@pytest.mark.parametrize("words", COMMANDS)
def test_example_and_defaults(words: str) -> None:
    """Every screen has an example that parses, and says what an option is if it is not given."""
    command = COMMANDS[words]
    assert isinstance(command, Command)
    for line in command.examples:
        assert line.startswith(f"{words} ")
        command.make_context("orthomerge", line.replace("'", "").removeprefix(words).split())
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag and not parameter.required:
            named = parameter.name in ("data", "suite", "settings", "task", "out")  # what is needed, or nothing at all
            assert named or "[default: " in (parameter.help or ""), parameter.opts


def test_it_imports_nothing_heavy() -> None:
    code = f"""
import sys
from orthomerge.cli.app import app
try:
    app(["merge", "--help"])
except SystemExit as done:
    assert done.code == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "Merge experts into one model" in done.stdout
    assert done.stderr.strip() == "[]"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
