"""What aligners cost and give at real size: closed forms together and alone, and the papers' recipes beside them.

    python benchmarks/align.py [--runs N] [--tasks N] [--no-gradients]

Eight synthetic tasks with the sizes of ViT-B and BERT-base features and of the usual vision tasks; one thread, CPU
time. Exit code 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Protocol, TypeVar, cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import describe_run, table, write_result

from orthomerge.alignment.aligners import Alignment, make_aligner
from orthomerge.alignment.problem import Problem
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, Linear

TARGET = 40.0  # seconds of CPU
D, INPUTS, HELD_OUT = 768, 2000, 1000
READ, ANGLE = 96, 0.9  # axes that classes differ along; how far merging turns
CLASSES = (2, 4, 10, 14, 37, 47, 100, 150)
ITERATED = ("kl-map", "auto")
CLOSED = ("ridge", "orthogonal", "similarity", "scaling", "linear", "invertible", "affine", "logit-procrustes")
RECIPES: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("aligned-c", {"recipe": "paper"}, "ridge"),
    ("aligned-c", {"recipe": "tuned"}, "ridge"),
    ("aligned-c", {"recipe": "tuned"}, "kl-map"),
    ("moma-orthogonal", {}, "orthogonal"),
    ("orth-m", {}, "logit-procrustes"),
)
NOTES = f"""\
Eight synthetic tasks of {", ".join(map(str, CLASSES))} classes, {INPUTS:,} unlabelled inputs and {HELD_OUT:,} held-out
ones each, {D} features, seeded. An expert's features are Gaussian around class means on a common mean, with variances
that fall along a power law, and are read by the best linear head there is. The merged encoder's are these, rotated,
shrunk towards the common mean by a third, moved and blurred. So the truth is linear, which flatters linear maps, and
how hard the tasks are was settled by looking at the accuracies of the experts, of the unaligned head and of four closed
forms on some of them: times are the point here, accuracies no evidence for real tasks. CPU seconds of one thread, all
tasks, best of the runs for closed forms (the others are run once); accuracy in percent on held-out inputs, mean of
tasks.

*alone*: each starts from the features. *together*: all closed forms of a task share one `Problem`: moments,
decompositions and leave-one-out are done once; the column says what each adds in this order. The target is
{TARGET:.0f} s for all of them together, on all tasks."""


@dataclass(frozen=True)
class Toy:
    """What an aligner sees, and what it is scored on."""

    pair: FeaturePair
    head: Head
    test: torch.Tensor
    truth: torch.Tensor
    expert_test: torch.Tensor

    def accuracy(self, classifier: Classifier) -> float:
        return 100 * float((classifier(self.test).argmax(1) == self.truth).double().mean())


class FromProblem(Protocol):
    """An aligner that can share what it starts from."""

    def align(self, problem: Problem) -> Alignment: ...


def made(classes: int, *, seed: int) -> Toy:
    """One task; see NOTES."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    spread = torch.arange(1, D + 1).pow(-0.5)  # deviations along the axes
    common, shift = 2 * normal(D) * spread.sqrt(), 0.3 * normal(D) * spread
    means = torch.zeros(classes, D)
    apart = 2.2 + 0.55 * math.log(classes)  # deviations, so that tasks are about equally hard
    means[:, :READ] = apart / math.sqrt(READ) * spread[:READ] * normal(classes, READ)
    A = normal(D, D)
    turn = torch.matrix_exp(ANGLE * (A - A.T) / math.sqrt(2 * D))
    # Fisher's head: no other separates Gaussian classes of one covariance better.
    weight = means / spread.square()
    head = Head(
        Linear(weight, -(weight * (common + means / 2)).sum(1)), tuple(f"class {number}" for number in range(classes))
    )

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        truth = torch.randint(classes, (count,), generator=generator)
        around = means[truth] + spread * normal(count, D)
        merged = (common + shift) + 2 / 3 * around @ turn + 0.3 * spread * normal(count, D)
        return merged, common + around, truth

    merged, expert, _ = drawn(INPUTS)
    test, expert_test, truth = drawn(HELD_OUT)
    task = f"{classes} classes"
    return Toy(
        FeaturePair(Features(merged, task, "train"), Features(expert, task, "train")), head, test, truth, expert_test
    )


Result = TypeVar("Result")


