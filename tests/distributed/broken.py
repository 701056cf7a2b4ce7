"""The command, with something that goes wrong in one process at step 4: what it is, $BREAK says."""

from __future__ import annotations

import os
import signal
from typing import Any

from orthomerge.cli.app import app
from orthomerge.distributed.group import current_group
from orthomerge.distributed.launch import launch
from orthomerge.errors import NumericalError
from orthomerge.fitting.loop import Loop


def _break() -> None:
    wanted, _, rank = os.environ["BREAK"].partition(" ")
    if int(rank) != current_group().rank:
        return
    if wanted == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if wanted == "raise":
        raise NumericalError("the moon is not finite")


def main() -> None:
    share = Loop._share

    def broken(self: Any, step: int) -> float:
        if step == 4:
            _break()
        return share(self, step)

    Loop._share = broken  # type: ignore[method-assign]
    launch(app)


if __name__ == "__main__":
    main()
