"""Stock classifiers of transformers: which one computes what a head does, and a folder that it loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.checks import parse_size
from orthomerge.core.errors import RecipeError
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import DTYPES, Spec, is_float, torch_dtype
from orthomerge.files.documents import write_json
from orthomerge.files.folders import EXPORT, write_marker
from orthomerge.files.publish import publish
from orthomerge.files.safetensors import write_shards
from orthomerge.models.family import Family
from orthomerge.models.heads import Head

if TYPE_CHECKING:
    import torch

    from orthomerge.models.heads import Extra
    from orthomerge.models.model_data import ModelData


def classifier_config(config: Mapping[str, Any], family: Family, labels: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """The config of the stock classifier on top of an encoder."""
    if config.get("model_type") == "clip_vision_model":
        # The stock classifier is configured as a CLIP of two towers, and builds the one only.
        config = {"model_type": "clip", "vision_config": dict(config)}
    return {
        **config,
        "dtype": dtype,
        "architectures": [family.architecture],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def why_not_stock(family: Family, classifier: Head | Extra) -> str | None:
    """Why no stock class computes what a classifier does; None where one does."""
    if not isinstance(classifier, Head):
        return (
            f"its classifier is a head behind a module of {classifier.kind!r}, for which transformers has no place; "
            "align the merge with an aligner that gives a head, such as auto"
        )
    if family.architecture is None or family.head is None:
        return f"transformers has no classifier that computes what {family.name!r} does"
    pooling = classifier.pooling or family.default_pooling
    if pooling != family.default_pooling:
        return f"{family.architecture} reads features by {family.default_pooling!r}, this head by {pooling!r}"
    if not family.head.fits(classifier):
        return f"the head is built otherwise than in {family.architecture}"
    return None


def head_names(family: Family, head: Head) -> dict[str, str]:
    """Part of a head -> name on disk: the stock classifier's where the layers are like its own."""
    parts = head.tensors()
    if family.head is None or len(family.head.layers) != head.layers:
        return {part: part for part in parts}
    return {part: name for part, name in family.head.parts().items() if part in parts}


def named_tensors(family: Family, head: Head) -> dict[str, torch.Tensor]:
    """A head's tensors by their names on disk."""
    tensors = head.tensors()
    return {name: tensors[part] for part, name in head_names(family, head).items()}


def main_dtype(specs: Iterable[Spec]) -> str:
    """The dtype of most floating-point tensors."""
    dtypes = [spec.dtype for spec in specs if is_float(spec.dtype)]
    return max(sorted(set(dtypes)), key=dtypes.count) if dtypes else "F32"


def export(model: ModelData, task: str, out: Path, *, force: bool = False, inputs: tuple[Path, ...] = ()) -> None:
    """Write one task as a folder that its stock class loads. `inputs`: what `out` must not overlap."""
    head, family = model.head(task), model.family
    why = why_not_stock(family, head)
    if why is not None or not isinstance(head, Head):
        way_out = "use orthomerge.load, which computes every head"
        raise RecipeError(f"no stock class computes what the head of {task!r} does: {why}; {way_out}")
    encoder = {family.prefix + key: spec for key, spec in model.weights.specs.items()}
    dtype = main_dtype(encoder.values())
    tensors = {name: tensor.to(torch_dtype(dtype)) for name, tensor in named_tensors(family, head).items()}
    specs = {**encoder, **{name: Spec(tuple(tensor.shape), dtype) for name, tensor in tensors.items()}}
    blocks = chain(((family.prefix + key, block) for key, block in model.weights.blocks()), tensors.items())
    need = sum(spec.nbytes for spec in specs.values())
    config = classifier_config(model.config, family, head.labels, DTYPES[dtype][1])
    with publish(out, force=force, need=need, inputs=inputs, marker=EXPORT) as folder:
        write_shards(folder, specs, blocks, most=parse_size("5GB"))
        model.processor.write(folder)
        write_json(folder / "config.json", config)
        write_marker(folder, EXPORT, orthomerge=VERSION, task=task, model=model.digest)
