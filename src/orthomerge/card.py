"""The model card of a merged model, in the hub's format, from the manifest alone."""

from __future__ import annotations

from typing import Any

import yaml

from orthomerge.errors import some

__all__ = ["model_card"]


def model_card(manifest: dict[str, Any]) -> str:
    """Markdown with the hub's YAML header. Names from outside are quoted, never trusted as markup."""
    method = manifest["method"]
    inputs = manifest["inputs"]
    hub = [entry["name"] for entry in (inputs["base"], *inputs["experts"].values()) if entry.get("revision")]
    header = {
        "library_name": "transformers",
        "tags": ["merge", "orthomerge", method["name"]],
        **({"base_model": hub, "base_model_relation": "merge"} if hub else {}),
    }
    options = ", ".join(f"{name} = {value}" for name, value in method["parameters"].items()) or "none"
    rows = "\n".join(
        f"| {_cell(task)} | {_cell(inputs['experts'][task]['name'])} | {len(head['labels'])} "
        f"| {_cell(some(head['labels'], most=5))} |"
        for task, head in manifest["heads"].items()
    )
    expression = f"\nTask vector: `{manifest['vector']}`.\n" if manifest.get("vector") else ""
    first = next(iter(manifest["heads"]))
    return f"""---
{yaml.safe_dump(header, sort_keys=False).strip()}
---

# Merged classifiers

One encoder merged from {len(inputs["experts"])} fine-tuned classifiers with [orthomerge](https://pypi.org/project/orthomerge)
{manifest["orthomerge"]}, and the head of each.

- Base: {_cell(inputs["base"]["name"])}
- Method: `{method["name"]}` ({options}), seed {manifest["seed"]}
- Family: `{manifest["family"]}`, features: `{manifest["pooling"]}`
{_aligned(manifest)}{expression}
| task | expert | classes | labels |
|---|---|---|---|
{rows}

## Use

```python
import orthomerge

model = orthomerge.load("PATH")
logits = model.logits("{first}", batch)  # batch: what the tokenizer or image processor in encoder/ returns
```

{_export(manifest)}## Limits

Merging in weight space costs accuracy: measure it on your own data before use. The licences of the base and of
every expert apply to the result. `orthomerge.json` holds the hashes of all inputs and files; `orthomerge verify PATH`
checks them.
"""


def _aligned(manifest: dict[str, Any]) -> str:
    """What was done to the heads, on which inputs, and what it added; nothing where they are as they were merged."""
    about = manifest.get("alignment")
    if about is None:
        return ""
    tasks = ", ".join(f"{_cell(task)} ({found['inputs']})" for task, found in about["tasks"].items())
    added = sum(found["extra"]["parameters"] for found in about["tasks"].values())
    grown = f"adds {added:,} parameters, kept beside the heads" if added else "adds no parameter"
    return (
        f"- Heads aligned by `{about['aligner']}` on unlabelled inputs of the {about['split']} split: {tasks}. "
        f"It is {about['access']} and {grown}.\n"
    )


def _export(manifest: dict[str, Any]) -> str:
    """How to export the first task whose classifier is a head; nothing where all are more than that."""
    tasks = manifest["alignment"]["tasks"] if "alignment" in manifest else {}
    grown = {task for task, found in tasks.items() if found["extra"]["parameters"]}
    first = next((task for task in manifest["heads"] if task not in grown), None)
    if first is None:
        return ""
    return (
        f"`orthomerge export PATH --task {first} --to DIR` writes an ordinary transformers classifier for one task.\n\n"
    )


def _cell(text: str) -> str:
    """Text that cannot break out of a table cell."""
    safe = "".join(" " if char.isspace() else char for char in text if char.isprintable() or char.isspace())
    for mark in "\\|`<>[]*_":
        safe = safe.replace(mark, f"&#{ord(mark)};")
    return safe
