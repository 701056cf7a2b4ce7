"""What cutting a run into jobs costs, and what it needs in memory.

    python benchmarks/jobs.py [--jobs 10000] [--gigabytes 8] [--parts overhead merge] [--keep]

First, jobs that do nothing by every executor: seconds of wall and CPU time for each. Then a merge of synthetic bfloat16
models (three of the given size on disk, and the output) by two workers, each of which must stay under the bar: exit
code 1 if one does not, or if the output is not that of the same merge in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, offline, table, write_result

BAR = 1_500_000_000
FOLDER = ROOT / "runs" / "jobs"
EXECUTORS = ("serial", "process:2", "ray:2")
WIDTH, INNER, VOCABULARY = 4096, 11008, 32_000
HEADS = {"a": 2, "b": 3}
_LOOK = 0.1  # seconds between two looks at the processes
OVERHEAD = """\
Jobs that only leave one small file, none of which needs another: milliseconds for each, start and end of the executor
included. CPU time is that of all processes. A job is a folder and two files that are synced to disk in four steps;
*bare* does the same writes and syncs without orthomerge."""
MERGE = """\
`orthomerge run --plan-only`, then two `orthomerge work` side by side: `task_arithmetic` on a synthetic LLaMA-like base
and two experts in bfloat16. Peak: the largest resident set of each process (`getrusage`); the bar is {bar:.1f} GB. The
output has the same hash, file by file, as that of `orthomerge merge` in one process."""


def overhead(count: int) -> list[tuple[str, ...]]:
    """One row an executor."""
    rows: list[tuple[str, ...]] = [("bare", *_measured(["bare", str(count)], count))]
    for on in EXECUTORS:
        rows.append((on, *_measured(["overhead", on, str(count)], count)))
        print("  ".join(rows[-1]), flush=True)
    return rows


def _measured(words: list[str], count: int) -> tuple[str, str, str, str]:
    """Run a part of this file in a process of its own, and say what that and all processes below it cost.

    Not all of Ray's are waited for by whoever started them, so they are looked at while they run.
    """
    started, spent = time.perf_counter(), dict[int, float]()
    child = subprocess.Popen([sys.executable, __file__, "--only", *words], env=offline())
    while child.poll() is None:
        _look_below(child.pid, spent)
        time.sleep(_LOOK)
    wall, cpu = time.perf_counter() - started, sum(spent.values())
    if child.returncode:
        raise SystemExit(f"{words} failed with exit code {child.returncode}")
    return f"{wall:.1f}", f"{cpu:.1f}", f"{1000 * wall / count:.2f}", f"{1000 * cpu / count:.2f}"


def _look_below(root: int, spent: dict[int, float]) -> None:
    """Note the seconds of CPU time that a process and all below it have used so far."""
    ticks, parents = os.sysconf("SC_CLK_TCK"), dict[int, int]()
    used: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks
    for pid, seconds in used.items():
        above = pid
        while above and above != root and above not in spent:
            above = parents.get(above, 0)
        if above:
            spent[pid] = seconds


def only_bare(count: int) -> None:
    """The writes of a job, done by hand."""
    from orthomerge.checkpoints.replacing import sync

    folder = FOLDER / "bare"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(count):
        place = folder / f"{number}.tmp"
        place.mkdir()
        (place / "nothing").write_text(str(number))
        sync(place / "nothing")
        sync(place)
        place.rename(folder / str(number))
        with (folder / f"{number}.part").open("wb") as file:
            file.write(b"{}")
            file.flush()
            os.fsync(file.fileno())
        (folder / f"{number}.part").rename(folder / f"{number}.done")
        sync(folder)
    shutil.rmtree(folder)


def only_overhead(on: str, count: int) -> None:
    """Jobs that do nothing, by one executor."""
    from orthomerge.running.jobs.executors import executor_of
    from orthomerge.running.jobs.job import make_job
    from orthomerge.running.jobs.plan import Plan, write_plan
    from orthomerge.running.watching import Silent

    run = FOLDER / "nothing"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    jobs = [make_job("nothing", {"number": number}) for number in range(count)]
    write_plan(run, Plan(tuple(jobs)))
    done = executor_of(on).map(run, jobs, Silent())
    if len(done) != count:
        raise SystemExit(f"{on} did {len(done)} of {count} jobs")
    shutil.rmtree(run)


def make_models(gigabytes: float) -> None:
    """A base and two experts, written in pieces: a fixed run of noise, shifted from tensor to tensor and by model."""
    import torch

    from orthomerge.checkpoints.checkpoint import Spec
    from orthomerge.checkpoints.safetensors import encode_header
    from orthomerge.checkpoints.shards import plan_shards

    size = 1 << 24
    noise = torch.randn(2 * size, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    own = {name: torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate(HEADS, 1)}
    encoder = shapes(int(gigabytes * 1e9 / 2))
    for model in ("base", *HEADS):
        folder = FOLDER / model
        folder.mkdir(parents=True)
        head = {"score.weight": (HEADS[model], WIDTH)} if model in HEADS else {}
        shards = plan_shards({name: Spec(shape, "BF16") for name, shape in (encoder | head).items()}, 2_000_000_000)
        places: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
            places |= dict.fromkeys(shard, file.name)
            with file.open("wb") as out:
                out.write(encode_header(shard, {"format": "pt"}))
                for place, spec in enumerate(shard.values()):
                    for start in range(0, spec.numel, size):
                        shift = (place * 1_000_003 + start * 7) % size
                        piece = noise[shift : shift + min(size, spec.numel - start)]
                        if model in own:
                            piece = torch.add(piece, own[model][: len(piece)], alpha=0.002)
                        out.write(piece.bfloat16().view(torch.uint8).numpy().data)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shapes(elements: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an encoder of about so many elements, each layer as one of LLaMA-7B."""
    square, wide = (WIDTH, WIDTH), (INNER, WIDTH)
    layer: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    layer |= {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": (WIDTH, INNER)}
    layer |= {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
    each = 4 * WIDTH * WIDTH + 3 * INNER * WIDTH + 2 * WIDTH
    layers = max(1, round((elements - VOCABULARY * WIDTH) / each))
    names = {f"model.layers.{number}.{name}": shape for number in range(layers) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (VOCABULARY, WIDTH), **names, "model.norm.weight": (WIDTH,)}


def write_recipe() -> Path:
    """No family has these names, so the recipe says where encoder and head are."""
    experts = {name: {"path": name, "head": {"layers": ["score"]}} for name in HEADS}
    recipe = {"base": "base", "experts": experts, "method": "task_arithmetic", "family": "generic"}
    path = FOLDER / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "encoder_prefix": "model.", "max_shard_size": "1GB"}))
    return path


