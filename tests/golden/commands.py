"""The commands whose results are golden, in the order in which they run: later ones read what earlier ones wrote.

All paths are relative to a folder that holds `world/` (`tests/golden/world.py`); outputs lie beside it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

# Committed values come from one CPU and are compared on others, where sums are formed in another order.
TOLERANCE = 1e-6
# An aligner solves for a head, a fit descends: both enlarge the rounding of forward passes on another CPU.
SOLVED = 1e-4
DESCENT = 5e-3
# Softmax does not see the bias of attention keys: its gradient is rounding alone, of which Adam makes whole steps.
_NO_GRADIENT = r"self\.key\.bias$"


@dataclass(frozen=True)
class Command:
    """One command line and what is looked at afterwards.

    `model`: a model folder that it writes; `run`: a run folder. `exit`: the expected exit code. `says`: regular
    expressions that its text must match (standard output, then standard error; line breaks count as spaces).
    `tolerance`: how far values may be from the committed ones, as a share of the largest entry of a tensor, because
    another CPU rounds differently. `noise`: values that rounding alone decides; they are compared on one machine only.
    `same_bytes`: on one machine another commit gives the same bytes, else values within 1e-6.
    """

    name: str
    line: str
    model: str | None = None
    run: str | None = None
    exit: int = 0
    says: tuple[str, ...] = ()
    tolerance: float = TOLERANCE
    noise: str | None = None
    same_bytes: bool = True

    def argv(self, *, old: bool = False) -> list[str]:
        """Words of the command line; `old`: for commit 719347c. A value with spaces stands in single quotes."""
        words = shlex.split(self.line)
        return _older(words) if old else words


def _older(words: list[str]) -> list[str]:
    """The same command for commit 719347c, where experts are values of `--expert` and some words differ."""
    command, *rest = words
    if command == "list":
        return rest
    if "--verify" in rest:
        return ["verify", rest[0]]
    if command == "run" and "sweep" in rest[0]:
        command = "sweep"
    out = {"export": "--to", "run": "--run", "sweep": "--run", "diagnose": "--run"}.get(command, "--out")
    older = [command]
    for before, word in zip(words, rest, strict=False):
        is_value = before.startswith("--") and before not in ("--force", "--json")
        older += ["--expert", word] if "=" in word and not is_value else [out if word == "--out" else word]
    return [word for word in older if word != "--no-references"]


_TWO = "two=world/two three=world/three --base world/base"
# A folder, a bare state dict and an adapter.
_THREE = "two=world/two three=world/three.pth four=world/four --base world/base"
_IMAGES = "dark=world/dark shape=world/shape --base world/vit"
_DATA = "--data two=world/two.csv --data three=world/three.csv"
_PIXELS = "--data dark=world/dark.npz --data shape=world/shape.npz"
_ALONE = f"{_DATA} --device cpu --no-references"  # commit 719347c scores experts only where their places are given
_OWN = "--expert two=world/two --expert three=world/three"
_OWN_IMAGES = "--expert dark=world/dark --expert shape=world/shape"
_BOTH = f"both {_OWN} {_DATA}"  # a merge whose experts are folders
_PLACES = "--base world/base --expert two=world/two --expert three=world/three.pth --expert four=world/four"
_QUICK = "--set steps=4 --set look=2 --set batch=4 --device cpu -q"


def _merge(name: str, words: str, **more: Any) -> Command:
    """A merge; it names its heads with their numbers of classes."""
    says = (rf"wrote {name}: .*heads: \w+ \(2\), \w+ \(3\)",)
    return Command(name, f"merge {words} --out {name} -q", model=name, says=says, **more)


def _fit(name: str, words: str) -> Command:
    """A merge fitted to unlabelled inputs."""
    line = f"{_TWO} {_DATA} {words} --device cpu"
    return _merge(name, line, tolerance=DESCENT, noise=_NO_GRADIENT, same_bytes=False)


def _align(name: str, words: str) -> Command:
    """New heads for a merge."""
    line = f"align {words} --device cpu --out {name} -q"
    return Command(name, line, model=name, tolerance=SOLVED, same_bytes=False)


def _evaluate(name: str, words: str, **more: Any) -> Command:
    """Scores in a run folder."""
    return Command(name, f"evaluate {words} --out run-{name}", run=f"run-{name}", **more)


def _finetune(name: str, out: str, words: str) -> Command:
    """A new expert."""
    line = f"finetune --base world/base --data world/two.csv {words} --set device=cpu --out {out} -q"
    return Command(name, line, model=out, tolerance=DESCENT, noise=_NO_GRADIENT, same_bytes=False)


def _refusal(name: str, line: str, exit_code: int, *says: str) -> Command:
    """A command that must write nothing and say why."""
    out = "" if "--out" in line else " --out refused"
    return Command(f"refuse-{name}", line + out, model="refused", run="refused", exit=exit_code, says=says)


COMMANDS: tuple[Command, ...] = (
    # What is there, and what would be done.
    Command("inspect", "inspect world/two", says=("family: bert", "encoder_tensors: 39", "'two-0', 'two-1'")),
    Command("inspect-adapter", "inspect world/four", says=("LoRA", r"classifier.weight +F32 \(4, 32\)")),
    Command("inspect-pth", "inspect world/three.pth", says=("three.pth", r"classifier.weight +F32 \(3, 32\)")),
    Command("plan", f"merge {_THREE} --method ties --out planned --dry-run", says=("no problems",)),
    Command("methods", "list methods", says=("average", "task_arithmetic", "ties_sum", "realign", "needs inputs")),
    Command("aligners", "list aligners", says=("auto", "ridge", "aligned-c", "orthogonal")),
    # Merges without data; their three experts are a folder, a bare state dict and an adapter.
    _merge("average", f"{_THREE} --method average"),
    _merge("average-weights", f"{_THREE} --method average --set 'weights=[0.5, 0.25, 0.25]'"),
    _merge("arithmetic", f"{_THREE} --method task_arithmetic --set scale=0.4"),
    _merge("ties", f"{_THREE} --method ties --set density=0.3"),
    _merge("ties-sum", f"{_THREE} --method ties_sum --set density=0.3"),
    _merge("dare", f"{_THREE} --method dare --set drop=0.5 --set seed=3"),
    _merge("dare-ties", f"{_THREE} --method dare_ties --set seed=4"),
    _merge("tsv-m", f"{_THREE} --method tsv_m"),
    _merge("iso-c", f"{_THREE} --method iso_c"),
    _merge("knots", f"{_THREE} --method knots"),
    _merge("breadcrumbs", f"{_THREE} --method breadcrumbs"),
    _merge("consensus", f"{_THREE} --method consensus"),
    _merge("stock", f"{_THREE} --method model_stock"),
    _merge("wudi", f"{_THREE} --method wudi --set steps=5"),
    _merge("slerp", f"{_TWO} --method slerp --set t=0.3"),
    _merge("half", f"{_TWO} --method task_arithmetic --dtype float16"),
    _merge("shards", f"{_TWO} --method average --max-shard-size 40KB"),
    _merge("mean", f"{_TWO} --method task_arithmetic --set pooling=mean"),
    _merge("ignore", "two=world/two-extra three=world/three --base world/base --set ignore=[bert.translation.*] "
           "--method ties"),
    _merge("gap", "two=world/two-gap three=world/three --base world/base --set missing=base --method ties"),
    _merge("vector", "world/vector.yaml"),
    _merge("mergekit", "world/mergekit.yaml"),
    _merge("images", f"{_IMAGES} --method ties"),
    _merge("both", f"{_TWO} --method task_arithmetic --set scale=0.5"),
    _merge("auto-scale", f"{_TWO} {_DATA} --method task_arithmetic --set scale=auto"),
    # Merges fitted to unlabelled inputs.
    _fit("realign", f"{_QUICK} --set copies=0"),
    _fit("realign-ties", f"{_QUICK} --set copies=0 --set start=ties --method realign --split val --limit 12"),
    _fit("moma", f"{_QUICK} --method moma"),
    _fit("adamerging", f"{_QUICK} --method adamerging"),
    _fit("regmean", "--method regmean"),
    _fit("fisher", "--method fisher --set inputs=16"),
    # Aligned heads.
    _align("align-auto", f"{_BOTH} --aligner auto"),
    _align("align-ridge", f"{_BOTH} --aligner ridge"),
    _align("align-orthogonal", f"{_BOTH} --aligner orthogonal"),
    _align("align-linear", f"{_BOTH} --aligner linear --limit 20 --seed 1"),
    _align("align-c", f"{_BOTH} --aligner aligned-c --set epochs=3"),
    _align("align-surgery", f"{_BOTH} --aligner surgery --set steps=5 --set rank=2"),
    _align("align-images", f"images {_PIXELS} {_OWN_IMAGES} --aligner ridge"),
    _align("align-bare", f"ties {_PLACES} {_DATA} --data four=world/four.csv --aligner ridge"),
    # Scores.
    _evaluate("evaluate", f"both align-ridge {_OWN} {_DATA} --protocol current --protocol knn --protocol probe "
              "--device cpu", says=("task_arithmetic", "expert", "knn", "probe")),
    _evaluate("evaluate-shots", f"{_BOTH} --protocol aligned-c --protocol knn --aligner ridge --shots 2 --seeds 2 "
              # An expert distilled into itself has no gradient either.
              "--device cpu", tolerance=SOLVED, noise="/expert/.*/aligned-c/"),
    _evaluate("evaluate-images", f"images {_PIXELS} {_OWN_IMAGES} --protocol current --protocol knn --device cpu"),
    _evaluate("evaluate-mean", f"mean {_ALONE} --protocol current"),
    _evaluate("evaluate-half", f"half {_ALONE} --protocol current --protocol probe"),
    _evaluate("evaluate-json", f"both {_ALONE} --protocol current --json", says=(r'"records": \[',)),
    # Diagnosis, page.
    Command("diagnose", f"diagnose both {_OWN} {_DATA} --base world/base --points 0 --layers 16 --device cpu "
            "--out run-evaluate", run="run-evaluate", tolerance=SOLVED),
    Command("report", "report run-evaluate --out page.html", says=("page.html",)),
    # Arithmetic with task vectors.
    Command("negate", f"negate {_TWO} {_DATA} --target two --heads probe --keep 0.5 --grid 0.25,0.5 --device cpu "
            "--out negate -q", model="negate", says=("two",), tolerance=SOLVED),
    Command("analogy", f"analogy {_TWO} four=world/four --data other=world/three.csv --of "
            "two:four::three --grid 0.5,1 --device cpu --out analogy -q", model="analogy"),
    # Experts.
    _finetune("finetune", "tuned", "--set steps=3 --set batch=8 --set lr=0.001"),
    _finetune("finetune-lora", "tuned-lora",
              "--set mode=lora --set rank=2 --set steps=3 --set batch=8 --set lr=0.01"),
    _finetune("finetune-linearised", "tuned-linearised",
              "--set mode=linearised --set steps=3 --set batch=8 --set lr=0.01 --set head_epochs=1"),
    # Handover.
    Command("export", "export align-ridge --task three --out exported", model="exported", tolerance=SOLVED),
    Command("verify", "inspect align-ridge --verify", says=("align-ridge",)),
    # Everything from one file.
    Command("run", "run world/line.yaml --out run-line -q", model="line", run="run-line", tolerance=SOLVED),
    Command("sweep", "run world/sweep.yaml --out run-sweep -q", run="run-sweep", tolerance=SOLVED),
    # Refusals: the message names what is wrong, and nothing is written.
    _refusal("unknown-method", f"merge {_TWO} --method tise", 2, "tise", "ties"),
    _refusal("unknown-option", f"merge {_TWO} --method ties --set densty=0.2", 2, "densty", "density"),
    _refusal("bad-option", f"merge {_TWO} --method ties --set density=7", 2, "density", "7"),
    _refusal("key-twice", "merge world/twice.yaml", 2, "'method' is given twice"),
    _refusal("no-base", "merge two=world/two three=world/three --method ties", 2, "base"),
    _refusal("no-checkpoint", "merge two=world/nowhere --base world/base", 3, "world/nowhere"),
    _refusal("broken-file", "merge two=world/two-broken three=world/three --base world/base", 3, "world/two-broken"),
    _refusal("missing-tensor", "merge two=world/two-gap three=world/three --base world/base", 4, "two",
             r"encoder\.layer\.1\.output\.LayerNorm", "missing: base"),
    _refusal("extra-tensor", "merge two=world/two-extra three=world/three --base world/base", 4,
             r"bert\.translation\.weight", "ignore"),
    _refusal("other-family", "merge two=world/two dark=world/dark --base world/base", 4, "dark"),
    _refusal("existing-output", f"merge {_TWO} --method average --out average", 5, "average", "--force"),
    _refusal("not-ours", f"merge {_TWO} --method average --out world --force", 5, "world"),
    _refusal("wrong-labels", "evaluate both --data two=world/three.csv --device cpu", 4, "two"),
    _refusal("no-labels", "evaluate both --data two=world/unlabelled.csv --device cpu", 2, "label"),
    _refusal("no-data", "evaluate both --data two=world/nothing.csv --device cpu", 3, "nothing.csv"),
    _refusal("unknown-task", f"align both {_OWN} --data tow=world/two.csv", 2, "tow", "two"),
    _refusal("not-an-output", f"align world/two {_OWN} {_DATA}", 3, "world/two"),
    _refusal("data-for-nothing", f"merge {_TWO} {_DATA} --method ties", 2, "ties", "--data"),
    _refusal("surgery-export", "export align-surgery --task two", 2, "surgery"),
    _refusal("plan-problems", f"merge {_TWO} --method tise --dry-run", 2, "tise", "ties"),
)  # fmt: skip
