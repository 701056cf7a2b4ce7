"""What a worker process runs: keys come in, one a line, and what became of each goes out.

    python -m orthomerge.running.jobs.worker RUN IN OUT

IN and OUT are open file descriptors, so that whatever a job prints disturbs nobody.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from orthomerge.errors import OrthomergeError
from orthomerge.running.jobs.doing import do
from orthomerge.running.jobs.executors import told_failure

__all__ = ["main"]


def main() -> None:
    """Work until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    run = Path(sys.argv[1])
    with os.fdopen(int(sys.argv[2])) as keys, os.fdopen(int(sys.argv[3]), "w", buffering=1) as answers:
        for line in keys:
            answers.write(json.dumps(_answer(run, line.strip())) + "\n")


def _answer(run: Path, key: str) -> dict[str, object]:
    try:
        return {"done": asdict(do(run, key))}
    except OrthomergeError as error:
        return {"failed": list(told_failure(error))}


if __name__ == "__main__":
    main()
    os._exit(0)
