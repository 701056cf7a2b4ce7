"""Check opened experts before a merge: fine-tuned from the base, different, complete, and with equal tied weights.

Fine-tuning changes weights little, and each task in another direction. An expert of another base is therefore
orthogonal to this one, and the task vectors of experts of one other base have a common direction.

Letters: T experts; theta_0 the base, theta_t an expert, tau_t = theta_t - theta_0.
"""

from itertools import combinations

import torch

from orthomerge.core.errors import CheckpointError, IncompatibleError
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.merging.kinds import Site
from orthomerge.merging.vectors import TILE, TaskVectors
from orthomerge.models.experts import Experts
from orthomerge.models.split import TIED

# cos(theta_t, theta_0): experts of one base stay within a few degrees of it, others are orthogonal.
_LEAST_COSINE = 0.3
# cos(tau_s, tau_t) of different experts: about 0 for different tasks, 1 if they come from another common base.
_MOST_COMMON = 0.9
_ROUNDING = 1e-9  # share of the largest sum of squares below which another may be that of zeros
_PAGE = 1 << 10  # elements of float32 in a page of 4 KiB
_INSIST = "or set 'check_base: false' to merge anyway"


def check_tied(experts: Experts) -> None:
    """Refuse checkpoints in which tied weights, stored under two names, differ."""
    parts = experts.parts
    splits = [(parts.base, parts.base_split), *((source.checkpoint, source.split) for source in parts.sources.values())]
    for source, split in splits:
        for name, reason in split.left_out.items():
            twin = split.names.get(reason.removeprefix(TIED)) if reason.startswith(TIED) else None
            if twin is None or not isinstance(source, Checkpoint) or source.entry(name) == source.entry(twin):
                continue
            count = source.spec(name).numel
            for start in range(0, count, TILE):
                stop = min(start + TILE, count)
                if not torch.equal(source.read(name, start, stop), source.read(twin, start, stop)):
                    raise IncompatibleError(
                        f"{source.path}: {name!r} and {twin!r} must be one tensor and differ from element {start} on; "
                        "save the model again with the stock class, which ties them"
                    )


def check_origin(experts: Experts, vectors: TaskVectors) -> None:
    """Refuse experts that are incomplete, equal to the base or to each other, or fine-tuned from another base."""
    if experts.has_base and experts.opening.check_base:
        sample = _Sample(experts, vectors)
        sample.refuse_another_base()
        sample.refuse_the_base()
        sample.refuse_equal_experts()
        sample.refuse_a_common_direction()


class _Sample:
    """Statistics of short runs of every tensor, with its end, where a truncated file shows; and checks of them."""

    def __init__(self, experts: Experts, vectors: TaskVectors) -> None:
        self.vectors, self.tasks = vectors, vectors.tasks
        self.base = str(experts.parts.base.path)
        self.paths = [str(experts.parts.sources[task].checkpoint.path) for task in vectors.tasks]
        T = len(vectors.tasks)
        self.gram = torch.zeros(T + 1, T + 1, dtype=torch.float64)  # of theta_0, tau_1 .. tau_T
        self.moved = torch.zeros(T, dtype=torch.bool)  # whether tau_t is not zero
        self.apart = torch.eye(T, dtype=torch.bool)  # whether tau_s is not tau_t
        for block in vectors.sample():
            rows = torch.cat((block.base.reshape(1, -1), block.deltas.reshape(len(self.tasks), -1)))
            if len(block.site.shape) > 1:  # norms and biases of unrelated models can be alike
                wide = rows.double()
                gram = wide @ wide.T
                self._refuse_zeros(block.site, rows, gram)
                self.gram += gram
            if not (self.moved.all() and self.apart.all()):
                self.moved |= (rows[1:] != 0).any(1)
                self.apart |= torch.stack([(row != rows[1:]).any(1) for row in rows[1:]])

    def _refuse_zeros(self, site: Site, rows: torch.Tensor, gram: torch.Tensor) -> None:
        """Refuse a page of zeros in one model where another has numbers: its file is incomplete."""
        squares = (gram[0, 0] + 2 * gram[0] + gram.diagonal()).tolist()[1:]  # |theta_t|^2
        if min(float(gram[0, 0]), *squares) > _ROUNDING * max(squares):
            return
        blank = ~torch.cat((rows[:1], rows[1:] + rows[0])).any(1)
        if rows.shape[1] < _PAGE or not blank.any() or blank.all():
            return
        place, key = int(blank.to(torch.uint8).argmax()), site.key
        if place == 0:
            who, source = "the base", self.vectors.base.origin(key)
        else:
            task = self.tasks[place - 1]
            who, source = f"expert {task!r}", self.vectors.vectors[task].terms[0][1].origin(key)
        raise CheckpointError(
            f"{key!r} in {who} ({source}) holds only zeros from element {site.start} on, where others "
            f"have numbers: the file was not written to its end; fetch it again, {_INSIST}"
        )

    def refuse_another_base(self) -> None:
        base = self.gram[0, 0]
        if not base:
            return
        norms = base + 2 * self.gram[0, 1:] + self.gram.diagonal()[1:]  # |theta_t|^2
        cosines = (base + self.gram[0, 1:]) / (norms * base).clamp_min(0).sqrt().clamp_min(1e-300)
        for task, path, cosine in zip(self.tasks, self.paths, cosines.tolist(), strict=True):
            if cosine < _LEAST_COSINE:
                raise IncompatibleError(
                    f"expert {task!r} ({path}) was not fine-tuned from the base {self.base}: the cosine between their "
                    f"weights is {cosine:.3f}, and fine-tuning leaves it near 1; find the right base, {_INSIST}"
                )

    def refuse_the_base(self) -> None:
        """Refuse an expert that equals the base; only one that does in the sample is read completely."""
        for place, (task, path) in enumerate(zip(self.tasks, self.paths, strict=True)):
            if path == self.base or self.moved[place]:
                continue
            if not any(block.deltas[place].any() for block in self.vectors.blocks()):
                raise IncompatibleError(
                    f"expert {task!r} ({path}) is the base {self.base} itself: not one of its encoder's weights "
                    f"differs; give the fine-tuned model, {_INSIST} (an expert with a frozen encoder)"
                )

    def refuse_equal_experts(self) -> None:
        """Refuse two files with the same weights; one file for two tasks is allowed, and noted when it is opened."""
        for one, other in combinations(range(len(self.tasks)), 2):
            if self.paths[one] == self.paths[other] or self.apart[one, other]:
                continue
            if all(torch.equal(block.deltas[one], block.deltas[other]) for block in self.vectors.blocks()):
                raise IncompatibleError(
                    f"experts {self.tasks[one]!r} ({self.paths[one]}) and {self.tasks[other]!r} ({self.paths[other]}) "
                    "are the same model: not one of their encoders' weights differs; give each task its own expert, "
                    f"{_INSIST}"
                )

    def refuse_a_common_direction(self) -> None:
        """Refuse experts whose task vectors have a common direction: they come from another base."""
        different = [place for place, path in enumerate(self.paths) if path not in self.paths[:place]]
        gram = self.gram[1:, 1:][different][:, different]
        length = gram.diagonal().sqrt()
        if len(different) < 2 or not (length > 0).all():
            return
        least = float((gram / length.outer(length)).min())
        if least > _MOST_COMMON:
            raise IncompatibleError(
                f"the experts were not fine-tuned from the base {self.base}, but all from another model: "
                f"the cosine between what any two of them changed is at least {least:.3f}, and that of different tasks "
                f"is near 0; find the model that they have in common, {_INSIST}"
            )
