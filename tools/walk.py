"""Count what every command does on tiny inputs: what it opens, hashes and writes, and how many modules it enters.

    .venv/bin/python tools/walk.py [--static] [--only merge,fit,...] [--why plans] [--check]

Makes a BERT of two layers, two experts and two tables, runs each command in a process of its own under a profiler and
an audit hook, and prints one row per command:

  entered                   modules of orthomerge of which a function ran, imports apart
  recipes, plans, headers   calls of the functions in NAMES (edit it when they are renamed)
  hashed, written           megabytes that were hashed, and passed to write calls
  copies, at once           files as large as an encoder that ever lay in the work folder, and the most at one time

`--why EVENT` prints who called, call by call. `--check` exits with 1 if a number is above its target in TARGETS.
`--static` counts what needs no run, in seconds: lines, files, cycles, names (size.py).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import blake3
from tools import size

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "orthomerge"
# Functions by `module:qualname`, the module without "orthomerge.".
NAMES = {
    "recipes": "runs.recipe:Recipe.__post_init__",
    "plans": "models.sources:Opened._open",
    "headers": "files.safetensors:_header",
}
COLUMNS = ("entered", *NAMES, "hashed", "written", "copies", "at once")
# Upper bounds; what is not here is printed and not checked.
TARGETS: dict[str, dict[str, int]] = {
    "merge": {"entered": 30, "recipes": 1, "plans": 1, "headers": 6, "copies": 1, "at once": 1},
    "fit": {"entered": 60, "recipes": 1, "plans": 1, "headers": 8, "copies": 1, "at once": 1},
    "align": {"entered": 50, "recipes": 0, "plans": 1, "headers": 14, "copies": 1, "at once": 1},
    "evaluate": {"entered": 50, "recipes": 0, "plans": 1, "headers": 24, "copies": 0, "at once": 0},
    "diagnose": {"entered": 75, "recipes": 0, "plans": 1, "headers": 24, "copies": 0, "at once": 0},
    "report": {"entered": 28, "recipes": 0, "plans": 0, "headers": 0, "copies": 0},
    "run": {"entered": 100, "recipes": 1, "plans": 1, "headers": 40, "copies": 2, "at once": 2},
}
TASKS = {"two": 2, "three": 3}
RECIPE = """\
base: base
experts: {two: two, three: three}
method: task_arithmetic
parameters: {scale: 0.5}
align: {data: {two: two.csv, three: three.csv}, aligner: ridge}
evaluate: {data: {two: two.csv, three: three.csv}, protocols: [current, knn], device: cpu}
diagnose: {points: 0, layers: 0}
"""
_DATA = "--data two={world}/two.csv --data three={world}/three.csv --device cpu"
_EXPERTS = "{world}/two {world}/three --base {world}/base"
_QUICK = "--set steps=4 --set look=2 --set batch=4 --set copies=0"
# In order: later commands read what earlier ones wrote.
COMMANDS = {
    "merge": f"merge {_EXPERTS} --method ties --out merged -q",
    "fit": f"merge {_EXPERTS} {_DATA} {_QUICK} --out fitted -q",
    "align": f"align merged {_DATA} --out aligned -q",
    "evaluate": f"evaluate merged aligned {_DATA} --out run",
    "diagnose": f"diagnose merged {_DATA} --points 0 --out run",
    "report": "report run --out page.html",
    "run": "run {world}/recipe.yaml --out line -q",
}


def make_world(place: Path) -> None:
    """Write a base, two experts, a table of words for each, and a recipe with every section."""
    from tests.berts import write_berts, write_tables

    write_berts(place, TASKS, width=64, vocabulary=16000)
    write_tables(place, TASKS)
    (place / "recipe.yaml").write_text(RECIPE)


class Watch:
    """All counters of one process."""

    def __init__(self, work: Path, encoder: int) -> None:
        self.work, self.encoder = work, encoder
        self.events = {name: event for event, name in NAMES.items()}
        self.places: dict[CodeType, tuple[str, str] | None] = {}
        self.entered: set[str] = set()
        self.why: dict[str, list[str]] = collections.defaultdict(list)
        self.copies: set[tuple[int, int]] = set()
        self.most, self.hashed = 0, 0

    def place(self, code: CodeType) -> tuple[str, str] | None:
        """Module and qualified name of a code object of ours."""
        if code not in self.places:
            path = Path(code.co_filename)
            place = None
            if path.is_relative_to(PACKAGE):
                module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
                place = (module.removesuffix(".__init__"), code.co_qualname)
            self.places[code] = place
        return self.places[code]

    def callers(self, frame: FrameType) -> list[str]:
        """Module, line and function of every caller that is ours, innermost last."""
        lines = []
        current: FrameType | None = frame
        while current is not None:
            if (place := self.place(current.f_code)) is not None:
                lines.append(f"{place[0]}:{current.f_lineno} {place[1]}")
            current = current.f_back
        return lines[::-1]

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        place = self.place(frame.f_code) if event == "call" else None
        if place is None or place[1] == "<module>":
            return
        module, name = place
        # A function that runs while a module of ours is being imported does not count.
        if module not in self.entered and not any(line.endswith("<module>") for line in self.callers(frame)):
            self.entered.add(module)
        if counted := self.events.get(f"{module}:{name}"):
            self.why[counted].append("\n      ".join(self.callers(frame)))

    def audit(self, event: str, _: tuple[object, ...]) -> None:
        """Disk use has its peaks right before something is removed: count then."""
        if event in ("os.remove", "os.rename", "shutil.rmtree"):
            self.count_copies()

    def count_copies(self) -> None:
        """Files as large as an encoder that lie in the work folder now."""
        large = set()
        for folder, _, names in os.walk(self.work):
            for name in names:
                status = (Path(folder) / name).lstat()
                if name.endswith(".safetensors") and status.st_size >= 0.9 * self.encoder:
                    large.add((status.st_ino, status.st_mtime_ns))
        self.most = max(self.most, len(large))
        self.copies |= large

    def count_hashes(self) -> None:
        """Count what hash objects are fed that orthomerge makes."""
        for module, name in ((hashlib, "sha256"), (blake3, "blake3")):
            setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(*arguments: Any, **options: Any) -> Any:
            inner = maker(*arguments, **options)
            if self.place(sys._getframe(1).f_code) is None:  # noqa: SLF001 - the only way to know the caller
                return inner
            self.hashed += sum(len(part) for part in arguments if isinstance(part, bytes))
            return CountedHash(inner, self)

        return make


class CountedHash:
    """A hash object that adds up what it is fed."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self._inner, self._watch = inner, watch

    def update(self, data: Any, **options: Any) -> Any:
        self._watch.hashed += memoryview(data).nbytes
        return self._inner.update(data, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def walk(words: list[str], encoder: int, result: Path) -> None:
    """In a process of its own, in the work folder: run one command as a user would, and write what was counted."""
    watch = Watch(Path.cwd(), encoder)
    watch.count_copies()
    before = set(watch.copies)
    watch.count_hashes()

    def leave(code: int = 0) -> None:
        raise SystemExit(code)

    setattr(os, "_exit", leave)  # noqa: B010 - the command ends with it; typed as never returning
    sys.argv = ["orthomerge", *words]
    sys.addaudithook(watch.audit)
    threading.setprofile(watch.profile)
    sys.setprofile(watch.profile)
    code: object = 0
    try:
        from orthomerge.cli.app import main

        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    watch.count_copies()
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    numbers = {
        "entered": len(watch.entered),
        **{event: len(watch.why[event]) for event in NAMES},
        "hashed": round(watch.hashed / 1e6, 1),
        "written": round(int(io["wchar"]) / 1e6, 1),
        "copies": len(watch.copies - before),
        "at once": watch.most - len(before),
    }
    result.write_text(json.dumps({"code": code, "numbers": numbers, "why": watch.why}))


def run_walk(title: str, place: Path) -> dict[str, Any]:
    """Run one command in a process of its own and read what was counted."""
    world, result = place / "world", place / "result.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(place / "work"),
        "ORTHOMERGE_CACHE": str(place / "cache" / title),  # cold, so that the order of walks does not matter
    }
    encoder = (world / "base" / "model.safetensors").stat().st_size
    words = COMMANDS[title].format(world=world).split()
    call = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps([words, encoder, str(result)])]
    child = subprocess.run(call, env=environment, cwd=place / "work", capture_output=True, text=True, check=False)
    document: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"code": child.returncode}
    result.unlink(missing_ok=True)
    if document["code"] not in (0, None):
        sys.exit(f"{title}: the command ended with {document['code']}:\n{child.stdout[-2000:]}{child.stderr[-4000:]}")
    return document


