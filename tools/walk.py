"""Walk through the source as data: what one command really does, counted.

    .venv/bin/python tools/walk.py [--project DIR] [--static] [--only merge,fit,...] [--why plans] [--json FILE]
                                   [--keep DIR] [--modules] [--check]

Run it with the Python of the project's environment. DIR is the checkout whose src/ is walked (default: $ORTHOMERGE,
else the current folder). It makes tiny inputs (a BERT of two layers, two experts, two tables), runs every command in a
process of its own under a profiler and an audit hook, and prints one row per command:

  imported   modules of orthomerge that were imported
  entered    those of which a function ran (not only the import)
  edges      pairs of modules of which one called the other
  recipes    Recipe objects that were built
  plans, merges, outputs, opens, headers, manifests, loads
             calls of the functions in NAMES (edit it when they are renamed)
  st.opens   openings of *.safetensors by Python
  hashes     hash objects of blake3 / hashlib; MB hashed
  written    MB that the process passed to write calls
  peak       bytes in the work folder at the peak, in encoders
  copies     files as large as an encoder that ever lay there
  at once    the most of them at one time

`--why EVENT` prints who asked, call by call. `--check` compares with TARGETS and exits 1 if a number is above its
target, or if a function of NAMES is not in the source any more. `--static` counts what needs no run (seconds): lines,
files, cycles, names, copies. Counters that do not depend on names: imported, entered, edges, st.opens, hashes, written,
peak, copies, at once.
"""

from __future__ import annotations

import argparse
import ast
import collections
import csv
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import blake3
import networkx as nx

# Functions by `module:qualname` (module without "orthomerge."); several names of one thing count together.
NAMES: dict[str, list[str]] = {
    "recipes": ["runs.recipe:Recipe.__post_init__"],
    "plans": ["models.experts:open_experts"],
    "merges": ["merging.stream:prepare"],  # once a merge: a method gets ready for the stream of task vectors
    "outputs": ["models.writing:write_model"],  # model folders that were written
    "opens": ["files.opening:open_expert"],
    "headers": ["files.safetensors:_header"],
    "manifests": ["models.manifest:read_manifest"],
    "loads": ["models.modules:Skeleton.build"],  # encoders built in memory
}
COLUMNS = (
    "imported",
    "entered",
    "edges",
    *NAMES,
    "st.opens",
    "hashes",
    "hashed MB",
    "written MB",
    "peak",
    "copies",
    "at once",
)
# Upper bounds after the redesign (HOUSE section 14, CORE section 4); only these are checked.
TARGETS: dict[str, dict[str, int]] = {
    "merge": {"entered": 30, "recipes": 1, "plans": 1, "headers": 6, "copies": 1, "at once": 1},
    "fit": {"entered": 60, "recipes": 1, "plans": 1, "headers": 8, "copies": 1, "at once": 1},
    "align": {"entered": 50, "recipes": 0, "plans": 1, "headers": 14, "copies": 1, "at once": 1},
    "evaluate": {"entered": 50, "recipes": 0, "plans": 1, "headers": 24, "copies": 0, "at once": 0},
    "diagnose": {"entered": 75, "recipes": 0, "plans": 1, "headers": 24, "copies": 0, "at once": 0},
    "report": {"entered": 28, "recipes": 0, "plans": 0, "headers": 0, "copies": 0},
    "run": {"entered": 100, "recipes": 1, "plans": 1, "headers": 40, "copies": 2, "at once": 2},
}
# Without a target (None): printed, not checked. Lines and statements leave out orthomerge.testing.
STATIC: dict[str, int | None] = {
    "lines": 27_000,
    "statements": 13_500,
    "files": 240,
    "root files": 2,
    "modules in cycles": 0,
    "packages in cycles": 0,
    "recipe copies": 0,
    "docstrings, % of lines": None,
    "lazy pairs": None,
    "module names twice": None,
    "class names twice": None,
    "functions > 10 parameters": None,
    "functions with **kwargs": None,
    "import_module calls": None,
}
TASKS = {"two": 2, "three": 3}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 16000,
    "max_position_embeddings": 64,
}
WORDS = ("a", "good", "bad", "film", "very", "not", "it", "was")


