"""The verdict in plain words: what was lost, what an aligner wins back, what remains, and what to try next.

Every sentence rests on numbers that stand beside it. What intervals do not tell apart is called a tie; a share of a
loss that may be zero is not given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from numpy.typing import NDArray

from orthomerge.analysis.conflict import Conflict
from orthomerge.analysis.diagnosis import Finding
from orthomerge.analysis.families import Reading
from orthomerge.analysis.recovery import Recovery, difference, recovery
from orthomerge.analysis.wording import listed, minus, points, span, told
from orthomerge.core.errors import IncompatibleError, RecipeError
from orthomerge.data.task import Access

Hits = Mapping[str, NDArray[np.bool_]]
_NEAR = 1.0  # points that nobody would miss
_MOST_OF_IT = 0.9  # share from which "all but all"
_FEW = 25.0  # inputs a class below which an aligner may be short of them


@dataclass(frozen=True)
class Witness:
    """Another way of reading the merged features, with labels: mean accuracy in percent, and its interval."""

    name: str
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Case:
    """All that a verdict is made of: hits by task on test inputs, readings by family and task, in the same order.

    `base`: the base under the experts' heads: hits, or mean accuracy in percent. `per_class`: the fewest inputs a class
    that an aligner saw of any task; `free`: it adds no parameter. `access`: which inputs the merge itself was
    fitted to. `scales`: a score by scale, `scale`: that of the merge. `commands`: what can be tried: `align` (writes a
    model), `score` (makes a table), `refit`, `probe`.
    """

    method: str
    aligner: str
    expert: Hits
    merged: Hits
    aligned: Hits
    families: Mapping[str, Mapping[str, Reading]]
    _: KW_ONLY
    per_class: float
    base: Hits | float | None = None
    free: bool = True
    access: Access = "data-free"
    witnesses: tuple[Witness, ...] = ()
    conflict: Conflict | None = None
    scales: Mapping[float, float] = field(default_factory=dict)
    scale: object = None
    commands: Mapping[str, str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.expert:
            raise RecipeError("a verdict needs at least one task, got none")
        if not list(self.expert) == list(self.merged) == list(self.aligned):
            raise IncompatibleError("expert, merged and aligned must be scored on the same tasks, in the same order")


def verdict(case: Case) -> tuple[Finding, ...]:
    """All findings, the most important first."""
    found = recovery(case.expert, case.merged, case.aligned, seed=case.seed)
    findings = [_accuracy(case, found), _misalignment(case, found), _remainder(case, found)]
    findings += [_rotation(case), _worst(case), _conflicts(case), _scale(case), _next(case, found)]
    return tuple(finding for finding in findings if finding is not None)


def _accuracy(case: Case, found: Recovery) -> Finding:
    expert, merged, aligned = (_mean(hits) for hits in (case.expert, case.merged, case.aligned))
    numbers = {"expert": expert, "merged": merged, "aligned": aligned, **told("lost", found.lost)}
    tasks = len(case.expert)
    text = f"The experts reach {expert:.1f} % ({'one task' if tasks == 1 else f'mean of {tasks} tasks'}), "
    text += f"{case.method} as it is {merged:.1f} %"
    if found.lost.above:
        text += f": {points(found.lost)} lost."
    elif found.lost.below:
        text += f", {points(minus(found.lost))} more than the experts."
    else:
        text += f". That is a tie: the difference is {points(found.lost)}."
    if case.access == "transductive":
        text += " The merge was fitted to these very test inputs, which flatters it."
    text += f" Read through the aligner {case.aligner!r} it reaches {aligned:.1f} %."
    if isinstance(case.base, Mapping):
        gain, numbers["base"] = difference(case.merged, case.base, seed=case.seed), _mean(case.base)
        text += f" The base under the experts' heads has {numbers['base']:.1f} %"
        if gain.above or gain.below:
            by, word = (gain, "less") if gain.above else (minus(gain), "more")
            text += f", {points(by)} {word} than the merge."
        else:
            text += f", a tie: the merge differs by {points(gain)}."
    elif case.base is not None:
        numbers["base"] = float(case.base)
        text += f" The base under the experts' heads has {numbers['base']:.1f} %."
    return Finding("Accuracy", text, numbers)


def _misalignment(case: Case, found: Recovery) -> Finding:
    numbers, won = told("won", found.won), found.won
    if found.share is None:
        title = "Little to win back"
        text = f"No loss is certain here, so there is no share of it to speak of; the aligner changes {points(won)}."
        return Finding(title, text, numbers)
    numbers |= told("share", found.share, factor=100)
    share = f"{100 * found.share.value:.0f} % of the loss ({span(found.share, factor=100)} %)"
    if not won.above:
        worse = "makes it worse by" if won.below else "wins nothing back for certain:"
        return Finding(
            "Not a matter of alignment",
            f"The aligner {worse} {points(minus(won) if won.below else won)}.",
            numbers,
        )
    text = f"The aligner wins back {points(won)}, {share}, with unlabelled inputs"
    text += f"{' and no new parameter' if case.free else ''}: so much was not lost but misaligned with the head."
    if not found.left.above and found.share.value >= _MOST_OF_IT:
        return Finding("Misaligned, not lost", text, numbers)
    mostly = found.share.low > 0.5
    return Finding("Mostly misaligned" if mostly else "Partly misaligned", text, numbers)


def _remainder(case: Case, found: Recovery) -> Finding | None:
    if found.share is None:
        return None
    left, numbers = found.left, told("left", found.left)
    if not left.above:
        text = f"Between the aligned merge and the experts no difference is certain ({points(left)})."
        return Finding("Nothing certain remains", text, numbers)
    text = f"{points(left)} remain between the aligned merge and the experts."
    aligned, title = _mean(case.aligned), "What remains"
    few = case.per_class < _FEW
    best = max(case.witnesses, key=lambda witness: witness.mean, default=None)
    if best is not None:
        numbers |= {witness.name: witness.mean for witness in case.witnesses}
        text += f" A second witness, which saw labels ({best.name}), reads "
        text += f"{best.mean:.1f} % ({best.low:.1f} to {best.high:.1f}) off the same features: "
        if best.low > aligned:
            text += "the classes are more separated than the aligner could tell; a better reading may win more."
            return Finding("Not all of it is lost", text, numbers)
        text += f"{'no more' if best.mean <= aligned else 'not for certain more'} than the aligner does. "
    else:
        text += " "
    if few:
        text += f"With {case.per_class:.0f} inputs a class the aligner may also have seen too few: "
        text += "it is lost information, or too few inputs, and these numbers do not tell which."
    else:
        title = "Likely lost information"
        text += f"The aligner saw {case.per_class:.0f} inputs a class or more: most of it is likely information that "
        text += "the merged features no longer hold in a form that a head can read."
    return Finding(title, text, numbers)


def _rotation(case: Case) -> Finding | None:
    """Whether the map is a rotation: held-out distance and accuracy, orthogonal against linear."""
    raw, turned, linear = (_distance(case, family) for family in ("none", "orthogonal", "linear"))
    if any(map(math.isnan, (raw, turned, linear))):
        return None
    more = difference(_hits(case, "linear"), _hits(case, "orthogonal"), seed=case.seed)
    numbers = {"raw": raw, "orthogonal": turned, "linear": linear, **told("linear beyond orthogonal", more)}
    rigid = _distance(case, "rigid")
    shifted = "" if math.isnan(rigid) else f" ({rigid:.2f} with a shift)"
    text = (
        f"On inputs that no map has seen, merged features are {raw:.2f} from the expert's (1: as far as guessing the "
    )
    text += f"mean); the best orthogonal map leaves {turned:.2f}{shifted}, the best linear one {linear:.2f}. "
    tie = f"In accuracy the linear map adds {points(more)} to the orthogonal one"
    gain = raw - linear
    if raw < 0.02:
        return Finding("The features agree", f"{text}There is nothing for a map to do. {tie}.", numbers)
    if gain <= 0.02 * raw:
        return Finding("No linear map helps", f"{text}Neither brings them nearer to speak of. {tie}.", numbers)
    numbers["orthogonal share"] = share = (raw - turned) / gain
    text += f"A rotation alone does {100 * share:.0f} % of what any linear map does. {tie}"
    if share >= _MOST_OF_IT and more.high < _NEAR:
        return Finding("It is a rotation", f"{text}: the orthogonal map suffices.", numbers)
    if more.above or share < 0.5:
        tail = ": the difference is more than a rotation." if more.above else ", a tie; the features differ by more."
        return Finding("More than a rotation", f"{text}{tail}", numbers)
    return Finding("Largely a rotation", f"{text}, which is a tie.", numbers)


def _worst(case: Case) -> Finding | None:
    if len(case.expert) < 2:
        return None
    losses = {
        task: difference({task: case.expert[task]}, {task: case.merged[task]}, seed=case.seed) for task in case.expert
    }
    order = sorted(losses, key=lambda task: -losses[task].value)
    first, second = losses[order[0]], losses[order[1]]
    numbers = {f"lost on {task}": losses[task].value for task in order}
    if not first.above:
        return Finding("No task stands out", "On no single task is a loss certain.", numbers)
    text = f"{order[0]!r} loses the most: {points(first)}"
    near = [task for task in order[1:] if losses[task].high > first.low]
    if near:
        text += f"; {listed(near)} may lose as much (the intervals overlap)."
    else:
        text += f", clearly more than the next, {order[1]!r} ({second.value:.1f})."
    kept = [task for task in order if not losses[task].above]
    if kept:
        text += f" No loss is certain on {listed(kept)}."
    return Finding("Which task suffers", text, numbers)


def _conflicts(case: Case) -> Finding | None:
    found = case.conflict
    if found is None or len(found.tasks) < 2:
        return None
    places = [(i, j) for i in range(len(found.tasks)) for j in range(i)]
    pairs = [place for place in places if not math.isnan(found.signs[place[0]][place[1]])]
    if not pairs:
        return None
    i, j = max(pairs, key=lambda pair: found.signs[pair[0]][pair[1]])
    k, m = min(pairs, key=lambda pair: found.signs[pair[0]][pair[1]])
    signs, cosine = 100 * found.signs[i][j], found.cosine[i][j]
    numbers = {"sign conflict, %": signs, "cosine": cosine, "least sign conflict, %": 100 * found.signs[k][m]}
    text = f"{found.tasks[j]!r} and {found.tasks[i]!r} pull against each other the most: of the weights that both "
    text += f"changed, {signs:.1f} % go in opposite directions (50 % is chance; cosine {cosine:.2f})."
    if len(pairs) > 1:
        text += f" The least is {numbers['least sign conflict, %']:.1f} %, {found.tasks[m]!r} and {found.tasks[k]!r}."
        if signs - numbers["least sign conflict, %"] < 2:
            text += " All pairs are within two points of each other: no pair stands out."
    return Finding(
        "Which experts conflict", text, {name: value for name, value in numbers.items() if not math.isnan(value)}
    )


def _scale(case: Case) -> Finding | None:
    """Whether another scale would have been better, on validation inputs."""
    if not case.scales:
        return None
    best = max(case.scales, key=lambda scale: (case.scales[scale], -scale))
    numbers = {f"at {scale:g}": score for scale, score in case.scales.items()}
    text = f"Of the scales tried on validation inputs {best:g} is the best ({case.scales[best]:.1f} in the mean)"
    near = [value for scale, value in case.scales.items() if math.isclose(scale, _number(case.scale), abs_tol=1e-9)]
    if near and near[0] < case.scales[best]:
        text += f"; at {_number(case.scale):g}, as merged, it is {near[0]:.1f}"
    if best in (min(case.scales), max(case.scales)) and len(case.scales) > 1:
        text += "; it lies at the end of what was tried"
    return Finding("Scale", f"{text}.", numbers)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _next(case: Case, found: Recovery) -> Finding | None:
    commands = case.commands or {}
    if not found.lost.above:
        return Finding("What to try next", "Nothing has to be done: the merge is as good as its experts, within noise.")
    steps = []
    if found.won.above and "align" in commands:
        steps.append(f"put the aligned heads into the model: `{commands['align']}`")
    elif found.won.above and "score" in commands:
        steps.append(f"score the merge read through the aligner beside others: `{commands['score']}`")
    if found.left.above and case.access == "data-free" and "refit" in commands:
        steps.append(f"let the encoder be fitted as well, with the same unlabelled inputs: `{commands['refit']}`")
    if found.left.above and not case.witnesses and "probe" in commands:
        steps.append(f"ask a probe with labels whether the classes are still there: `{commands['probe']}`")
    if not steps:
        return None
    text = "; then ".join(steps)
    return Finding("What to try next", f"{text[0].upper()}{text[1:]}.", told("left", found.left))


def _hits(case: Case, family: str) -> dict[str, NDArray[np.bool_]]:
    return {task: reading.hits for task, reading in case.families[family].items()}


def _distance(case: Case, family: str) -> float:
    """In the mean of tasks; NaN where it was not measured."""
    values = [reading.distance for reading in case.families.get(family, {}).values()]
    return math.fsum(values) / len(values) if values else math.nan


def _mean(hits: Hits) -> float:
    return 100 * math.fsum(float(part.mean()) for part in hits.values()) / len(hits)
