"""The command itself, run on copies of small checkpoints that each test may spoil as it likes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthomerge.cli.app import main

EXPERTS = ("two", "three", "five")


@dataclass
class Models:
    """A base and three experts in a folder, and a place for the result."""

    folder: Path
    experts: list[str] = field(default_factory=lambda: list(EXPERTS))

    @property
    def out(self) -> Path:
        return self.folder / "results" / "out"

    def weights(self, name: str) -> Path:
        return self.folder / name / "model.safetensors"

    def change(self, name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Rewrite a checkpoint's tensors."""
        tensors = load_file(self.weights(name))
        edit(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, self.weights(name))

    def configure(self, name: str, **changes: Any) -> None:
        path = self.folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def command(self, *more: str, command: str = "merge", method: str = "task_arithmetic") -> list[str]:
        experts = [word for name in self.experts for word in ("--expert", f"{name}={self.folder / name}")]
        quiet = ["--quiet"] if command == "merge" else []
        words = [command, "--base", str(self.folder / "base"), *experts, "--method", method]
        return [*words, "--out", str(self.out), *quiet, *more]

    def left(self) -> list[str]:
        """What lies where the result should be."""
        return sorted(path.name for path in self.out.parent.iterdir()) if self.out.parent.exists() else []


@pytest.fixture
def models(berts: Path, tmp_path: Path) -> Models:
    folder = tmp_path / "models"
    shutil.copytree(berts, folder)
    return Models(folder)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[list[str]], Ended]]:
    """`run(words)`: the program's own `main`, in this process: exit code, standard output, standard error."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def runner(words: list[str]) -> Ended:
        monkeypatch.setattr(sys, "argv", ["orthomerge", *words])
        capfd.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        else:
            code = 0
        return Ended(code, *capfd.readouterr())

    yield runner
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """`start(words)`: the program in a process of its own."""

    def starter(words: list[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "orthomerge.cli.app", *words], text=True, env=environment, **{**pipes, **options}
        )

    return starter


@pytest.fixture
def refused(models: Models, run: Callable[[list[str]], Ended]) -> Callable[..., str]:
    """`refused(code, *parts)`: the merge ends with that code and a message with these parts, and leaves nothing."""

    def check(code: int, *parts: str, words: list[str] | None = None) -> str:
        before = models.left()
        ended = run(words if words is not None else models.command())
        message = ended.err
        assert ended.code == code, (ended.code, message)
        assert "Traceback" not in message
        assert message.startswith("orthomerge: ")
        for part in parts:
            assert part in message, (part, message)
        assert models.left() == before
        return message

    return check
