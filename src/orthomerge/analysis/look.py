"""One task looked at from all sides: the same inputs through the expert and the merged encoder, features only.

Maps and heads are fitted on one split and measured on another; labels of the first are seen by the probe alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from orthomerge.alignment.folding import read_by
from orthomerge.analysis.families import Reading, read_logits, read_mapped
from orthomerge.analysis.geometry import SHOWN, Geometry, measure
from orthomerge.analysis.maps import fit_maps
from orthomerge.core.errors import RecipeError
from orthomerge.data.sampling import share
from orthomerge.evaluation.aligned import Aligned
from orthomerge.evaluation.evidence import Evidence
from orthomerge.evaluation.metrics import hits, predict, predictions
from orthomerge.evaluation.probe import Probe
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, logits_of

AS_IT_IS = "as it is"  # the merge's own classifier, where it is not the expert's head
Hits = NDArray[np.bool_]
_WORK = 1 << 28  # inputs x classes x features of a probe: half a minute or so


@dataclass(frozen=True)
class Look:
    """`readings`: by family, then the aligner. `predicted` [n]: by expert, merged and aligned. `aligned`: what reads.

    `mapped`: how many inputs maps were fitted to; `fitted`: how many the aligner saw; `probed`: how many the probe.
    """

    geometry: Mapping[str, Geometry]
    readings: Mapping[str, Reading]
    predicted: Mapping[str, torch.Tensor]
    hits: Mapping[str, Hits]
    aligned: Classifier
    mapped: int
    fitted: int
    probed: int


def look(
    seen: FeaturePair,
    test: FeaturePair,
    *,
    head: Head,
    classifier: Classifier,
    aligner: str,
    most: int,
    probe: bool,
    seed: int,
) -> Look:
    """`seen`: what is fitted on; `head`: the expert's; `classifier`: the merge's own; `most`: inputs for maps."""
    truth = test.merged.labels
    if truth is None:
        raise RecipeError(f"the test split of {test.merged.task!r} has no labels; accuracy needs them")
    H, T = read_by(head, test.merged.values), read_by(head, test.expert.values)
    z_T = logits_of(head, test.expert.values)
    some = [read_by(head, _some(side, most, seed).values) for side in (seen.merged, seen.expert)]
    maps = fit_maps(some[0], some[1], task=test.merged.task)
    readings = {name: read_mapped(G, H, T, head=head, truth=truth) for name, G in maps.items()}
    own = read_logits(logits_of(classifier, test.merged.values), z_T, truth=truth, kind=head.kind)
    if not np.isclose(own.kl, readings["none"].kl, rtol=1e-4, atol=1e-6):
        readings[AS_IT_IS] = own
    support = seen.merged.unlabelled()
    aligned = Aligned.by(aligner, {}).build(Evidence(head, support, seed=seed, expert=seen.expert.unlabelled()))
    z = logits_of(aligned, test.merged.values)
    readings[f"aligner {aligner}"] = read_logits(z, z_T, truth=truth, kind=head.kind)
    predicted = {
        "expert": predictions(z_T, head.kind),
        "merged": predict(classifier, test.merged.values),
        "aligned": predict(aligned, test.merged.values),
    }
    probed = 0
    if probe and seen.merged.labels is not None:
        labelled = _some(seen.merged, min(most, max(_WORK // (len(head.labels) * head.width), 1)), seed)
        predicted["probe"] = predict(Probe().build(Evidence(head, labelled, seed=seed)), test.merged.values)
        probed = len(labelled)
    right = {name: hits(found, truth).numpy() for name, found in predicted.items()}
    geometry = {name: measure(maps[name](H), T) for name in SHOWN}
    return Look(geometry, readings, predicted, right, aligned, len(some[0]), len(seen.merged), probed)


def _some(features: Features, most: int, seed: int) -> Features:
    count = len(features)
    if count <= most:
        return features
    return features.take(torch.from_numpy(share(count, most / count, seed=seed)))
