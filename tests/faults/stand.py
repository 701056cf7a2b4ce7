"""A command under test: its process, a place that is reset before every run, and what must be so after one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.aligning import contents
from tests.faults.injection import Injector, Ran, What
from tests.faults.tiny import commands

from orthomerge.files.folders import MANIFEST
from orthomerge.models.saved import verify_folder

STATE = (".out.fitting", ".out.fitting/.orthomerge-state", ".out.fitting/state.pt")  # from which a fit goes on
_KEPT = re.compile(r"out(/.*)?|tmp|cache(/features(/[0-9a-f]{64}\.safetensors)?)?")


def outcome(folder: Path) -> dict[str, bytes]:
    """Every file by name. A file counts as the link that it stands for where none can be made."""
    files = contents(folder)
    if MANIFEST in files:
        manifest = json.loads(files[MANIFEST])
        for row in manifest["files"].values():
            row.pop("link", None)
        files[MANIFEST] = json.dumps(manifest).encode()
    return files


@dataclass(frozen=True)
class Scenario:
    """What happens to a command. `over`: an older output is there and `--force` is given."""

    what: What
    over: bool = False
    swaps: bool = True


@dataclass(frozen=True)
class Stand:
    """`older`: an output of the same command with another seed; `new`: the bytes of the one that it makes."""

    name: str
    injector: Injector
    words: list[str]
    older: Path
    new: dict[str, bytes]

    @property
    def out(self) -> Path:
        return self.injector.root / "out"

    def reset(self, scenario: Scenario) -> dict[str, bytes] | None:
        """As before the command; gives the bytes of the output that is there."""
        self.injector.reset()
        if not scenario.over:
            return None
        shutil.copytree(self.older, self.out)
        return outcome(self.out)

    def run(self, scenario: Scenario, *, k: int = 0, code: int = 0) -> Ran:
        words = [*self.words, *(["--force"] if scenario.over else [])]
        return self.injector.run(words, what=scenario.what, k=k, code=code, swaps=scenario.swaps)

    def counted(self, scenario: Scenario) -> Ran:
        """A run in which nothing happens; it must be right."""
        self.reset(scenario)
        ran = self.run(replace(scenario, what="count"))
        assert (ran.code, self.output() == self.new, self.left()) == (0, True, []), ran.err
        return ran

    def output(self) -> dict[str, bytes] | None:
        return outcome(self.out) if os.path.lexists(self.out) else None

    def left(self) -> list[str]:
        """Whatever is there besides the output and whole entries of the cache."""
        root = self.injector.root
        names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))]
        return [name for name in names if not _KEPT.fullmatch(name)]

    def traces(self) -> list[str]:
        """What the next run may meet: names beside the output, the state of a fit, entries of the cache."""
        root = self.injector.root
        names = [path.relative_to(root).as_posix() for path in (*root.iterdir(), *root.glob(".out.fitting/*"))]
        kinds = sorted(re.sub(r"\.[0-9a-f]{16}\.|-[a-z0-9_]{8}$", ".*.", name) for name in names)
        return [*kinds, *sorted(path.suffix for path in root.glob("cache/features/*"))]

    def broken(self, scenario: Scenario, before: dict[str, bytes] | None) -> Iterator[str]:
        """The output must be absent, old or complete; with two renames, the old one may stand aside after a kill."""
        now = self.output()
        if now == self.new:
            yield from verify_folder(self.out)
        elif now != before:
            aside = next(self.injector.root.glob(".out.orthomerge-????????/old"), None)
            stands = aside is not None and outcome(aside) == before
            if now is not None or scenario.swaps or scenario.what != "torn" or not stands:
                yield "the output is broken" if now is not None else "the older output is gone"

    def again(self, scenario: Scenario) -> Iterator[str]:
        """The same command once more: it makes the output, unless that is there, and clears up."""
        done = self.output() == self.new
        ran = self.run(replace(scenario, what="count"))
        if ran.code and not (done and ran.code == 5 and "exists already" in ran.err):
            yield f"the same command again: {ran.code} {ran.err}"
        if self.output() != self.new:
            yield "the same command again gives other bytes"
        if not ran.code and (left := self.left()):
            yield f"the same command again did not clear up: {left}"


def stands_for(process: Injector, experts: Path, merged: Path) -> dict[str, Stand]:
    """A stand for each of the commands of `tiny`; all share one process."""
    stands = {}
    for name, words in commands(experts, merged).items():
        older, out = process.root.parent / f"older-{name}", process.reset() / "out"
        stand = Stand(name, process, [*words, "--out", str(out)], older, {})
        ran = stand.run(Scenario("count"))
        assert ran.code == 0, ran.err
        stands[name] = replace(stand, new=outcome(out))
        assert stands[name].new != outcome(older)
    return stands
