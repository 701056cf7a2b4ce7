"""The tables of `fitted.py`, from the records of its jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.environments import table
from benchmarks.fitted_jobs import SPLITS


def sheets(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> str:
    """The tables of all parts."""
    titles = {
        "references": "References",
        "inductive": "Inductive: all unlabelled training inputs, scored on test",
        "transductive": "Transductive: the unlabelled test inputs themselves, as the papers do",
        "scales": "The scale of the vector that MOMA masks, from task arithmetic: chosen on validation data",
        "few": "Inductive, few inputs a class",
        "ablation": "Ablation (Table 4 of the paper)",
        "masking": "Masking rate against accuracy (Figure 8): by the weight of the mask's penalty",
        "efficiency": "Data efficiency (Table 5)",
    }
    parts = []
    for part, title in titles.items():
        mine = [row for row in rows if row["part"] == part]
        if mine and part == "efficiency":
            mine += [{**row, "row": row["what"]} for row in rows if _whole(row)]
        if mine:
            parts.append(f"### {title}\n\n{_sheet(part, mine, tasks)}")
    return "\n\n".join(parts)


def _whole(row: Mapping[str, Any]) -> bool:
    """Whether it stands for all of the inputs in the table of data efficiency."""
    part, way = row["part"], (row.get("what"), row.get("start"))
    return part in SPLITS and way in (("realign", "task_arithmetic"), ("moma", "task_arithmetic"))


def _sheet(part: str, rows: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> str:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["row"], row.get("access"), row.get("shots")), []).append(row)
    lines = []
    for (name, access, shots), same in sorted(groups.items(), key=lambda item: _order(part, item[0])):
        means = [row["mean"] for row in same]
        spread_ = f" ± {stdev(means):.1f}" if len(means) > 1 else ""
        cells = [f"{fmean(row['scores'][task] for row in same):.1f}" for task in tasks]
        line = [name, *_more(part, same, access, shots)]
        line += [*cells, f"**{fmean(means):.1f}**{spread_}", str(len(same)), f"{same[0]['extra']:,}"]
        seconds = [row["seconds"] for row in same if "seconds" in row]
        line.append(f"{fmean(seconds):.0f}" if seconds else "")
        lines.append(line)
    heads = [{"masking": "penalty", "scales": "scale"}.get(part, "method")]
    heads += [title for title, parts in _MORE.items() if part in parts]
    return table([*heads, *tasks, "mean", "seeds", "extra parameters", "s"], lines)


_MORE = {  # columns of some parts
    "access": ("ablation", "efficiency"),
    "inputs": ("few", "efficiency"),
    "masked": ("masking", "ablation"),
    "validation": ("scales",),
}


def _more(part: str, same: Sequence[Mapping[str, Any]], access: str | None, shots: float | None) -> list[str]:
    """What stands in those columns."""
    masked = [row["facts"]["masked"] for row in same if "masked" in row.get("facts", {})]
    validation = [row["facts"]["validation"] for row in same if "validation" in row.get("facts", {})]
    cells = {
        "access": str(access),
        "inputs": "all" if shots is None else f"{shots:.0%}" if shots < 1 else f"{shots:g} a class",
        "masked": f"{100 * fmean(masked):.0f} %" if masked else "",
        "validation": f"{fmean(validation):.1f}" if validation else "",
    }
    return [cells[title] for title, parts in _MORE.items() if part in parts]


def _order(part: str, key: tuple[Any, ...]) -> tuple[Any, ...]:
    name, access, shots = key
    first = [
        "pre-trained", "fine-tuned", "MTL", "LM-Cocktail", "Model Tailor", "Fisher", "RegMean", "RegMean++",
        "Concrete TA", "Concrete AdaMerging", "AdaMerging TW", "AdaMerging LW", "AdaMerging++ LW",
    ]  # fmt: skip
    size = 1e9 if shots is None else float(shots)
    if part in ("few", "efficiency"):
        return (access or "", size, name)
    if part in ("masking", "scales"):
        return (float(name),)
    return (access or "", first.index(name) if name in first else len(first), 0 if part == "ablation" else name)
