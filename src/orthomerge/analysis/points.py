"""t-SNE of one task's test inputs: features of the expert, of the merged encoder, and the merged ones aligned.

van der Maaten and Hinton 2008 (t-SNE); MOMA, arXiv 2412.13526 v3, Figures 1, 2, 9 and 10. Each view is embedded alone,
then rotated or mirrored onto the expert's by a Procrustes map of the plane, which changes no distance.

An aligner changes a head, not features. `moved` changes merged features as little as possible, such that the expert's
head predicts from the result what the aligned head predicts from the merged features,

    x' = x + W^+ (z'(x) - z(x)).

Letters: X [n, d] input of a head; W [m, d] the head's first linear map; z and z' its output and the aligned one's.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.alignment.folding import first_map, read_by
from orthomerge.alignment.rigid import polar_factor
from orthomerge.analysis.detail import Detail, chosen_inputs
from orthomerge.analysis.diagnosis import Points, View, figure_key
from orthomerge.analysis.families import TaskComparison
from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Task
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Classifier, Head

LEAST = 5  # inputs that t-SNE needs
_PERPLEXITY = 30.0
_FLAT = 1e-12
_FAINT = 1e-2  # singular values of W, as a share of the largest, that are not inverted
_LONGEST = 200  # characters of a text
_SIZES = ((32, 64), (24, 32), (16, 16))  # of a picture: pixels per side at most, and colours

Plane = NDArray[np.float64]  # [n, 2]


def points_figure(
    task: Task,
    test: FeaturePair,
    comparison: TaskComparison,
    *,
    among: Sequence[str],
    detail: Detail,
    image_bytes: int,
) -> Points:
    """Plot a sample of the task's test inputs in three views. `among`: the names of all tasks."""
    examples, head, seed = task["test"], comparison.head, detail.seed
    indices = chosen_inputs(examples.labels, len(examples), most=detail.points, seed=seed)
    rows = torch.from_numpy(indices)
    merged = test.merged.take(rows).values
    X = {
        "expert": read_by(head, test.expert.take(rows).values),
        "merged": read_by(head, merged),
        "aligned": moved(comparison.aligned, merged, head=head),
    }
    planes = {name: embed(values, seed=seed) for name, values in X.items() if values is not None}
    views = []
    for name, points in planes.items():
        x, y = rotated(points, onto=planes["expert"]).T if name != "expert" else points.T
        title = f"{name} ({100 * float(comparison.hits[name].mean()):.1f} %)"
        views.append(View(name, title, _short(x), _short(y), tuple(comparison.predicted[name][rows].tolist())))
    inputs = [examples.inputs[int(index)] for index in indices]
    sample = f"{len(indices)} of {len(examples)} test inputs" if len(indices) < len(examples) else "all test inputs"
    return Points(
        figure_key("tsne", task.name, among=among),
        f"{task.name}: what the encoders see",
        f"t-SNE of {sample}, each view by itself and then turned onto the expert's; only who is near whom counts. "
        "Aligned: features moved as little as the aligned head asks for. Accuracy is that on all test inputs.",
        task.name,
        task.labels,
        (-1,) * len(indices) if examples.labels is None else tuple(examples.labels[indices].tolist()),
        tuple(views),
        texts=tuple(map(short_text, inputs)) if task.modality == "text" else (),
        images=thumbnails(inputs, most=image_bytes) if task.modality == "image" else (),
    )


def embed(X: torch.Tensor, *, seed: int = 0) -> Plane:
    """Embed features [n, d] by t-SNE, centred; constant features are embedded as one point."""
    X = X.double()
    centred = X - X.mean(0)
    if float(centred.square().sum()) <= _FLAT * float(X.square().sum()):
        return np.zeros((len(X), 2))
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise RecipeError("t-SNE needs scikit-learn: pip install 'orthomerge[suites]'") from error
    perplexity = min(_PERPLEXITY, (len(X) - 1) / 3)
    tsne = TSNE(n_components=2, init="pca", learning_rate="auto", perplexity=perplexity, random_state=seed, n_jobs=1)
    points = np.asarray(tsne.fit_transform(centred.float().numpy()), dtype=np.float64)
    return np.asarray(points - points.mean(0), dtype=np.float64)


def rotated(points: Plane, *, onto: Plane) -> Plane:
    A = polar_factor(torch.from_numpy(onto.T @ points), task="the plane")
    return np.asarray(points @ A.T.numpy(), dtype=np.float64)


def moved(classifier: Classifier, values: torch.Tensor, *, head: Head) -> torch.Tensor | None:
    """Compute x' of every row of features; None if the head has a hidden layer and the classifier is not a head."""
    X, first = read_by(head, values), first_map(head)
    if isinstance(classifier, Head):
        change = first_map(classifier)(read_by(classifier, values)) - first(X)
    elif head.hidden is None:
        change = classifier(values).double() - head(values).double()
    else:
        return None
    back: torch.Tensor = torch.linalg.pinv(first.weight.double(), rtol=_FAINT)
    return X + change @ back.T


def _short(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(value), 3) for value in values)


def short_text(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def thumbnails(images: Sequence[Any], *, most: int) -> tuple[str, ...]:
    """Encode every image as a data URI, all within `most` characters; return none if they do not fit."""
    for side, colours in _SIZES:
        uris = tuple(_uri(image, side, colours) for image in images)
        if sum(map(len, uris)) <= most:
            return uris
    return ()


def _uri(image: Any, side: int, colours: int) -> str:
    from PIL import Image

    pixels = np.asarray(image)
    picture = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    if max(picture.size) > side:
        picture.thumbnail((side, side))
    if picture.mode != "L":
        picture = picture.convert("RGB").quantize(colours)
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
