"""Whether experts are what a recipe says they are: evidence from a sample of the weights, before any work.

Fine-tuning moves weights little and each task in a direction of its own. So an expert of another base stands at right
angles to this one; experts of one common other base have moved from this one the same way; an expert that is the
base, or another expert, was given by mistake; and pages of zeros are a file that was never written out.

Letters: theta_0 the base, theta_t an expert, tau_t = theta_t - theta_0.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

import torch

from orthomerge.core.errors import CheckpointError, IncompatibleError
from orthomerge.merging.kinds import Block, Site

if TYPE_CHECKING:
    from orthomerge.merging.vectors import TaskVectors
    from orthomerge.models.experts import Experts


# cos(theta_t, theta_0): experts of one base stay within a few degrees of it, strangers are at right angles.
_LEAST_COSINE = 0.3
# cos(tau_s, tau_t) of different experts: about 0 for tasks of their own, 1 where all share a way that is not theirs.
_MOST_COMMON = 0.9
_STRIDE = 1 << 21
_RUN = 1 << 12  # elements
_PAGE = 1 << 10  # elements of float32 in a page of 4 KiB
_INSIST = "or set 'check_base: false' to merge all the same"


def check_kinship(experts: Experts, vectors: TaskVectors) -> None:
    """Refuse experts whose task vectors mean nothing, and say by which numbers."""
    if not experts.has_base or vectors.tasks != experts.tasks or not experts.opening.check_base:
        return
    count = len(vectors.tasks)
    norm, dots = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)  # |theta_t|^2, ...
    gram, base_norm = torch.zeros(count, count, dtype=torch.float64), 0.0
    moved, apart = torch.zeros(count, dtype=torch.bool), torch.eye(count, dtype=torch.bool)
    for block in _sample(vectors):
        base, tau = block.base.double().reshape(-1), block.deltas.double().reshape(count, -1)
        if not moved.all() or not apart.all():
            moved |= (tau != 0).any(1)
            apart |= torch.stack([(row != tau).any(1) for row in tau])
        _refuse_zeros(experts, vectors, block)
        if len(block.site.shape) < 2:
            continue  # norms and biases of strangers can be alike
        theta = tau + base
        dots += theta @ base
        norm += (theta * theta).sum(1)
        base_norm += float(base @ base)
        gram += tau @ tau.T
    if base_norm:
        _refuse_strangers(experts, vectors, (dots / (norm * base_norm).sqrt().clamp_min(1e-300)).tolist())
    _refuse_twins(experts, vectors, moved, apart)
    _refuse_common_way(experts, vectors, gram)


def _sample(vectors: TaskVectors) -> Iterator[Block]:
    """Short runs of every tensor: some spread over it, and its end, where a file that was cut off shows."""
    for key, shape in vectors.shapes.items():
        count = prod(shape)
        starts = dict.fromkeys((*range(0, count, _STRIDE), max(count - _RUN, 0))) if count else {}
        for start in starts:
            yield vectors.block(Site(key, shape, start, vectors.tasks), min(start + _RUN, count))


def _base_path(experts: Experts) -> str:
    return str(experts.parts.base.path)


def _refuse_strangers(experts: Experts, vectors: TaskVectors, cosines: list[float]) -> None:
    for task, cosine in zip(vectors.tasks, cosines, strict=True):
        if cosine < _LEAST_COSINE:
            raise IncompatibleError(
                f"expert {task!r} ({experts.parts.sources[task].checkpoint.path}) was not fine-tuned from "
                f"the base {_base_path(experts)}: the cosine between their weights is {cosine:.3f}, and fine-tuning "
                f"leaves it near 1; find the right base, {_INSIST}"
            )


def _refuse_zeros(experts: Experts, vectors: TaskVectors, block: Block) -> None:
    """A page of zeros in one model where another has numbers: the file has its size, but not its content.

    Of matrices only: a bias may well have started at zero.
    """
    theta = torch.cat((block.base.reshape(1, -1), (block.deltas + block.base).reshape(len(vectors.tasks), -1)))
    if theta.shape[1] < _PAGE or len(block.site.shape) < 2:
        return
    blank = ~theta.any(1)
    if not blank.any() or blank.all():
        return
    place, key = int(blank.to(torch.uint8).argmax()), block.site.key
    task = vectors.tasks[place - 1] if place else None
    who = "the base" if task is None else f"expert {task!r}"
    source = vectors.base if task is None else next(source for _, source in vectors.vectors[task].terms)
    raise CheckpointError(
        f"{key!r} in {who} ({source.origin(key)}) holds only zeros from element {block.site.start} on, where others "
        f"have numbers: the file was not written to its end; fetch it again, {_INSIST}"
    )


def _refuse_twins(experts: Experts, vectors: TaskVectors, moved: torch.Tensor, apart: torch.Tensor) -> None:
    """Experts that are the base, or each other, in every element: the sample raises the suspicion, the whole tells."""
    names = {task: str(experts.parts.sources[task].checkpoint.path) for task in vectors.tasks}
    for place, task in enumerate(vectors.tasks):
        given_as_base = names[task] == str(experts.parts.base.path)  # as one file given twice, below
        if (
            not moved[place]
            and not given_as_base
            and not any(bool(block.deltas[place].any()) for block in vectors.blocks())
        ):
            raise IncompatibleError(
                f"expert {task!r} ({names[task]}) is the base {_base_path(experts)} itself: not one of its encoder's "
                f"weights differs; give the fine-tuned model, {_INSIST} (an expert with a frozen encoder)"
            )
    for one, other in combinations(range(len(vectors.tasks)), 2):
        if names[vectors.tasks[one]] == names[vectors.tasks[other]]:
            continue  # one file given twice, for its two heads say; the plan has noted it
        if not apart[one, other] and all(torch.equal(b.deltas[one], b.deltas[other]) for b in vectors.blocks()):
            first, second = vectors.tasks[one], vectors.tasks[other]
            raise IncompatibleError(
                f"experts {first!r} ({names[first]}) and {second!r} ({names[second]}) are the same model: not one of "
                f"their encoders' weights differs; give each task its own expert, {_INSIST}"
            )


def _refuse_common_way(experts: Experts, vectors: TaskVectors, gram: torch.Tensor) -> None:
    """Experts that have all gone the same way from the base were fine-tuned from where that way leads."""
    paths = [str(experts.parts.sources[task].checkpoint.path) for task in vectors.tasks]
    different = [place for place, path in enumerate(paths) if path not in paths[:place]]
    length = gram.diagonal().sqrt()[different]
    if len(different) < 2 or not (length > 0).all():
        return
    cosines = gram[different][:, different] / length.outer(length)
    least = float(cosines.min())
    if least > _MOST_COMMON:
        raise IncompatibleError(
            f"the experts were not fine-tuned from the base {_base_path(experts)}, but all from another model: "
            f"the cosine between what any two of them changed is at least {least:.3f}, and that of different tasks is "
            f"near 0; find the model that they have in common, {_INSIST}"
        )
