"""Whole commands side by side: `mergekit-yaml` and `orthomerge merge` on three experts of BERT-base's size.

    python benchmarks/merge.py [--runs N] [--methods average ties ...] [--against COMMIT]

Every method is run N times by each tool in turn, after a warm-up of the page cache; the median is shown. With
`--against`, the other tool is orthomerge itself as of COMMIT, and mergekit is not needed. Exit code 1 when a bar is
missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import (
    ROOT,
    Usage,
    describe_run,
    ensure_mergekit,
    measure,
    source_of,
    table,
    write_result,
)
from benchmarks.experts import CLASSES, FOLDER

MEMORY_BAR = 0.35
AGAINST_BAR = 1.05
NOTES = f"""\
Whole commands, from start to exit, median of the runs, mergekit's first: seconds of wall and CPU time (user and
system), and peak memory (largest resident set; *anonymous*: without pages of mapped files). A bar is the most that our
share of mergekit's may be; for memory it is {MEMORY_BAR}. Three experts of BERT-base's size (438 MB each, float32) and
their base. Ours keep heads of 2, 3 and 5 classes; mergekit refuses those, and merges the same encoders under heads of 2
classes each. Ours also hashes all inputs, syncs the output, and reads it back."""

AGAINST_NOTES = f"""\
Whole commands of the same interpreter with the sources of two commits, in turn, median of the runs: CPU time (user and
system) and peak memory (largest resident set), first of the other commit, then of this one. The ratio may be at most
{AGAINST_BAR}. Three experts of BERT-base's size (438 MB each, float32) and their base."""


@dataclass(frozen=True)
class Bar:
    """One comparison: mergekit's method and options a model, ours with its options, and the bar for CPU time."""

    name: str
    theirs: str
    own: dict[str, float]
    ours: tuple[tuple[str, tuple[str, ...]], ...]
    cpu: float


_SCALE = ("scale=0.3",)
_WEIGHTS = ("weights=[0.3, 0.3, 0.3]",)
BARS = (
    Bar("average", "linear", {"weight": 1.0}, (("average", ()),), 0.4),
    Bar("task_arithmetic", "task_arithmetic", {"weight": 0.3}, (("task_arithmetic", _SCALE),), 0.4),
    Bar(
        "ties",
        "ties",
        {"weight": 0.3, "density": 0.5},
        (("ties@mergekit", ("density=0.5", *_WEIGHTS)), ("ties", ("density=0.5", *_SCALE))),
        0.18,
    ),
    Bar(
        "dare_ties",
        "dare_ties",
        {"weight": 0.3, "density": 0.5},
        (("dare_ties@mergekit", ("density=0.5", *_WEIGHTS)), ("dare_ties", ("drop=0.5", "density=0.2", *_SCALE))),
        0.45,
    ),
)


def mergekit_command(bar: Bar, program: Path, out: Path) -> list[str | Path]:
    """Write mergekit's config and say how to run it."""
    models = FOLDER / "mergekit"
    document = {
        "merge_method": bar.theirs,
        "models": [{"model": str(models / expert), "parameters": bar.own} for expert in CLASSES],
        "dtype": "float32",
    }
    if bar.theirs != "linear":
        document["base_model"] = str(models / "base")
    config = FOLDER / f"{bar.name}.yml"
    config.write_text(yaml.safe_dump(document))
    return [program, config, out]


def our_command(method: str, settings: Sequence[str], out: Path) -> list[str | Path]:
    """Write a recipe, which every commit reads, and say how to merge it."""
    models = FOLDER / "ours"
    document = {
        "base": str(models / "base"),
        "experts": {expert: str(models / expert) for expert in CLASSES},
        "method": method,
        "parameters": {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in settings)},
    }
    recipe = FOLDER / f"{method}.yaml"
    recipe.write_text(yaml.safe_dump(document))
    return [sys.executable, "-m", "orthomerge", "merge", recipe, "--out", out]


