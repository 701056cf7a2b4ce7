"""Model card of a merged model in the hub's format, rendered from the manifest alone.

All outside strings (names, labels, licences, options) are plain text: Markdown and HTML characters are escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from orthomerge.core.errors import some
from orthomerge.models.families import FAMILIES

_HOME = "https://pypi.org/project/orthomerge"
_PIPELINES = {"text": "text-classification", "image": "image-classification"}
_EXAMPLES = {"text": '"a text"', "image": '"picture.png"'}
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # as the hub writes them
_SPECIAL = "\\|`<>[]*_#~!$&"


def model_card(manifest: dict[str, Any]) -> str:
    """Render a manifest as Markdown with the hub's YAML header."""
    header = yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True).strip()
    sections = (_about, _accuracy, _data, _use, _licences, _limits)
    texts = [f"---\n{header}\n---", "# Merged classifiers", *(section(manifest) for section in sections)]
    return "\n\n".join(filter(None, texts)) + "\n"


def _header(manifest: dict[str, Any]) -> dict[str, Any]:
    """Metadata for the hub: parent models, pipeline tag, scores, and the licence if all parts share one."""
    entries, method = _entries(manifest), manifest["method"]["name"]
    parents = dict.fromkeys(entry["name"].partition("@")[0] for entry in entries.values() if entry.get("revision"))
    licences = {str(entry.get("license") or "") for entry in entries.values()}
    licence = licences.pop() if len(licences) == 1 else ""
    pipeline = _PIPELINES.get(_modality(manifest))
    results = []
    if scores := manifest.get("evaluation"):
        name = f"accuracy ({scores['access']})"
        results = [
            {
                "task": {"type": pipeline or "other", "name": task},
                "dataset": {"name": task, "type": task, "split": scores["split"]},
                "metrics": [{"type": "accuracy", "value": round(row["value"], 4), "name": name}],
            }
            for task, row in scores["tasks"].items()
        ]
    header = {
        "library_name": "transformers",
        "license": licence if _LICENCE.fullmatch(licence) else None,
        "pipeline_tag": pipeline,
        "tags": ["merge", "orthomerge", method],
        "base_model": list(parents),
        "base_model_relation": "merge" if parents else None,
        "model-index": [{"name": f"merge by {method}", "results": results}] if results else None,
    }
    return {key: value for key, value in header.items() if value}


def _about(manifest: dict[str, Any]) -> str:
    method, experts, heads = manifest["method"], manifest["inputs"]["experts"], manifest["heads"]
    options = ", ".join(f"{_text(name)} = {_text(value)}" for name, value in method["parameters"].items()) or "none"
    poolings = ", ".join(dict.fromkeys(head["pooling"] for head in heads.values()))
    title = f"One encoder merged from {len(experts)} fine-tuned classifiers with [orthomerge]({_HOME})"
    lines = [
        f"{title} {_text(manifest['orthomerge'])}, and the head of each.",
        "",
        f"- Base: {_text(_named(manifest['inputs']['base']))}",
        f"- Method: {_text(method['name'])} ({options}), seed {_text(manifest['seed'])}",
        f"- Family: {_text(manifest['family'])}, features: {_text(poolings)}",
    ]
    if manifest.get("vector"):
        lines.append(f"- Task vector: {_text(manifest['vector'])}")
    rows = [
        (task, _named(experts[task]), len(head["labels"]), some(head["labels"], most=5)) for task, head in heads.items()
    ]
    return "\n".join([*lines, "", _table(("task", "expert", "classes", "labels"), rows)])


def _accuracy(manifest: dict[str, Any]) -> str:
    scores = manifest.get("evaluation")
    if not scores:
        return ""
    tasks = scores["tasks"]
    others = [role for role in ("expert", "base") if all(role in row for row in tasks.values())]
    columns = [*others, "value"]
    rows: list[tuple[str, ...]] = []
    for task, row in tasks.items():
        interval = f"{_percent(row['low'])} to {_percent(row['high'])}"
        rows.append((task, *(_percent(row[name]) for name in columns), interval, f"{row['examples']:,}"))
    if len(rows) > 1:
        means = (sum(row[name] for row in tasks.values()) / len(tasks) for name in columns)
        rows.append(("mean", *map(_percent, means), "", ""))
    return (
        f"## Accuracy\n\nIn percent, on the {_text(scores['split'])} split; this model is {_text(scores['access'])} "
        f"({_ACCESS.get(scores['access'], 'see the documentation')}).\n\n"
        + _table(("task", *others, "merged", "95 % interval", "inputs"), rows)
    )


