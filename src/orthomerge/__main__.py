"""`python -m orthomerge`: the command."""

from __future__ import annotations

if __name__ == "__main__":
    from orthomerge.cli.app import run

    run()