def timed(act: Callable[[], Result], *, runs: int = 1) -> tuple[Result, float]:
    """The result, and the CPU seconds of the best run."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        result = act()
        times.append(time.process_time() - started)
    return result, min(times)


SHARED: Mapping[str, Callable[[Problem], object]] = {
    "decompositions": lambda problem: (problem.spectrum, problem.unshifted),
    "leave-one-out": lambda problem: problem.strength,
}


def together(toy: Toy) -> tuple[dict[str, Alignment], dict[str, float]]:
    """All closed forms from one problem, and the CPU seconds of what they share and of what each adds."""
    problem, spent = timed(lambda: Problem.of(toy.pair, toy.head))
    times, found = {"reading": spent}, {}
    for name, make in SHARED.items():
        times[name] = timed(partial(make, problem))[1]
    for name in CLOSED:
        found[name], times[name] = timed(partial(cast("FromProblem", make_aligner(name)).align, problem))
    return found, times


@dataclass(frozen=True)
class Cost:
    """Over all tasks: seconds, and the mean accuracy."""

    seconds: float
    accuracy: float


def alone(toys: Sequence[Toy], name: str, options: Mapping[str, Any], *, runs: int = 1) -> Cost:
    """An aligner that starts from the features, on every task."""
    seconds, accuracies = 0.0, []
    for toy in toys:
        found, spent = timed(partial(make_aligner(name, options).fit, toy.pair, toy.head), runs=runs)
        seconds += spent
        accuracies.append(toy.accuracy(found.classifier))
    print(f"{name} {dict(options) or ''}: {seconds:.2f} s, {mean(accuracies):.1f}", flush=True)
    return Cost(seconds, mean(accuracies))


def closed_table(toys: Sequence[Toy], costs: Mapping[str, Cost], *, runs: int) -> tuple[str, dict[str, float]]:
    """Every closed form, alone and together with the others, and the seconds of every part of that."""
    found, times = [], []
    for toy in toys:
        tries = [together(toy) for _ in range(runs)]
        found.append(tries[0][0])
        times.append(min((spent for _, spent in tries), key=lambda spent: sum(spent.values())))
    parts = {name: sum(spent[name] for spent in times) for name in times[0]}
    total = sum(parts.values())
    rows = [[name, "", f"{parts[name]:.2f}", ""] for name in parts if name not in CLOSED]
    for name in CLOSED:
        accuracy = mean(toy.accuracy(each[name].classifier) for toy, each in zip(toys, found, strict=True))
        rows.append([f"`{name}`", f"{costs[name].seconds:.2f}", f"{parts[name]:.2f}", f"{accuracy:.1f}"])
    unaligned = mean(toy.accuracy(toy.head) for toy in toys)
    experts = mean(100 * float((toy.head(toy.expert_test).argmax(1) == toy.truth).double().mean()) for toy in toys)
    rows += [
        ["**all**", f"{sum(costs[name].seconds for name in CLOSED):.2f}", f"**{total:.2f}**", ""],
        ["unaligned", "", "", f"{unaligned:.1f}"],
        ["the experts themselves", "", "", f"{experts:.1f}"],
    ]
    return table(["", "CPU s alone", "CPU s together", "accuracy"], rows), parts


def recipe_table(toys: Sequence[Toy], costs: Mapping[str, Cost]) -> str:
    """Every recipe by gradient beside what does the same at once."""
    rows, known = [], dict[str, Cost]()
    for name, options, counterpart in RECIPES:
        shown = " ".join((name, *map(str, options.values())))
        if shown not in known:
            known[shown] = alone(toys, name, options)
        theirs, ours = known[shown], costs[counterpart]
        rows.append(
            [
                shown,
                f"{theirs.seconds:.1f}",
                f"{theirs.accuracy:.1f}",
                counterpart,
                f"{ours.seconds:.2f}",
                f"{ours.accuracy:.1f}",
                f"{theirs.seconds / ours.seconds:.2g}",
            ]
        )
    header = ["by gradient", "CPU s", "accuracy", "in its place", "CPU s", "accuracy", "times faster"]
    return table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each closed form (3)")
    parser.add_argument("--tasks", type=int, default=len(CLASSES), help="only the first so many tasks (8)")
    parser.add_argument("--no-gradients", action="store_true", help="closed forms alone; writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    described = f"{describe_run()}\n- threads: 1\n- runs: {arguments.runs}"
    toys = [made(classes, seed=number) for number, classes in enumerate(CLASSES[: arguments.tasks])]
    together(toys[0])  # to warm up
    costs = {name: alone(toys, name, {}, runs=arguments.runs) for name in CLOSED}
    closed, parts = closed_table(toys, costs, runs=arguments.runs)
    total, largest = sum(parts.values()), sorted(parts, key=lambda name: -parts[name])[:3]
    verdict = f"All closed forms together: {total:.2f} s of CPU; target {TARGET:.0f} s: "
    verdict += "met." if total < TARGET else "MISSED."
    verdict += " Most of it: " + ", ".join(f"{name} {parts[name] / total:.0%}" for name in largest) + "."
    print(f"{closed}\n\n{verdict}", flush=True)
    if not arguments.no_gradients:
        costs |= {name: alone(toys, name, {}) for name in ITERATED}
        recipes = recipe_table(toys, costs)
        print(recipes)
        others = table(
            ["ours, by iteration", "CPU s", "accuracy"],
            [[name, f"{costs[name].seconds:.2f}", f"{costs[name].accuracy:.1f}"] for name in ITERATED],
        )
        sections = {
            "# Aligners: closed forms beside gradients": NOTES,
            "## Run": described,
            "## Closed forms": f"{closed}\n\n{verdict}\n\n{others}",
            "## Gradients": recipes,
        }
        print(write_result("align", sections))
    return 0 if total < TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