def make_world(place: Path) -> None:
    """A base, two experts, a table of words for each, and a recipe of the whole line."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    base = transformers.BertModel(transformers.BertConfig(**SIZES))
    base.save_pretrained(place / "base")
    unused = [f"[unused{n}]" for n in range(SIZES["vocab_size"] - len(WORDS) - 5)]
    (place / "base" / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *unused]) + "\n"
    )
    (place / "base" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    chance = random.Random(0)
    for name, classes in TASKS.items():
        labels = {n: f"{name}-{n}" for n in range(classes)}
        config = transformers.BertConfig(**SIZES, id2label=labels, label2id={v: k for k, v in labels.items()})
        expert = transformers.BertForSequenceClassification(config)
        expert.bert.load_state_dict(
            {k: v + 0.02 * torch.randn_like(v) if v.is_floating_point() else v for k, v in base.state_dict().items()}
        )
        expert.save_pretrained(place / name)
        with (place / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("text", "label", "split"))
            for split, count in {"train": 60, "val": 20, "test": 30}.items():
                rows.writerows(
                    (" ".join(chance.choices(WORDS, k=chance.randint(2, 8))), f"{name}-{n % classes}", split)
                    for n in range(count)
                )
    (place / "recipe.yaml").write_text(
        "base: base\nexperts: {two: two, three: three}\nmethod: task_arithmetic\nparameters: {scale: 0.5}\n"
        "align: {data: {two: two.csv, three: three.csv}, aligner: ridge}\n"
        "evaluate: {data: {two: two.csv, three: three.csv}, protocols: [current, knn], device: cpu}\n"
        "diagnose: {points: 0, layers: 0}\n"
    )


def commands(world: Path, work: Path) -> dict[str, list[str]]:
    """One command line a walk; later ones read what earlier ones wrote."""
    experts = [word for name in TASKS for word in ("--expert", f"{name}={world / name}")]
    data = [word for name in TASKS for word in ("--data", f"{name}={world / name}.csv")]
    base = ["--base", str(world / "base")]
    quick = [word for pair in ("steps=4", "look=2", "batch=4", "copies=0") for word in ("--set", pair)]
    return {
        "plan": ["plan", *base, *experts, "--method", "ties", "--out", str(work / "merged")],
        "merge": ["merge", *base, *experts, "--method", "ties", "--out", str(work / "merged"), "-q"],
        "fit": ["merge", *base, *experts, *data, *quick, "--device", "cpu", "--out", str(work / "fitted"), "-q"],
        "align": ["align", str(work / "merged"), *data, "--device", "cpu", "--out", str(work / "aligned"), "-q"],
        "evaluate": [
            "evaluate",
            str(work / "merged"),
            str(work / "aligned"),
            *experts,
            *data,
            "--device",
            "cpu",
            "--out",
            str(work / "run"),
        ],
        "diagnose": [
            "diagnose",
            str(work / "merged"),
            *data,
            "--points",
            "0",
            "--device",
            "cpu",
            "--run",
            str(work / "run"),
        ],
        "report": ["report", str(work / "run"), "--out", str(work / "page.html")],
        "run": ["run", str(world / "recipe.yaml"), "--out", str(work / "line"), "-q"],
    }


# Which walks must come before others, because they write what those read.
NEEDS = {
    "align": {"merge"},
    "evaluate": {"merge", "align"},
    "diagnose": {"merge", "align", "evaluate"},
    "report": {"merge", "align", "evaluate", "diagnose"},
}


class Watch:
    """All counters of one process."""

    def __init__(self, package: Path, work: Path, encoder: int) -> None:
        self.package, self.work, self.encoder = str(package) + os.sep, work, encoder
        self.places: dict[CodeType, tuple[str, str] | None] = {}
        self.entered: set[str] = set()
        self.imported: set[str] = set()
        self.edges: set[tuple[str, str]] = set()
        self.calls: collections.Counter[str] = collections.Counter()
        self.why: dict[str, list[str]] = collections.defaultdict(list)
        self.seen: set[tuple[int, int]] = set()
        self.peak, self.most, self.opens, self.hashes, self.hashed = 0, 0, 0, 0, 0
        self.events = {name: event for event, names in NAMES.items() for name in names}
        self.busy = threading.local()

    def place(self, code: CodeType) -> tuple[str, str] | None:
        """Module and qualified name of a code object of ours."""
        if code not in self.places:
            place, path = None, code.co_filename
            if path.startswith(self.package):
                name = path[len(self.package) :].removesuffix(".py").replace(os.sep, ".").removesuffix(".__init__")
                place = (name, code.co_qualname)
            self.places[code] = place
        return self.places[code]

    def callers(self, frame: FrameType) -> Iterator[tuple[str, str, int]]:
        """Module, function and line of every caller that is ours, innermost first; the frame itself included."""
        current: FrameType | None = frame
        while current is not None:
            if (place := self.place(current.f_code)) is not None:
                yield (*place, current.f_lineno)
            current = current.f_back

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        here = self.place(frame.f_code)
        if here is None:
            return
        module, name = here
        if name == "<module>":
            self.imported.add(module)
            return
        callers = [] if frame.f_back is None else self.callers(frame.f_back)
        nearest = next(iter(callers), None)
        edge = (module if nearest is None else nearest[0], module)
        if module not in self.entered or edge not in self.edges:
            others = [] if frame.f_back is None else self.callers(frame.f_back)
            if any(name == "<module>" for _, name, _ in others):
                return  # a helper that runs while a module of ours is imported
            self.entered.add(module)
            self.edges.add(edge)
        counted = self.events.get(f"{module}:{name}")
        if counted is not None:
            self.calls[counted] += 1
            self.why[counted].append(self.stack(frame))

    def stack(self, frame: FrameType) -> str:
        """Who asked, innermost last: modules of ours with lines."""
        lines = [f"{module}:{line} {name}" for module, name, line in self.callers(frame) if name != "<module>"]
        return "\n      ".join(reversed(lines))

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Disk use has its peaks right before something goes: look then. Count openings of weights."""
        if getattr(self.busy, "now", False):
            return
        if event == "open" and str(arguments[0]).endswith(".safetensors"):
            self.opens += 1
        if event in ("os.remove", "os.rmdir", "os.rename", "shutil.rmtree", "shutil.move"):
            self.look()

    def look(self) -> None:
        """Add up what lies in the work folder now."""
        self.busy.now = True
        try:
            sizes: dict[tuple[int, int], int] = {}
            large: set[tuple[int, int]] = set()
            for folder, _, names in os.walk(self.work):
                for name in names:
                    try:
                        status = (Path(folder) / name).lstat()
                    except OSError:
                        continue
                    key = (status.st_ino, status.st_mtime_ns)
                    sizes[key] = status.st_size
                    if name.endswith(".safetensors") and status.st_size >= 0.9 * self.encoder:
                        large.add(key)
            self.peak = max(self.peak, sum(sizes.values()))
            self.most = max(self.most, len(large))
            self.seen |= large
        finally:
            self.busy.now = False

    def count_hashes(self) -> None:
        """Hash objects that orthomerge makes, and what they are fed."""
        for module, name in ((hashlib, "sha256"), (blake3, "blake3")):
            setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(*arguments: Any, **options: Any) -> Any:
            inner = maker(*arguments, **options)
            if self.place(sys._getframe(1).f_code) is None:  # noqa: SLF001 - the only way to know who asks
                return inner
            self.hashes += 1
            self.hashed += sum(len(each) for each in arguments if isinstance(each, bytes))
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


