"""No command touches the network unless a hub id is given: every call of the process is watched, native code too."""

from __future__ import annotations

from pathlib import Path

from tests.faults.injection import Injector
from tests.faults.tiny import TASKS, commands, data_words


def every_command(folder: Path, root: Path, merged: Path) -> list[list[str]]:
    """List what a user does with folders of their own, from the plan to the page."""
    data = data_words(folder)
    experts = [word for task in TASKS for word in ("--expert", f"{task}={folder / task}")]
    by_name, quick = commands(folder, merged), ["--device", "cpu", "--out", str(root / "run"), "--points", "0"]
    return [
        *([*words, "--out", str(root / name)] for name, words in by_name.items()),
        ["merge", *by_name["merge"][1:-3], "--out", str(root / "plan"), "--dry-run"],
        ["inspect", str(folder / "two")],
        ["list", "methods"],
        ["inspect", str(root / "merge"), "--verify"],
        ["evaluate", str(root / "merge"), *data, *experts, "--device", "cpu", "--out", str(root / "run")],
        ["diagnose", str(root / "merge"), *data, *experts, "--base", str(folder / "base"), *quick, "--layers", "8"],
        ["report", str(root / "run"), "--out", str(root / "page.html")],
        ["export", str(root / "merge"), "--task", "two", "--out", str(root / "export")],
    ]  # fmt: skip


def test_no_command_asks_for_the_network(injected: Injector, experts: Path, merged: Path) -> None:
    root = injected.reset()
    for words in every_command(experts, root, merged):
        ran = injected.run(words)
        assert ran.code == 0, (words, ran.err)
        assert [path for kind, path in ran.calls if kind == "network"] == [], words
    assert [call for call in injected.warm_calls() if call.startswith("network")] == []
    ran = injected.run(["inspect", "somebody/something"])  # what is asked for is asked for
    assert ran.code == 3
    assert ("network", "huggingface.co") in ran.calls
