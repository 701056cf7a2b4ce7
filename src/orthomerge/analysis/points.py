"""The points of one task: three views of some test inputs, with what each input is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from orthomerge.alignment.folding import read_by
from orthomerge.analysis.embedding import chosen_inputs, embed, moved, turned, view_of
from orthomerge.analysis.figures import Points
from orthomerge.analysis.thumbnails import short_text, thumbnails

if TYPE_CHECKING:
    from orthomerge.analysis.look import Look
    from orthomerge.data.task import Task
    from orthomerge.models.features import FeaturePair
    from orthomerge.models.heads import Head


def points_of(
    task: Task, test: FeaturePair, found: Look, *, key: str, head: Head, most: int, bytes_of_images: int, seed: int
) -> Points:
    """At most `most` of the task's test inputs; `key` names the figure."""
    examples = task["test"]
    places = chosen_inputs(examples.labels, len(examples), most=most, seed=seed)
    rows = torch.from_numpy(places)
    merged, expert = test.merged.take(rows).values, test.expert.take(rows).values
    accuracies = {name: float(hits.mean()) for name, hits in found.hits.items()}

    origin = embed(read_by(head, expert), seed=seed)
    seen = {"merged": read_by(head, merged), "aligned": moved(found.aligned, merged, head=head)}
    placed = {name: turned(embed(X, seed=seed), origin) for name, X in seen.items() if X is not None}
    views = tuple(
        view_of(name, points, found.predicted[name][rows], accuracy=accuracies[name])
        for name, points in {"expert": origin, **placed}.items()
    )
    chosen = [examples.inputs[int(place)] for place in places]
    some = f"{len(places)} of {len(examples)} test inputs" if len(places) < len(examples) else "all test inputs"
    truth = (-1,) * len(places) if examples.labels is None else tuple(int(label) for label in examples.labels[places])
    return Points(
        key,
        f"{task.name}: what the encoders see",
        f"t-SNE of {some}, each view by itself and then turned onto the expert's; only who is near whom counts. "
        "Aligned: features moved as little as the aligned head asks for. Accuracy is that on all test inputs.",
        task.name,
        task.labels,
        truth,
        views,
        texts=tuple(map(short_text, chosen)) if task.modality == "text" else (),
        images=thumbnails(chosen, most=bytes_of_images) if task.modality == "image" else (),
    )