def merge() -> tuple[list[tuple[str, ...]], bool]:
    """One row a process, and whether all were small and the bytes the same."""
    recipe, run, program = write_recipe(), FOLDER / "run", Path(sys.executable).parent / "orthomerge"
    shutil.rmtree(run, ignore_errors=True)
    rows, good = list[tuple[str, ...]](), True
    commands: dict[str, list[list[str | Path]]] = {
        "plan (hashes all inputs)": [[program, "run", recipe, "--run", run, "--plan-only"]],
        "worker": [[program, "work", run, "--quiet"]] * 2,
    }
    for name, some in commands.items():
        for number, (wall, cpu, peak) in enumerate(_side_by_side(some), 1):
            within = peak <= BAR
            good &= within
            title = f"{name} {number} of {len(some)}" if len(some) > 1 else name
            rows.append((title, f"{wall:.0f}", f"{cpu:.0f}", f"{peak / 1e6:.0f}", "within" if within else "MISSED"))
            print("  ".join(rows[-1]), flush=True)
    ours = _manifest_files(run / "models" / "task_arithmetic")
    shutil.rmtree(run)
    (wall, cpu, peak), *_ = _side_by_side([[program, "merge", recipe, "--out", FOLDER / "plain", "--quiet"]])
    same = ours == _manifest_files(FOLDER / "plain")
    shutil.rmtree(FOLDER / "plain")
    verdict = "the same bytes" if same else "OTHER BYTES"
    rows.append(("orthomerge merge, one process", f"{wall:.0f}", f"{cpu:.0f}", f"{peak / 1e6:.0f}", verdict))
    print("  ".join(rows[-1]), flush=True)
    return rows, good and same


def _manifest_files(folder: Path) -> dict[str, str]:
    files = json.loads((folder / "orthomerge.json").read_text())["files"]
    return {name: row["hash"] for name, row in files.items()}


def _side_by_side(commands: list[list[str | Path]]) -> list[tuple[float, float, int]]:
    """Seconds of wall and CPU time and the peak of every command, started at once; one that fails ends all."""
    started = time.perf_counter()
    children = [subprocess.Popen([str(word) for word in command], env=offline()) for command in commands]
    found = []
    for child in children:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{child.args!r} failed with exit code {child.returncode}")
        found.append((time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=10_000, help="how many that do nothing (10000)")
    parser.add_argument("--gigabytes", type=float, default=8, help="size of each model (8)")
    parser.add_argument("--parts", nargs="+", choices=("overhead", "merge"), default=("overhead", "merge"))
    parser.add_argument("--keep", action="store_true", help="leave the models there")
    # What needs torch or is measured runs in a process of its own.
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        part, *rest = given.only
        if part == "make":
            make_models(float(rest[0]))
        elif part == "bare":
            only_bare(int(rest[0]))
        else:
            only_overhead(rest[0], int(rest[1]))
        return 0
    sections, good = {"# Jobs": "Cutting a run into jobs (`docs/scaling.md`).", "## Run": describe_run()}, True
    FOLDER.mkdir(parents=True, exist_ok=True)
    if "overhead" in given.parts:
        head = ("executor", "wall s", "CPU s", "wall ms a job", "CPU ms a job")
        sections[f"## {given.jobs:,} jobs that do nothing"] = f"{OVERHEAD}\n\n{table(head, overhead(given.jobs))}"
    if "merge" in given.parts:
        if not (FOLDER / f"{given.gigabytes:g}").exists():
            need, free = 4.2e9 * given.gigabytes, shutil.disk_usage(FOLDER).free
            if free < need:
                raise SystemExit(f"{FOLDER} has {free / 1e9:.0f} GB free, this needs {need / 1e9:.0f} GB")
            for name in ("base", *HEADS):
                shutil.rmtree(FOLDER / name, ignore_errors=True)
            print(f"writing three models of {given.gigabytes:g} GB", flush=True)
            subprocess.run([sys.executable, __file__, "--only", "make", str(given.gigabytes)], check=True)
            (FOLDER / f"{given.gigabytes:g}").touch()
        size = sum(path.stat().st_size for path in (FOLDER / "base").iterdir())
        rows, good = merge()
        shown = table(("process", "wall s", "CPU s", "peak MB", "verdict"), rows)
        told = MERGE.format(bar=BAR / 1e9)
        sections[f"## A merge of {size / 1e9:.1f} GB models by two workers"] = f"{told}\n\n{shown}"
    print(write_result("jobs", sections))
    if not given.keep:
        shutil.rmtree(FOLDER)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
