"""Commands run in this process, and children that answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from orthomerge.cli.app import app
from orthomerge.core.errors import OrthomergeError


def call(*words: object, code: int = 0) -> Result:
    """Run a command; its exit code is that of `main`."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    error = result.exception
    if isinstance(error, OrthomergeError):
        assert error.exit_code == code, str(error)
    else:
        assert error is None or isinstance(error, SystemExit), repr(error)
        assert result.exit_code == code, result.output
    return result


def refused(*words: object, code: int) -> str:
    """Run a command that is refused, and return its message."""
    result = call(*words, code=code)
    return str(result.exception) if isinstance(result.exception, OrthomergeError) else result.output


@contextmanager
def child(words: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Callable[[object], Any]]:
    """Start `python WORDS` in a folder: a process that answers each line of JSON with one, asked by what this gives."""
    command, settings, pipe = [sys.executable, *words], {**os.environ, **environment}, subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=settings, text=True, stdin=pipe, stdout=pipe) as process:

        def ask(question: object) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            answer = ""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the child ended ({process.wait()}) at {question}")
            return json.loads(answer)

        yield ask
