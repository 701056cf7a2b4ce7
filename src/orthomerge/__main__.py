"""`python -m orthomerge`: the command; under torchrun, in all processes at once."""

from __future__ import annotations

from orthomerge.distributed.launch import launch, under_torchrun

__all__: list[str] = []

if __name__ == "__main__":
    if under_torchrun():
        from orthomerge.cli.app import app

        launch(app)
    from orthomerge.cli.app import run

    run()
