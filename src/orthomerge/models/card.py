"""The model card of a merged model, in the hub's format, from the manifest alone.

Whatever comes from outside (names, labels, licences, options) is shown as text: marks of Markdown and HTML are
escaped, and the header is YAML that a library writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from orthomerge.core.errors import some
from orthomerge.models.families import FAMILIES

_HOME = "https://pypi.org/project/orthomerge"
_TASKS = {"text": "text-classification", "image": "image-classification"}
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # as the hub writes them
_MARKS = "\\|`<>[]*_#~!$&"


def model_card(manifest: dict[str, Any]) -> str:
    """Markdown with the hub's YAML header."""
    parts = [
        f"---\n{yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True).strip()}\n---",
        "# Merged classifiers",
        _about(manifest),
        _tasks(manifest),
        _accuracy(manifest),
        _data(manifest),
        _use(manifest),
        _licences(manifest),
        _limits(manifest),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _header(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the hub reads: the parent models, what the model does, its licence if all parts share one, results."""
    entries = _entries(manifest)
    hub = dict.fromkeys(entry["name"].partition("@")[0] for entry in entries.values() if entry.get("revision"))
    licences = {str(entry.get("license")) if entry.get("license") else "" for entry in entries.values()}
    shared = licences.pop() if len(licences) == 1 else ""
    pipeline = _TASKS.get(_modality(manifest) or "")
    results = _results(manifest, pipeline)
    return {
        "library_name": "transformers",
        **({"license": shared} if _LICENCE.fullmatch(shared) else {}),
        **({"pipeline_tag": pipeline} if pipeline else {}),
        "tags": ["merge", "orthomerge", manifest["method"]["name"]],
        **({"base_model": list(hub), "base_model_relation": "merge"} if hub else {}),
        **({"model-index": results} if results else {}),
    }


def _results(manifest: dict[str, Any], pipeline: str | None) -> list[dict[str, Any]]:
    """The hub's `model-index`: one result per task."""
    scores = manifest.get("evaluation")
    if not scores:
        return []
    name = f"accuracy ({scores['access']})"
    results = [
        {
            "task": {"type": pipeline or "other", "name": task},
            "dataset": {"name": task, "type": task, "split": scores["split"]},
            "metrics": [{"type": "accuracy", "value": round(row["value"], 4), "name": name}],
        }
        for task, row in scores["tasks"].items()
    ]
    return [{"name": f"merge by {manifest['method']['name']}", "results": results}]


def _about(manifest: dict[str, Any]) -> str:
    method, inputs = manifest["method"], manifest["inputs"]
    options = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in method["parameters"].items()) or "none"
    poolings = ", ".join(dict.fromkeys(head["pooling"] for head in manifest["heads"].values()))
    title = f"One encoder merged from {len(inputs['experts'])} fine-tuned classifiers"
    expression = [f"- Task vector: {_text(manifest['vector'])}"] if manifest.get("vector") else []
    return "\n".join(
        [
            f"{title} with [orthomerge]({_HOME}) {_text(manifest['orthomerge'])}, and the head of each.",
            "",
            f"- Base: {_named(inputs['base'])}",
            f"- Method: {_text(method['name'])} ({options}), seed {_text(manifest['seed'])}",
            f"- Family: {_text(manifest['family'])}, features: {_text(poolings)}",
            *expression,
        ]
    )


def _tasks(manifest: dict[str, Any]) -> str:
    experts = manifest["inputs"]["experts"]
    rows = (
        (_text(task), _named(experts[task]), str(len(head["labels"])), _text(some(head["labels"], most=5)))
        for task, head in manifest["heads"].items()
    )
    return _table(("task", "expert", "classes", "labels"), rows)


def _accuracy(manifest: dict[str, Any]) -> str:
    """What was measured, beside the experts; nothing where nothing was."""
    scores = manifest.get("evaluation")
    if not scores:
        return ""
    tasks = scores["tasks"]
    others = [role for role in ("expert", "base") if all(role in row for row in tasks.values())]
    rows = [
        (
            _text(task),
            *(f"{100 * row[role]:.1f}" for role in others),
            f"{100 * row['value']:.1f}",
            f"{100 * row['low']:.1f} to {100 * row['high']:.1f}",
            f"{row['examples']:,}",
        )
        for task, row in tasks.items()
    ]
    if len(rows) > 1:
        means = [sum(row[role] for row in tasks.values()) / len(tasks) for role in (*others, "value")]
        rows.append(("mean", *(f"{100 * mean:.1f}" for mean in means), "", ""))
    return (
        f"## Accuracy\n\nIn percent, on the {_text(scores['split'])} split; this model is {_text(scores['access'])} "
        f"({_ACCESS.get(scores['access'], 'see the documentation')}).\n\n"
        + _table(("task", *others, "merged", "95 % interval", "inputs"), rows)
    )


_ACCESS = {
    "data-free": "no inputs were used to make it",
    "inductive": "the inputs used to make it are not those it is scored on",
    "transductive": "it has seen the very inputs it is scored on, without labels",
}


def _data(manifest: dict[str, Any]) -> str:
    """Which inputs the merge, and the alignment of its heads, looked at."""
    stages = [
        (manifest[block], verb) for block, verb in (("fit", "merge"), ("alignment", "heads")) if block in manifest
    ]
    if not stages:
        return "## Data used\n\nNone: only weights were merged."
    rows = [
        (verb, _text(task), _text(about["split"]), _text(row["inputs"]), f"`{_digest(row.get('data'))}`")
        for about, verb in stages
        for task, row in about["tasks"].items()
    ]
    table = _table(("fitted", "task", "split", "inputs", "hash of the inputs"), rows)
    return f"## Data used\n\nInputs without their labels. {_aligned(manifest)}\n\n{table}"


def _aligned(manifest: dict[str, Any]) -> str:
    """What was done to the heads, and what it added."""
    about = manifest.get("alignment")
    if about is None:
        return f"The merge is {_text(manifest['fit']['access'])}."
    added = sum(task["extra"]["parameters"] for task in about["tasks"].values())
    grown = f"adds {added:,} parameters, kept beside the heads" if added else "adds no parameter"
    return f"Heads were aligned by `{_code(about['aligner'])}`, which is {_text(about['access'])} and {grown}."


def _use(manifest: dict[str, Any]) -> str:
    example = {"text": '"a text"', "image": '"picture.png"'}.get(_modality(manifest) or "")
    snippet = "" if example is None else f"model.predict({example})  # a label and its score for every task\n"
    return f"""## Use

```python
import orthomerge

model = orthomerge.load("PATH")
{snippet}```{_stock(manifest)}"""


def _stock(manifest: dict[str, Any]) -> str:
    """How stock transformers loads the first task that it can compute; nothing where there is none."""
    first = next((task for task, head in manifest["heads"].items() if head["class"]), None)
    if first is None:
        return ""
    name = json.dumps(_code(first))
    loads = (
        "AutoModelForImageClassification" if _modality(manifest) == "image" else "AutoModelForSequenceClassification"
    )
    return f'\n\n`{loads}.from_pretrained("PATH", subfolder={name})` loads one task in stock transformers.'


def _licences(manifest: dict[str, Any]) -> str:
    """The licence of every part, as its own card gives it."""
    rows = [
        (role, _named(entry), _text(entry.get("license") or "unknown")) for role, entry in _entries(manifest).items()
    ]
    return (
        "## Licences of the parts\n\nThe licences of the base and of every expert apply to the result. *Unknown*: the "
        "part came without a model card that says.\n\n" + _table(("part", "name", "licence"), rows)
    )


def _limits(manifest: dict[str, Any]) -> str:
    measured = "Merging in weight space costs accuracy: measure it on your own data before use."
    if "evaluation" in manifest:
        measured = "The accuracy above holds for that data alone; measure it on your own before use."
    notes = "".join(f"\n- {_text(note)}" for note in manifest.get("notes", ()))
    return (
        f"## Limits\n\n{measured} Whatever base and experts get wrong, biases included, this model may too, and an "
        "input of none of these tasks still gets a label. `orthomerge.json` holds the hashes of all inputs and files; "
        "`orthomerge inspect PATH --verify` checks them." + (f"\n\nNotes of the merge:\n{notes}" if notes else "")
    )


def _entries(manifest: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Base and experts by their roles."""
    inputs = manifest["inputs"]
    return {"base": inputs["base"], **{f"expert {_text(task)}": entry for task, entry in inputs["experts"].items()}}


def _modality(manifest: dict[str, Any]) -> str | None:
    family = FAMILIES.get(manifest["family"])
    return family.modality if family else None


def _named(entry: Mapping[str, Any]) -> str:
    revision = f" @ {_text(entry['revision'])}" if entry.get("revision") else ""
    return _text(entry["name"]) + revision


def _digest(digest: object) -> str:
    return _code(str(digest or "unknown").rpartition(":")[2][:16])


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    columns = list(titles)
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    """Text that cannot break out of a span or block of code."""
    return "".join(char for char in text if char.isprintable() and char != "`")


def _text(value: object) -> str:
    """Text that is shown as it is: no markup, and no way out of a table cell."""
    plain = "".join(" " if char.isspace() else char for char in str(value) if char.isprintable() or char.isspace())
    return "".join(f"&#{ord(char)};" if char in _MARKS else char for char in plain)
