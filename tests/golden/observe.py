"""Plain values of a command's files, under names that do not depend on where files lie.

    encoder/LAYER.weight       a tensor, without the prefix of its family
    head/TASK/weight, bias     hidden.weight and hidden.bias where a head has two layers; extra/TASK/... beyond a head
    labels/TASK                class names
    score/MODEL/TASK/...       value, interval and number of inputs of a record; predicted/... the classes
    verdict, number/NAME, figure/KEY    a diagnosis

Only `read_model` knows the layout of a model folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Value = torch.Tensor | float | str


def read_model(folder: Path) -> dict[str, Value]:
    """Read a folder that `merge`, `align`, `export` or `finetune` wrote, in the layout of 0.1.0 or the one after it.

    Layout of 0.1.0: encoder/model.safetensors, heads/TASK/head.safetensors with labels.json.
    Layout after it: encoder.safetensors with stock names, TASK/head.safetensors and TASK/config.json.
    An export or an expert is a stock classifier, or an adapter: its head has the task "".
    """
    if (folder / "encoder").is_dir():
        files = folder.glob("encoder/*.safetensors")
        places = {path.name: path for path in sorted((folder / "heads").iterdir())}
    elif any(folder.glob("encoder*.safetensors")):
        files = folder.glob("encoder*.safetensors")
        places = {path.parent.name: path.parent for path in sorted(folder.glob("*/head.safetensors"))}
    else:
        files, places = folder.glob("*.safetensors"), {"": folder}
    tensors = {_name(key): value for path in files for key, value in load_file(path).items()}
    values: dict[str, Value] = dict(sorted(tensors.items()))
    for kind in ("head", "extra"):
        for task, place in places.items():
            path = place / f"{kind}.safetensors"
            read = load_file(path) if path.is_file() else {}
            values |= {f"{kind}/{task}/{_head_name(key)}": value for key, value in read.items()}
    return values | {f"labels/{task}": " ".join(_labels(place)) for task, place in places.items()}


def _name(key: str) -> str:
    """The name of a tensor of a whole model."""
    stem = key.removeprefix("base_model.model.")
    if stem.startswith("classifier."):
        return f"head//{_head_name(stem)}"
    return f"encoder/{re.sub('^(bert|vit)[.]', '', stem)}"


def _head_name(key: str) -> str:
    """`weight`, `bias`, `hidden.weight`, `hidden.bias`, however the stock class calls them."""
    stem = key.removeprefix("classifier.")
    return stem.replace("dense.", "hidden.").replace("out_proj.", "")


def _labels(place: Path) -> list[str]:
    if (place / "labels.json").is_file():
        document = json.loads((place / "labels.json").read_text())
        return [str(label) for label in (document["labels"] if isinstance(document, dict) else document)]
    if (place / "config.json").is_file():
        names = json.loads((place / "config.json").read_text()).get("id2label", {})
        return [names[number] for number in sorted(names, key=int)]
    return []


def observe(model: Path | None, run: Path | None) -> dict[str, Value]:
    """Everything that a command is compared by; a folder that is not there gives nothing."""
    values: dict[str, Value] = {}
    if model is not None and model.is_dir():
        values |= read_model(model)
    if run is not None and (run / "records.jsonl").is_file():
        values |= _records(run)
    if run is not None and (run / "diagnosis.json").is_file():
        values |= _diagnosis(json.loads((run / "diagnosis.json").read_text()))
    return values


def _records(run: Path) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for line in (run / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        name = _record_name(record)
        if f"score/{name}" in values:
            raise ValueError(f"two records of {run} are called {name}")
        numbers = [record[key] for key in ("value", "low", "high", "examples")]
        values[f"score/{name}"] = torch.tensor(numbers, dtype=torch.float64)
        if record.get("predictions"):
            with np.load(run / record["predictions"]) as arrays:
                values[f"predicted/{name}"] = "".join(map(str, arrays["predicted"].tolist()))
    return values


def _record_name(record: Mapping[str, Any]) -> str:
    """Name of a record that no other record of its run has."""
    parameters = ",".join(f"{key}={value}" for key, value in sorted(record["parameters"].items()))
    method = f"{record['method']}({parameters})" if parameters else str(record["method"])
    read = record["protocol"] if record.get("aligner") is None else f"aligner {record['aligner']}"
    shots = "" if record["shots"] is None else f"/shots {record['shots']:g}"
    return f"{method}/{record['task']}/{read}/{record['metric']}/{record['access']}{shots}/seed {record['seed']}"


def _diagnosis(document: Mapping[str, Any]) -> dict[str, Value]:
    values: dict[str, Value] = {"verdict": " | ".join(finding["title"] for finding in document["verdict"])}
    for finding in document["verdict"]:
        values |= {f"number/{name}": float(value) for name, value in finding["numbers"].items() if value is not None}
    for figure in document["figures"]:
        numbers = torch.tensor(list(_numbers(figure)), dtype=torch.float64)
        values[f"figure/{figure['key']}"] = numbers
    return values


def _numbers(value: Any) -> Iterator[float]:
    """Yield every number inside, in order; the order of keys does not count."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _numbers(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
