"""Run commands of orthomerge one after another in one child process, so that torch is imported once.

The child knows nothing of orthomerge but `python -m orthomerge`: the same driver runs the source of another commit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    exit: int
    output: str
    errors: str

    @property
    def text(self) -> str:
        """Standard output and standard error, in words parted by one space: wrapped lines match like others."""
        return " ".join(f"{self.output}\n{self.errors}".split())


@dataclass(frozen=True)
class Driver:
    """A running child; commands start in `place`."""

    ask: Callable[[object], Any]
    place: Path

    def run(self, argv: Sequence[str]) -> Result:
        """Run `orthomerge ARGV` and wait for it."""
        return Result(**self.ask(list(argv)))


@contextlib.contextmanager
def start(source: Path, place: Path) -> Iterator[Driver]:
    """Start a child that imports orthomerge from the folder `source` and works in the folder `place`."""
    from tests.calling import child  # the child itself, which runs this file, must not import it

    environment = {
        "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200",
        "TOKENIZERS_PARALLELISM": "false", "ORTHOMERGE_CACHE": str(place / ".cache"),
    }  # fmt: skip
    with child([str(Path(__file__).resolve())], place, environment) as ask:
        yield Driver(ask, place)


def _serve(questions: IO[str], answers: IO[str]) -> None:
    """In the child: one command per line."""
    import runpy
    import signal

    def leave(code: int = 0) -> None:
        raise SystemExit(code)

    os._exit = leave  # type: ignore[assignment]  # the command may end its process without tidying up
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for line in questions:
        sys.argv = ["orthomerge", *json.loads(line)]
        output, errors, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                runpy.run_module("orthomerge", run_name="__main__")
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:  # noqa: BLE001 - a traceback is a result too: the one that users must never see
                import traceback

                code = 1
                errors.write(traceback.format_exc())
        for number, handler in handlers.items():
            signal.signal(number, handler)
        result = {"exit": code, "output": output.getvalue(), "errors": errors.getvalue()}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    # Whatever libraries print to the real standard output goes to standard error; answers have a pipe of their own.
    _pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, _pipe)
