"""The committed values: tests/golden/values.json, one line per value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden.compare import Print, compare_prints, fingerprint, summary
from tests.golden.session import Outcome

_FILE = Path(__file__).with_name("values.json")
_SAME = "encoder: same as"  # a command whose encoder is that of an earlier one


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
    """Command to fingerprints."""
    values: dict[str, dict[str, Any]] = json.loads(_FILE.read_text())
    for name, prints in values.items():
        same = prints.pop(_SAME, None)
        if same is not None:
            encoder = {key: value for key, value in values[same].items() if key.startswith("encoder/")}
            values[name] = {**encoder, **prints}
    return values


def differences(outcomes: Mapping[str, Outcome]) -> dict[str, list[str]]:
    """Where what happened is not what is committed, by command."""
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
