"""All golden commands in one child process, and what each of them left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.golden.commands import COMMANDS, Command
from tests.golden.driver import Driver, Result, start
from tests.golden.observe import Value, observe


@dataclass(frozen=True)
class Outcome:
    """One command that ran. `complaints`: how its exit code or its text is not as the table of commands says."""

    command: Command
    result: Result
    values: dict[str, Value]
    complaints: tuple[str, ...]


def play(
    source: Path, place: Path, *, old: bool = False, say: Callable[[str], None] = lambda text: None
) -> dict[str, Outcome]:
    """Run every command with the orthomerge of the folder `source`, in the folder `place`, which holds `world/`.

    `old`: use the command lines for a commit that had other names.
    """
    outcomes = {}
    with start(source, place) as driver:
        for command in COMMANDS:
            outcome = _run(driver, command, old=old)
            outcomes[command.name] = outcome
            say(f"{command.name}: exit {outcome.result.exit}, {outcome.result.seconds:.2f} CPU s")
    return outcomes


def _run(driver: Driver, command: Command, *, old: bool) -> Outcome:
    result = driver.run(command.argv(old=old))
    model = None if command.model is None else driver.place / command.model
    run = None if command.run is None else driver.place / command.run
    complaints = []
    if result.exit != command.exit:
        complaints.append(f"exit code {result.exit} instead of {command.exit}: {result.text[-600:]}")
    missing = [pattern for pattern in command.says if not re.search(pattern, result.text)]
    if missing:
        complaints.append(f"says nothing like {missing}: {result.text[-600:]}")
    if "Traceback (most recent call last)" in result.text:
        complaints.append("shows a traceback")
    if command.exit == 0:
        values = observe(model, run)
        if (model or run) and not values:
            complaints.append("left nothing behind")
    else:
        values = {}
        complaints += [f"left {path.name} behind" for path in (model, run) if path is not None and path.exists()]
    return Outcome(command, result, values, tuple(complaints))
