"""Outcomes of all golden commands beside the committed values: tests/golden/values.json, one line per value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden.commands import COMMANDS, Command
from tests.golden.compare import Print, compare_prints, fingerprint, summary
from tests.golden.driver import Driver, Result
from tests.golden.observe import Value, observe

_FILE = Path(__file__).with_name("values.json")
_SAME = "encoder: same as"  # a command whose encoder is that of an earlier one


@dataclass(frozen=True)
class Outcome:
    """One command that ran. `complaints`: how its exit code or its text is not as the table of commands says."""

    command: Command
    result: Result
    values: dict[str, Value]
    complaints: tuple[str, ...]


def play(driver: Driver, *, old: bool = False) -> dict[str, Outcome]:
    """Run every command; `old`: as it was written for commit 719347c."""
    return {command.name: _run(driver, command, old=old) for command in COMMANDS}


def _run(driver: Driver, command: Command, *, old: bool) -> Outcome:
    result = driver.run(command.argv(old=old))
    model = None if command.model is None else driver.place / command.model
    run = None if command.run is None else driver.place / command.run
    complaints = [] if result.exit == command.exit else [f"exit code {result.exit} instead of {command.exit}"]
    complaints += [f"says nothing like {each}" for each in command.says if not re.search(each, result.text)]
    complaints += ["shows a traceback"] if "Traceback (most recent call last)" in result.text else []
    values = observe(model, run) if command.exit == 0 else {}
    if command.exit == 0 and (model or run) and not values:
        complaints.append("left nothing behind")
    if command.exit:
        complaints += [f"left {path.name} behind" for path in (model, run) if path is not None and path.exists()]
    return Outcome(command, result, values, tuple(f"{each}: {result.text[-600:]}" for each in complaints))


def write_values(outcomes: Mapping[str, Outcome]) -> None:
    """Write the fingerprints of all values; an encoder that an earlier command wrote too is named, not repeated."""
    lines, encoders = [], dict[str, str]()
    for name, outcome in outcomes.items():
        prints: dict[str, Any] = {key: fingerprint(value) for key, value in outcome.values.items()}
        encoder = {key: value for key, value in prints.items() if key.startswith("encoder/")}
        first = encoders.setdefault(json.dumps(encoder), name) if encoder else name
        if first != name:
            prints = {_SAME: first} | {key: value for key, value in prints.items() if key not in encoder}
        inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in prints.items())
        lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}" if inner else f" {json.dumps(name)}: {{}}")
    _FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_values() -> dict[str, dict[str, Print]]:
    """Read the fingerprints of every command."""
    values: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
    for name, prints in values.items():
        same = prints.pop(_SAME, None)
        if same is not None:
            encoder = {key: value for key, value in values[same].items() if key.startswith("encoder/")}
            values[name] = {**encoder, **prints}
    return values


def differences(outcomes: Mapping[str, Outcome]) -> dict[str, list[str]]:
    """List, by command, where what happened is not what is committed."""
    expected, changes = read_values(), dict[str, list[str]]()
    for name in expected.keys() - outcomes.keys():
        changes[name] = ["is no command any more"]
    for name, outcome in outcomes.items():
        lines = list(outcome.complaints)
        if name not in expected:
            lines.append("has no committed values; run `python -m tests.golden --write`")
        elif values := compare_prints(expected[name], outcome.values, outcome.command.tolerance, outcome.command.noise):
            lines.append(summary(values, 6))
        if lines:
            changes[name] = lines
    return changes
