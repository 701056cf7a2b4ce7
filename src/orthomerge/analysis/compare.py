"""One task compared: the same inputs through the expert and the merged encoder, features only.

Maps and heads are fitted to one split and measured on another; labels of the first are used by the probe alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from orthomerge.alignment.aligners import make_aligner
from orthomerge.alignment.folding import read_by
from orthomerge.analysis.detail import Detail, chosen_inputs
from orthomerge.analysis.families import Reading, fit_maps, read_logits, read_mapped
from orthomerge.analysis.geometry import SHOWN, Geometry
from orthomerge.analysis.recovery import Hits
from orthomerge.core.errors import RecipeError
from orthomerge.evaluation.evidence import Evidence
from orthomerge.evaluation.metrics import hits
from orthomerge.evaluation.probe import Probe
from orthomerge.evaluation.protocols import Aligned
from orthomerge.models.features import FeaturePair, Features
from orthomerge.models.heads import Classifier, Head, head_kind, logits_of

_WORK = 1 << 28  # inputs x classes x features of a probe: about half a minute


@dataclass(frozen=True)
class TaskComparison:
    """`readings`: by family of maps, then of the merge's own classifier if it is another, and of the aligner.

    `predicted`, `hits` [n]: by expert, merged, aligned and probe. `head`: the expert's. `aligned`: the classifier that
    the aligner made. `mapped`, `fitted`, `probed`: how many inputs maps, aligner and probe were fitted to.
    """

    geometry: Mapping[str, Geometry]
    readings: Mapping[str, Reading]
    predicted: Mapping[str, torch.Tensor]
    hits: Mapping[str, Hits]
    head: Head
    aligned: Classifier
    mapped: int
    fitted: int
    probed: int


def compare_task(
    support: FeaturePair, test: FeaturePair, *, head: Head, classifier: Classifier, detail: Detail
) -> TaskComparison:
    """`support`: what is fitted to. `head`: the expert's. `classifier`: the merge's own."""
    truth, seed = test.merged.labels, detail.seed
    if truth is None:
        raise RecipeError(f"the test split of {test.merged.task!r} has no labels; accuracy needs them")
    H, T = read_by(head, test.merged.values), read_by(head, test.expert.values)
    H_fit, T_fit = (read_by(head, _some(side, detail.maps, seed).values) for side in (support.merged, support.expert))
    maps = fit_maps(H_fit, T_fit, task=test.merged.task)
    readings = {name: read_mapped(G, H, T, head=head, truth=truth) for name, G in maps.items()}
    evidence = Evidence(head, support.merged.unlabelled(), support.expert.unlabelled(), seed)
    aligned = Aligned(make_aligner(detail.aligner)).build(evidence)
    logits = {
        "expert": logits_of(head, test.expert.values),
        "merged": logits_of(classifier, test.merged.values),
        "aligned": logits_of(aligned, test.merged.values),
    }
    own, best = (read_logits(logits[name], logits["expert"], head=head, truth=truth) for name in ("merged", "aligned"))
    if not np.isclose(own.kl, readings["none"].kl, rtol=1e-4, atol=1e-6):
        readings["as it is"] = own
    readings[f"aligner {detail.aligner}"] = best
    probed = 0
    if detail.probe and support.merged.labels is not None:
        most = min(detail.maps, max(_WORK // (len(head.labels) * head.width), 1))
        labelled = _some(support.merged, most, seed)
        probe, probed = Probe().build(Evidence(head, labelled, seed=seed)), len(labelled)
        logits["probe"] = logits_of(probe, test.merged.values)
    predicted = {name: head_kind(head.kind).choices(z).cpu() for name, z in logits.items()}
    right = {name: hits(choices, truth, head.kind).numpy() for name, choices in predicted.items()}
    geometry = {name: Geometry.of(maps[name](H), T) for name in SHOWN}
    return TaskComparison(geometry, readings, predicted, right, head, aligned, len(H_fit), len(support.merged), probed)


def _some(features: Features, most: int, seed: int) -> Features:
    return features.take(torch.from_numpy(chosen_inputs(None, len(features), most=most, seed=seed)))
