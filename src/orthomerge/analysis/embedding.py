"""One task's test inputs in the plane, as the expert sees them, the merged encoder, and the merged encoder aligned.

van der Maaten and Hinton 2008 (t-SNE); MOMA, arXiv 2412.13526 v3, Figures 1, 2, 9 and 10. Each view is embedded alone,
then turned or mirrored onto the expert's by a Procrustes map of the plane, which changes no distance.

An aligner changes a head, not features. `moved` shows what that does: merged features, changed as little as possible so
that the expert's head says of them what the aligned head says of the merged ones,

    x' = x + W^+ (z'(x) - z(x)).

Letters: X [n, d] what a head reads; W [m, d] the head's first linear map, z and z' what it and the aligned one give.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.alignment.folding import first_map, read_by
from orthomerge.alignment.rigid import polar_factor
from orthomerge.analysis.checking import matched, whole
from orthomerge.analysis.figures import View
from orthomerge.core.errors import RecipeError
from orthomerge.data.sampling import share, stratified
from orthomerge.data.task import Labels
from orthomerge.models.heads import Classifier, Head

LEAST = 5  # inputs below which there is nothing to see
_PERPLEXITY = 30.0
_FLAT = 1e-12
_FAINT = 1e-2  # singular values of W, as a share of the largest, that are not inverted


def chosen_inputs(labels: Labels | None, count: int, *, most: int, seed: int) -> Labels:
    """Places of at most `most` of `count` inputs; classes keep their shares where they are known."""
    if most < 1:
        raise RecipeError(f"at least one input must be shown, got {most}")
    if count <= most:
        return np.arange(count, dtype=np.int64)
    if labels is None or len(np.unique(labels)) < 2:
        return share(count, most / count, seed=seed)
    return stratified(labels, most, seed=seed)


def embed(X: torch.Tensor, *, seed: int = 0) -> NDArray[np.float64]:
    """t-SNE of features [n, d] in the plane, [n, 2], centred; features that are all the same fall on one point."""
    X = whole(X, what="features for t-SNE", least=LEAST)
    centred = X - X.mean(0)
    if float(centred.square().sum()) <= _FLAT * float(X.square().sum()):
        return np.zeros((len(X), 2))
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise RecipeError("t-SNE needs scikit-learn: pip install 'orthomerge[suites]'") from error
    perplexity = min(_PERPLEXITY, (len(X) - 1) / 3)
    found: NDArray[np.float32] = TSNE(
        n_components=2, init="pca", learning_rate="auto", perplexity=perplexity, random_state=seed, n_jobs=1
    ).fit_transform(centred.float().numpy())
    centre: NDArray[np.float64] = found.mean(0, dtype=np.float64)
    placed: NDArray[np.float64] = found.astype(np.float64) - centre
    return placed


def turned(points: NDArray[np.float64], onto: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points [n, 2] turned or mirrored so that they lie as near to others as they can."""
    one, other = matched(torch.from_numpy(points), torch.from_numpy(onto), what="points in the plane")
    A = polar_factor(other.T @ one, task="the plane")
    found: NDArray[np.float64] = (one @ A.T).numpy()
    return found


def moved(classifier: Classifier, values: torch.Tensor, *, head: Head) -> torch.Tensor | None:
    """The x' of every row of features, as the head reads them; None where the classifier does not tell.

    That is a classifier which is no head, beside a head with a hidden layer.
    """
    X, first = read_by(head, values), first_map(head)
    if isinstance(classifier, Head):
        change = _linear(classifier, values) - _linear(head, values)
    elif head.hidden is None:
        change = classifier(values).double() - head(values).double()
    else:
        return None
    back: torch.Tensor = torch.linalg.pinv(first.weight.double(), rtol=_FAINT)
    return X + change @ back.T


def view_of(name: str, points: NDArray[np.float64], predicted: torch.Tensor, *, accuracy: float | None) -> View:
    """Points with what is predicted of them; `accuracy` (0 to 1, of all test inputs) goes into the title."""
    title = name if accuracy is None else f"{name} ({100 * accuracy:.1f} %)"
    x, y = (tuple(round(float(value), 3) for value in column) for column in points.T)
    return View(name, title, x, y, tuple(int(label) for label in predicted))


def _linear(head: Head, values: torch.Tensor) -> torch.Tensor:
    first = first_map(head)
    found = read_by(head, values) @ first.weight.double().T
    return found if first.bias is None else found + first.bias.double()