def walk(words: list[str], package: Path, work: Path, encoder: int, result: Path) -> None:
    """In a process of its own: run one command as a user would, under watch."""
    watch = Watch(package, work, encoder)
    watch.look()
    before = set(watch.seen)
    start = watch.peak
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
    except SystemExit as done:
        code = done.code
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    watch.look()
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    numbers = {
        "imported": len(watch.imported),
        "entered": len(watch.entered),
        "edges": sum(one != other for one, other in watch.edges),
        **{event: watch.calls[event] for event in NAMES},
        "st.opens": watch.opens,
        "hashes": watch.hashes,
        "hashed MB": round(watch.hashed / 1e6, 2),
        "written MB": round(int(io["wchar"]) / 1e6, 2),
        "peak": round((watch.peak - start) / encoder, 1),
        "copies": len(watch.seen - before),
        "at once": watch.most - len(before),
    }
    document = {
        "code": code,
        "numbers": numbers,
        "why": watch.why,
        "entered": sorted(watch.entered),
        "edges": sorted(watch.edges),
    }
    result.write_text(json.dumps(document))


def stale_names(package: Path) -> list[str]:
    """Entries of NAMES whose function is not where they say."""
    gone = []
    for event, names in NAMES.items():
        for name in names:
            module, _, qualname = name.partition(":")
            path = package / (module.replace(".", "/") + ".py")
            last = qualname.rpartition(".")[2]
            if not path.is_file() or f"def {last}(" not in path.read_text():
                gone.append(f"{event}: {name} is not in the source; edit NAMES")
    return gone