def stale_names() -> list[str]:
    """Entries of NAMES whose function is not where they say."""
    stale = []
    for event, name in NAMES.items():
        module, _, qualname = name.partition(":")
        path = PACKAGE / (module.replace(".", "/") + ".py")
        if not path.is_file() or f"def {qualname.rpartition('.')[2]}(" not in path.read_text():
            stale.append(f"{event}: {name} is not in the source; edit NAMES")
    return stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COMMANDS), help="names of commands, with commas")
    parser.add_argument("--why", default="", help="an event of NAMES: print who called, call by call")
    parser.add_argument("--static", action="store_true", help="only count what needs no run")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        words, encoder, result = json.loads(arguments.child)
        walk(words, encoder, Path(result))
        return
    above = stale_names()
    if arguments.static:
        above += print_static()
    else:
        above += print_walks(arguments.only.split(","), arguments.why)
    if arguments.check:
        print("\n".join(above) or "every target is met")
        sys.exit(bool(above))


def print_static() -> list[str]:
    """Print what needs no run; gives the numbers above their targets."""
    above = []
    for name, number in size.static_numbers(PACKAGE).items():
        most = size.TARGETS[name]
        print(f"{name:28}{number:>8}{'-' if most is None else most:>10}")
        if most is not None and number > most:
            above.append(f"{name} is {number}, target {most}")
    return above


def print_walks(shown: list[str], why: str) -> list[str]:
    """Run all commands and print those that are asked for; gives the numbers above their targets."""
    above = []
    print(f"{'':10}" + "".join(f"{column:>10}" for column in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        place = Path(folder)
        for name in ("world", "work"):
            (place / name).mkdir()
        make_world(place / "world")
        for title in COMMANDS:
            document = run_walk(title, place)
            if title not in shown:
                continue
            numbers = document["numbers"]
            print(f"{title:10}" + "".join(f"{numbers[column]:>10}" for column in COLUMNS), flush=True)
            for count, stack in enumerate(document["why"].get(why, ()), 1):
                print(f"  {why} {count}:\n      {stack}")
            targets = TARGETS[title].items()
            above += [
                f"{title}: {name} is {numbers[name]}, target {most}" for name, most in targets if numbers[name] > most
            ]
    return above


if __name__ == "__main__":
    main()