def measured(name: str, command: list[str | Path], out: Path, source: Path | None = None) -> Usage:
    """One run into a folder that is not there, with nothing left to be written from before."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    used = measure(command, source=source)
    shutil.rmtree(out, ignore_errors=True)
    print(f"  {name}: {used.wall:.1f} s wall, {used.cpu:.1f} s CPU, {used.rss / 1e6:.0f} MB", flush=True)
    return used


def middle(runs: list[Usage]) -> Usage:
    """The median of each figure."""
    wall, cpu, rss, anonymous = (median(figures) for figures in zip(*map(astuple, runs), strict=True))
    return Usage(wall, cpu, int(rss), int(anonymous))


def floor(runs: int) -> Usage:
    """What moving the bytes costs: read the four inputs, copy one."""
    files = [str(FOLDER / "ours" / name / "model.safetensors") for name in ("base", *CLASSES)]
    out = FOLDER / "copy"
    command: list[str | Path] = ["sh", "-c", 'out=$1; shift; cat "$@" > /dev/null; cp "$1" "$out"', "cp", out, *files]
    found = []
    for _ in range(runs):
        found.append(measured("cp", command, out))
        out.unlink()
    return middle(found)


def row(bar: Bar, method: str, theirs: Usage, ours: Usage, copied: Usage) -> tuple[list[str], bool]:
    cpu, memory = ours.cpu / theirs.cpu, ours.rss / theirs.rss
    within = cpu <= bar.cpu and memory <= MEMORY_BAR
    cells = [
        method,
        f"{theirs.wall:.1f} / {ours.wall:.1f}",
        f"{theirs.cpu:.1f} / {ours.cpu:.1f}",
        f"{cpu:.2f}",
        f"{bar.cpu}",
        f"{theirs.rss / 1e6:.0f} / {ours.rss / 1e6:.0f}",
        f"{memory:.2f}",
        f"{ours.anonymous / 1e6:.0f}",
        f"{ours.cpu / copied.cpu:.1f}",
        "within" if within else "MISSED",
    ]
    return cells, within


def compare_with_mergekit(bars: Sequence[Bar], runs: int) -> bool:
    """Measure both tools, write the table, and say whether every bar is met."""
    mergekit = ensure_mergekit()
    described = describe_run(mergekit=mergekit)
    prepare()
    copied = floor(runs)
    rows, good = [], True
    out = FOLDER / "out"
    for bar in bars:
        print(bar.name, flush=True)
        commands = {"mergekit": mergekit_command(bar, mergekit / "mergekit-yaml", out)}
        commands |= {method: our_command(method, settings, out) for method, settings in bar.ours}
        usages: dict[str, list[Usage]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                usages[name].append(measured(name, command, out))
        for method, _ in bar.ours:
            cells, within = row(bar, method, middle(usages["mergekit"]), middle(usages[method]), copied)
            rows.append(cells)
            good &= within
    header = ["method", "wall s", "CPU s", "CPU share", "bar", "peak MB", "memory share"]
    shown = table([*header, "ours anonymous MB", "CPU times cp", "verdict"], rows)
    bytes_moved = (
        f"Reading the four inputs and copying one (`cat`, `cp`): {copied.wall:.2f} s wall, {copied.cpu:.2f} s CPU."
    )
    result = f"{shown}\n\n{bytes_moved}"
    print(result)
    print(
        write_result("merge", {"# Speed and memory beside mergekit": NOTES, "## Run": described, "## Result": result})
    )
    return good


def compare_with_commit(bars: Sequence[Bar], runs: int, other: str) -> bool:
    """Measure the sources of another commit and these, write the table, and say whether every ratio is within the bar.

    Which of the two comes first changes from run to run.
    """
    described = describe_run()
    prepare()
    out, rows, good = FOLDER / "out", [], True
    with source_of(other, FOLDER / "against") as theirs:
        sources = {other: theirs, "here": ROOT / "src"}
        for method, settings in (each for bar in bars for each in bar.ours):
            print(method, flush=True)
            usages: dict[str, list[Usage]] = {name: [] for name in sources}
            for number in range(runs):
                for name in sorted(sources, reverse=number % 2 == 1):
                    usages[name].append(measured(name, our_command(method, settings, out), out, sources[name]))
            before, now = middle(usages[other]), middle(usages["here"])
            cpu, memory = now.cpu / before.cpu, now.rss / before.rss
            within = max(cpu, memory) <= AGAINST_BAR
            good &= within
            seconds = f"{before.cpu:.2f} / {now.cpu:.2f}"
            megabytes = f"{before.rss / 1e6:.0f} / {now.rss / 1e6:.0f}"
            verdict = "within" if within else "MISSED"
            rows.append([method, seconds, f"{cpu:.3f}", megabytes, f"{memory:.3f}", verdict])
    shown = table(["method", "CPU s", "CPU ratio", "peak MB", "memory ratio", "verdict"], rows)
    print(shown)
    title = f"# Data-free merges beside those of {other}"
    print(write_result("against", {title: AGAINST_NOTES, "## Run": described, "## Result": shown}))
    return good


def prepare() -> None:
    """Make the models and read them once."""
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "experts.py")], check=True)
    print("reading everything once", flush=True)
    for path in FOLDER.glob("*/*/model.safetensors"):
        subprocess.run(["cat", str(path)], stdout=subprocess.DEVNULL, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each command (3)")
    parser.add_argument("--methods", nargs="+", choices=[bar.name for bar in BARS], help="only these")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit of orthomerge, not with mergekit")
    arguments = parser.parse_args()
    bars = [bar for bar in BARS if not arguments.methods or bar.name in arguments.methods]
    if arguments.against:
        return int(not compare_with_commit(bars, arguments.runs, arguments.against))
    return int(not compare_with_mergekit(bars, arguments.runs))


if __name__ == "__main__":
    raise SystemExit(main())