# Of a Recipe: whoever replaces one of these copies a recipe by hand.
FIELDS = frozenset(
    (
        "method",
        "parameters",
        "align",
        "fit",
        "evaluate",
        "experts",
        "out",
        "dtype",
        "vector",
        "heads",
        "pooling",
        "seed",
        "base",
    )
)


@dataclass
class Counts:
    """What is added up over the modules of a package; imports inside functions count, those for types do not."""

    pairs: dict[tuple[str, str], set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    classes: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    numbers: collections.Counter[str] = field(default_factory=collections.Counter)

    def add_size(self, text: str, tree: ast.Module) -> None:
        """Lines, docstrings and statements."""
        self.numbers["lines"] += len(text.splitlines())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        strings = {
            id(node.body[0])
            for node in ast.walk(tree)
            if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.stmt) and id(node) in strings:
                self.numbers["docs"] += (node.end_lineno or node.lineno) - node.lineno + 1
            elif isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom):
                self.numbers["statements"] += 1

    def add_imports(self, module: str, tree: ast.Module, modules: Mapping[str, Path]) -> None:
        """Which other modules one imports, on top or inside a function."""
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If | ast.FunctionDef)]
        typing = {
            id(node)
            for block in blocks
            if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        inside = {id(node) for block in blocks if isinstance(block, ast.FunctionDef) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or id(node) in typing:
                continue
            for name in node.names:
                other = f"{node.module}.{name.name}" if f"{node.module}.{name.name}" in modules else node.module
                if other in modules and other != module:
                    self.pairs[module, other].add("lazy" if id(node) in inside else "top")

    def add_definitions(self, module: str, tree: ast.Module) -> None:
        """Names of classes, and functions with many or open parameters."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node in tree.body:
                self.classes[node.name].add(module)
            elif isinstance(node, ast.FunctionDef):
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                self.numbers["many"] += count > 10
                self.numbers["kwargs"] += node.args.kwarg is not None

    def add_calls(self, tree: ast.Module, *, recipes: bool) -> None:
        """Calls of import_module, and recipes that are built or copied field by field."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if "import_module" in ast.unparse(node.func):
                self.numbers["dynamic"] += 1
            elif recipes and isinstance(node.func, ast.Name):
                first = ast.unparse(node.args[0]).lower() if node.args else ""
                changed = {word.arg for word in node.keywords}
                copied = node.func.id == "replace" and ("recipe" in first or first in ("like", "alone", "chosen"))
                some_field = not changed or None in changed or bool(changed & FIELDS)
                self.numbers["copies"] += node.func.id == "Recipe" or (copied and some_field)


def static_numbers(package: Path) -> dict[str, int]:
    """What can be counted without running anything."""
    paths = {
        path.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    counts, stems = Counts(), collections.defaultdict[str, set[str]](set)
    for module, path in paths.items():
        text = path.read_text()
        tree = ast.parse(text)
        part = module.split(".")[1:2]
        if path.stem not in ("__init__", "__main__") and part not in (["api"], ["cli"]):
            stems[path.stem].add(module)
        if part != ["testing"]:
            counts.add_size(text, tree)
        counts.add_imports(module, tree, paths)
        counts.add_definitions(module, tree)
        counts.add_calls(tree, recipes=path.name != "recipe.py")

    def package_of(module: str) -> str:
        part = module.split(".")[1] if "." in module else ""
        return part if (package / part).is_dir() and part else "root"

    packages = {(package_of(one), package_of(other)) for one, other in counts.pairs}
    numbers = counts.numbers
    return {
        "lines": numbers["lines"],
        "statements": numbers["statements"],
        "files": len(paths),
        "root files": len(list(package.glob("*.py"))),
        "modules in cycles": in_cycles(set(counts.pairs)),
        "packages in cycles": in_cycles({(one, other) for one, other in packages if one != other}),
        "lazy pairs": sum(kinds == {"lazy"} for kinds in counts.pairs.values()),
        "module names twice": sum(len(places) > 1 for places in stems.values()),
        "class names twice": sum(len(places) > 1 for places in counts.classes.values()),
        "recipe copies": numbers["copies"],
        "functions > 10 parameters": numbers["many"],
        "functions with **kwargs": numbers["kwargs"],
        "import_module calls": numbers["dynamic"],
        "docstrings, % of lines": round(100 * numbers["docs"] / max(numbers["lines"], 1)),
    }


def in_cycles(pairs: set[tuple[str, str]]) -> int:
    """How many nodes of a graph lie on a cycle."""
    return sum(len(group) for group in nx.strongly_connected_components(nx.DiGraph(list(pairs))) if len(group) > 1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path(os.environ.get("ORTHOMERGE", ".")))
    parser.add_argument("--only", default="", help="names of walks, with commas")
    parser.add_argument("--why", default="", help="an event of NAMES: print who asked, call by call")
    parser.add_argument("--modules", action="store_true", help="print the modules that were entered")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="leave the inputs and all outputs in this new folder")
    parser.add_argument("--static", action="store_true", help="only count what needs no run")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.child and not (arguments.project / "src" / "orthomerge").is_dir():
        parser.error(f"{arguments.project / 'src'} holds no orthomerge; give --project DIR or set ORTHOMERGE")
    return arguments


def run_walk(title: str, words: list[str], source: Path, place: Path) -> dict[str, Any]:
    """Run one command in a process of its own and read what was counted."""
    result, world, work = place / "result.json", place / "world", place / "work"
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(work),
        "COLUMNS": "200",
        "ORTHOMERGE_CACHE": str(place / "cache" / title),  # cold, so that the order of walks does not matter
    }
    call = {
        "words": words,
        "package": str(source / "orthomerge"),
        "work": str(work),
        "encoder": (world / "base" / "model.safetensors").stat().st_size,
        "result": str(result),
    }
    ended = subprocess.run(
        [sys.executable, Path(__file__).resolve(), "--child", json.dumps(call)],
        env=environment,
        cwd=world,
        capture_output=True,
        text=True,
        check=False,
    )
    document: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"code": ended.returncode}
    result.unlink(missing_ok=True)
    if document["code"] not in (0, None):
        sys.exit(f"{title}: the command ended with {document['code']}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    return document


def walk_all(arguments: argparse.Namespace, source: Path, place: Path) -> dict[str, dict[str, Any]]:
    """Run the walks that were asked for, after those that they need, and print one row each."""
    world, work = place / "world", place / "work"
    world.mkdir(parents=True)
    work.mkdir()
    make_world(world)
    wanted = {each for each in arguments.only.split(",") if each}
    needed = wanted.union(*(NEEDS.get(each, set()) for each in wanted))
    documents: dict[str, dict[str, Any]] = {}
    print(f"{'':10}" + "".join(f"{column:>11}" for column in COLUMNS))
    for title, words in commands(world, work).items():
        if wanted and title not in needed:
            continue
        documents[title] = document = run_walk(title, words, source, place)
        if wanted and title not in wanted:
            continue
        print(f"{title:10}" + "".join(f"{document['numbers'][column]:>11}" for column in COLUMNS), flush=True)
        for count, who in enumerate(document["why"].get(arguments.why, ()), 1):
            print(f"  {arguments.why} {count}:\n      {who}")
        if arguments.modules:
            print("  " + " ".join(document["entered"]))
    return documents


def main() -> None:
    arguments = parse_arguments()
    if arguments.child:
        call = json.loads(arguments.child)
        walk(call["words"], Path(call["package"]), Path(call["work"]), call["encoder"], Path(call["result"]))
        return
    source = (arguments.project / "src").resolve()
    package = source / "orthomerge"
    numbers = static_numbers(package)
    targets = {name: most for name, most in STATIC.items() if most is not None}
    above = [f"{name} is {numbers[name]}, target {most}" for name, most in targets.items() if numbers[name] > most]
    above += stale_names(package)
    if arguments.static:
        for name in STATIC:
            print(f"{name:28}{numbers[name]:>8}{targets.get(name, '-'):>10}")
        sys.exit(bool(arguments.check and above))
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        place = arguments.keep.resolve() if arguments.keep else Path(folder)
        documents = walk_all(arguments, source, place)
    if arguments.json:
        arguments.json.write_text(json.dumps(documents, indent=1))
    above += [
        f"{title}: {column} is {document['numbers'][column]}, target {most}"
        for title, document in documents.items()
        for column, most in TARGETS.get(title, {}).items()
        if document["numbers"][column] > most
    ]
    if arguments.check:
        print("\n".join(above) or "every target is met")
        sys.exit(bool(above))


if __name__ == "__main__":
    main()
