"""Verdict in words: what was lost, what an aligner recovers, what remains, and what to try next.

Every sentence is listed with its numbers. A difference whose interval contains zero is called a tie; if the loss may be
zero, no share of it is given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from statistics import fmean

from orthomerge.analysis.conflict import Conflict
from orthomerge.analysis.diagnosis import Finding
from orthomerge.analysis.families import Reading
from orthomerge.analysis.recovery import Estimate, HitsByTask, Recovery, difference, recovery
from orthomerge.core.errors import some
from orthomerge.data.task import Access

_NEAR = 1.0  # points below which a difference does not matter in practice
_MOST_OF_IT = 90.0  # percent from which a loss counts as fully explained
_FEW = 25.0  # inputs per class below which an aligner may lack data


@dataclass(frozen=True)
class Case:
    """Evidence of a verdict: hits on test inputs by classifier, readings by family, each by task in the same order.

    `hits`: of expert, merged, aligned, and base (with the experts' heads) if known. `per_class`: the fewest inputs per
    class that the aligner was fitted to. `free`: whether it adds no parameter. `access`: of the inputs that the merge
    was fitted to. `scales`: score by scale; `scale`: that of the merge. `witnesses`: mean accuracies in percent of
    other classifiers of the merged features, fitted with labels, by name. `commands`: command lines to suggest: `align`
    (writes a model), `score` (makes a table), `refit`, `probe`.
    """

    method: str
    aligner: str
    hits: Mapping[str, HitsByTask]
    families: Mapping[str, Mapping[str, Reading]]
    _: KW_ONLY
    per_class: float
    free: bool = True
    access: Access = "data-free"
    witnesses: Mapping[str, Estimate] = field(default_factory=dict)
    conflict: Conflict | None = None
    scales: Mapping[float, float] = field(default_factory=dict)
    scale: float | None = None
    commands: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def mean(self, classifier: str) -> float:
        return 100 * fmean(float(part.mean()) for part in self.hits[classifier].values())


def verdict(case: Case) -> tuple[Finding, ...]:
    """Return all findings, the most important first."""
    outcome = recovery(case.hits["expert"], case.hits["merged"], case.hits["aligned"], seed=case.seed)
    findings = [_accuracy(case, outcome), _misalignment(case, outcome), _remainder(case, outcome)]
    findings += [_rotation(case), _worst_task(case), _conflicts(case), _scale(case), _next_step(case, outcome)]
    return tuple(finding for finding in findings if finding is not None)


def _accuracy(case: Case, outcome: Recovery) -> Finding:
    lost, count = outcome.lost, len(case.hits["expert"])
    numbers = {name: case.mean(name) for name in ("expert", "merged", "aligned")}
    against_experts = lost.choose(
        above=f": {lost} lost.",
        below=f", {-lost} more than the experts.",
        tie=f". That is a tie: the difference is {lost}.",
    )
    text = (
        f"The experts reach {numbers['expert']:.1f} % ({'one task' if count == 1 else f'mean of {count} tasks'}), "
        f"{case.method} as it is {numbers['merged']:.1f} %{against_experts}"
    )
    if case.access == "transductive":
        text += " The merge was fitted to these very test inputs, which flatters it."
    text += f" Read through the aligner {case.aligner!r} it reaches {numbers['aligned']:.1f} %."
    numbers |= lost.numbers("lost")
    if "base" in case.hits:
        base, gain = case.mean("base"), difference(case.hits["merged"], case.hits["base"], seed=case.seed)
        against_base = gain.choose(
            above=f", {gain} less than the merge",
            below=f", {-gain} more than the merge",
            tie=f", a tie: the merge differs by {gain}",
        )
        numbers["base"] = base
        text += f" The base under the experts' heads has {base:.1f} %{against_base}."
    return Finding("Accuracy", text, numbers)


def _misalignment(case: Case, outcome: Recovery) -> Finding:
    won, share, numbers = outcome.won, outcome.share, outcome.won.numbers("won")
    if share is None:
        text = f"No loss is certain here, so there is no share of it to speak of; the aligner changes {won}."
        return Finding("Little to win back", text, numbers)
    numbers |= share.numbers("share")
    if not won.above:
        change = f"makes it worse by {-won}" if won.below else f"wins nothing back for certain: {won}"
        return Finding("Not a matter of alignment", f"The aligner {change}.", numbers)
    text = (
        f"The aligner wins back {won}, {share.value:.0f} % of the loss ({share.interval(0)} %), with unlabelled inputs"
        f"{' and no new parameter' if case.free else ''}: so much was not lost but misaligned with the head."
    )
    if not outcome.left.above and share.value >= _MOST_OF_IT:
        return Finding("Misaligned, not lost", text, numbers)
    return Finding("Mostly misaligned" if share.low > 50 else "Partly misaligned", text, numbers)


def _remainder(case: Case, outcome: Recovery) -> Finding | None:
    if outcome.share is None:
        return None
    left, numbers = outcome.left, outcome.left.numbers("left")
    if not left.above:
        text = f"Between the aligned merge and the experts no difference is certain ({left})."
        return Finding("Nothing certain remains", text, numbers)
    text = f"{left} remain between the aligned merge and the experts. "
    if case.witnesses:
        aligned = case.mean("aligned")
        numbers |= {name: witness.value for name, witness in case.witnesses.items()}
        name, best = max(case.witnesses.items(), key=lambda item: item[1].value)
        text += (
            f"A second witness, which saw labels ({name}), reads {best.value:.1f} % ({best.interval()}) off the same "
            "features: "
        )
        if best.low > aligned:
            text += "the classes are more separated than the aligner could tell; a better reading may win more."
            return Finding("Not all of it is lost", text, numbers)
        text += f"{'no more' if best.value <= aligned else 'not for certain more'} than the aligner does. "
    if case.per_class < _FEW:
        text += (
            f"With {case.per_class:.0f} inputs per class the aligner may also have seen too few: it is lost "
            "information, or too few inputs, and these numbers do not tell which."
        )
        return Finding("What remains", text, numbers)
    text += (
        f"The aligner saw {case.per_class:.0f} inputs per class or more: most of it is likely information that the "
        "merged features no longer hold in a form that a head can read."
    )
    return Finding("Likely lost information", text, numbers)


def _rotation(case: Case) -> Finding | None:
    """Decide whether the map is a rotation, from held-out distance and accuracy: orthogonal against linear."""
    by_family = {
        family: fmean(reading.distance for reading in readings.values()) for family, readings in case.families.items()
    }
    raw, orthogonal, linear, rigid = (
        by_family.get(family, math.nan) for family in ("none", "orthogonal", "linear", "rigid")
    )
    if math.isnan(raw + orthogonal + linear):
        return None
    one, other = (
        {task: reading.hits for task, reading in case.families[family].items()} for family in ("linear", "orthogonal")
    )
    more, gain = difference(one, other, seed=case.seed), raw - linear
    numbers = {"raw": raw, "orthogonal": orthogonal, "linear": linear, **more.numbers("linear beyond orthogonal")}
    end = more.choose(above="", below="", tie=", which is a tie")
    if raw < 0.02:
        title, text = "The features agree", "There is nothing for a map to do."
    elif gain <= 0.02 * raw:
        title, text = "No linear map helps", "Neither brings them nearer to speak of."
    else:
        numbers["orthogonal share"] = (raw - orthogonal) / gain
        share = 100 * numbers["orthogonal share"]
        text = f"A rotation alone does {share:.0f} % of what any linear map does."
        if share >= _MOST_OF_IT and more.high < _NEAR:
            title, end = "It is a rotation", ": the orthogonal map suffices"
        else:
            title = "More than a rotation" if more.above or share < 50 else "Largely a rotation"
    shifted = "" if math.isnan(rigid) else f" ({rigid:.2f} with a shift)"
    distances = (
        f"On inputs that no map has seen, merged features are {raw:.2f} from the expert's (1: as far as guessing the "
        f"mean); the best orthogonal map leaves {orthogonal:.2f}{shifted}, the best linear one {linear:.2f}."
    )
    return Finding(
        title, f"{distances} {text} In accuracy the linear map adds {more} to the orthogonal one{end}.", numbers
    )


def _worst_task(case: Case) -> Finding | None:
    expert, merged = case.hits["expert"], case.hits["merged"]
    if len(expert) < 2:
        return None
    losses = {task: difference({task: expert[task]}, {task: merged[task]}, seed=case.seed) for task in expert}
    order = sorted(losses, key=lambda task: -losses[task].value)
    worst, second = losses[order[0]], losses[order[1]]
    numbers = {f"lost on {task}": losses[task].value for task in order}
    if not worst.above:
        return Finding("No task stands out", "On no single task is a loss certain.", numbers)
    text = f"{order[0]!r} loses the most: {worst}"
    near = [task for task in order[1:] if losses[task].high > worst.low]
    if near:
        text += f"; {some(near)} may lose as much (the intervals overlap)."
    else:
        text += f", clearly more than the next, {order[1]!r} ({second.value:.1f})."
    return Finding("Which task suffers", text, numbers)


def _conflicts(case: Case) -> Finding | None:
    if case.conflict is None:
        return None
    tasks, conflict = case.conflict.tasks, case.conflict
    pairs = ((i, j) for i in range(len(tasks)) for j in range(i))
    signs = {(i, j): 100 * conflict.signs[i][j] for i, j in pairs if not math.isnan(conflict.signs[i][j])}
    if not signs:
        return None
    (i, j), (k, m) = max(signs, key=signs.__getitem__), min(signs, key=signs.__getitem__)
    most, least, cosine = signs[i, j], signs[k, m], conflict.cosine[i][j]
    text = (
        f"{tasks[j]!r} and {tasks[i]!r} pull against each other the most: of the weights that both changed, "
        f"{most:.1f} % go in opposite directions (50 % is chance; cosine {cosine:.2f})."
    )
    if len(signs) > 1:
        text += f" The least is {least:.1f} %, {tasks[m]!r} and {tasks[k]!r}."
    numbers = {"sign conflict, %": most, "cosine": cosine, "least sign conflict, %": least}
    return Finding("Which experts conflict", text, {n: value for n, value in numbers.items() if not math.isnan(value)})


def _scale(case: Case) -> Finding | None:
    scales, current = case.scales, case.scale
    if not scales:
        return None
    best = max(scales, key=lambda scale: (scales[scale], -scale))
    text = f"Of the scales tried on validation inputs {best:g} is the best ({scales[best]:.1f} in the mean)"
    if current is not None and scales.get(current, math.inf) < scales[best]:
        text += f"; at {current:g}, as merged, it is {scales[current]:.1f}"
    return Finding("Scale", f"{text}.", {f"at {scale:g}": score for scale, score in scales.items()})


def _next_step(case: Case, outcome: Recovery) -> Finding | None:
    commands, title, steps = case.commands, "What to try next", []
    if not outcome.lost.above:
        return Finding(title, "Nothing has to be done: the merge is as good as its experts, within noise.")
    if outcome.won.above and "align" in commands:
        steps.append(f"put the aligned heads into the model: `{commands['align']}`")
    elif outcome.won.above and "score" in commands:
        steps.append(f"score the merge read through the aligner beside others: `{commands['score']}`")
    if outcome.left.above and case.access == "data-free" and "refit" in commands:
        steps.append(f"let the encoder be fitted as well, with the same unlabelled inputs: `{commands['refit']}`")
    if outcome.left.above and not case.witnesses and "probe" in commands:
        steps.append(f"ask a probe with labels whether the classes are still there: `{commands['probe']}`")
    if not steps:
        return None
    text = "; then ".join(steps)
    return Finding(title, f"{text[0].upper()}{text[1:]}.", outcome.left.numbers("left"))