_ACCESS = {
    "data-free": "no inputs were used to make it",
    "inductive": "the inputs used to make it are not those it is scored on",
    "transductive": "the inputs it is scored on were used to make it, without their labels",
}


def _data(manifest: dict[str, Any]) -> str:
    rows = [
        (verb, task, manifest[block]["split"], row["inputs"], str(row.get("data")).rpartition(":")[2][:16])
        for block, verb in (("fit", "merge"), ("alignment", "heads"))
        if block in manifest
        for task, row in manifest[block]["tasks"].items()
    ]
    if not rows:
        return "## Data used\n\nNone: only weights were merged."
    if alignment := manifest.get("alignment"):
        added = sum(task["extra"]["parameters"] for task in alignment["tasks"].values())
        summary = f"Heads were aligned by `{_code(alignment['aligner'])}`, which is {_text(alignment['access'])}"
        summary += f" and adds {added:,} parameters, saved with the heads." if added else " and adds no parameter."
    else:
        summary = f"The merge is {_text(manifest['fit']['access'])}."
    table = _table(("fitted", "task", "split", "inputs", "hash of the inputs"), rows)
    return f"## Data used\n\nInputs without their labels. {summary}\n\n{table}"


def _use(manifest: dict[str, Any]) -> str:
    modality = _modality(manifest)
    lines = ["## Use", "", "```python", "import orthomerge", "", 'model = orthomerge.load("PATH")']
    if modality in _EXAMPLES:
        lines.append(f"model.predict({_EXAMPLES[modality]})  # a label and its score for every task")
    lines.append("```")
    stock = [task for task, head in manifest["heads"].items() if head["class"]]
    if stock:
        auto = f"AutoModelFor{'Image' if modality == 'image' else 'Sequence'}Classification"
        task = json.dumps(_code(stock[0]))
        lines += ["", f'`{auto}.from_pretrained("PATH", subfolder={task})` loads one task in stock transformers.']
    return "\n".join(lines)


def _licences(manifest: dict[str, Any]) -> str:
    rows = [(role, _named(entry), entry.get("license") or "unknown") for role, entry in _entries(manifest).items()]
    return (
        "## Licences of the parts\n\nThe licences of the base and of every expert apply to the result. *Unknown*: "
        "the part has no model card, or its card states no licence.\n\n" + _table(("part", "name", "licence"), rows)
    )


def _limits(manifest: dict[str, Any]) -> str:
    advice = "Merging in weight space costs accuracy: measure it on your own data before use."
    if "evaluation" in manifest:
        advice = "The accuracy above holds for that data only; measure it on your own before use."
    notes = "".join(f"\n- {_text(note)}" for note in manifest.get("notes", ()))
    return (
        f"## Limits\n\n{advice} The model may repeat the errors and biases of base and experts, and an "
        "input of none of these tasks still gets a label. `orthomerge.json` holds the hashes of all inputs and files; "
        "`orthomerge inspect PATH --verify` checks them." + (f"\n\nNotes of the merge:\n{notes}" if notes else "")
    )


def _entries(manifest: dict[str, Any]) -> dict[str, Mapping[str, Any]]:
    inputs = manifest["inputs"]
    return {"base": inputs["base"], **{f"expert {task}": entry for task, entry in inputs["experts"].items()}}


def _modality(manifest: dict[str, Any]) -> str:
    family = FAMILIES.get(manifest["family"])
    return family.modality if family else "unknown"


def _named(entry: Mapping[str, Any]) -> str:
    return f"{entry['name']} @ {entry['revision']}" if entry.get("revision") else str(entry["name"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _table(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *(map(_text, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return "".join(char for char in text if char.isprintable() and char != "`")


def _text(value: object) -> str:
    plain = "".join(" " if char.isspace() else char for char in str(value) if char.isprintable() or char.isspace())
    return "".join(f"&#{ord(char)};" if char in _SPECIAL else char for char in plain)
