"""Features of which the answer is known: planted maps in float64, and a planted task with few inputs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import kl_div, log_softmax

from orthomerge.alignment.aligners import Alignment, make_aligner
from orthomerge.alignment.folding import first_map
from orthomerge.models.features import FeaturePair
from orthomerge.models.heads import Classifier, Head
from orthomerge.testing.toys import linear_head, pair_of, random, rotation


def doubles(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(*shape, seed=seed).double()


def turn(d: int, *, angle: float = 1.5, seed: int = 0) -> torch.Tensor:
    """A rotation to the last digit of float64."""
    A = doubles(d, d, seed=seed)
    found: torch.Tensor = torch.matrix_exp(angle * (A - A.T) / math.sqrt(2 * d))
    return found


def exact(head: Head) -> Head:
    """In float64, so that nothing is lost when a map is folded."""
    return head.to(torch.float64)


def head_in(found: Classifier) -> Head:
    assert isinstance(found, Head)
    return found


def weight_of(found: Classifier) -> torch.Tensor:
    """The first linear map's."""
    return first_map(head_in(found)).weight


def same_head(one: Classifier, other: Classifier) -> bool:
    """To the last bit."""
    ours, theirs = head_in(one).tensors(), head_in(other).tensors()
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in ours.items()
    )


def by_autograd(
    parameters: Sequence[torch.Tensor], loss: Callable[[], torch.Tensor], *, steps: int, lr: float
) -> list[torch.Tensor]:
    """What torch's own Adam makes of copies of the parameters when it minimises a loss written as printed."""
    optimiser = torch.optim.Adam(parameters, lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return [parameter.detach() for parameter in parameters]


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean over inputs of KL(softmax(teacher) || softmax(student)), both logits [n, C], as torch has it."""
    target, log_p = log_softmax(teacher.double(), 1), log_softmax(student.double(), 1)
    return float(kl_div(log_p, target, reduction="batchmean", log_target=True))


D = 6
RIGID = ("orthogonal", "similarity", "logit-procrustes")
LINEAR = ("linear", "invertible", "affine", "ridge")
SEES_A = exact(linear_head(torch.eye(D)))  # its aligned weight is A, and its bias the shift
SEES_BOTH = exact(linear_head(torch.eye(D), torch.zeros(D)))


def fit(name: str, pair: FeaturePair, head: Head, **options: Any) -> Alignment:
    return make_aligner(name, options).fit(pair, head)


@dataclass(frozen=True)
class PlantedTask:
    """`pair`: what an aligner sees; `test`, `truth`: merged features and labels of other inputs."""

    head: Head
    pair: FeaturePair
    test: torch.Tensor
    truth: torch.Tensor

    @property
    def unaligned(self) -> float:
        return accuracy(self.head, self)


def planted_task(
    per_class: int, *, seed: int = 0, classes: int = 5, d: int = 32, angle: float = 1.0, shrink: float = 0.6
) -> PlantedTask:
    """Gaussian classes around a common mean, read by the best head there is; merging turns, shrinks, shifts and blurs.

    With d = 32 the expert is right 99 times of 100 and the unaligned merge about 58 times.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    means, common, shift = 2.2 / math.sqrt(8) * normal(classes, d), normal(d), 0.5 * normal(d)
    head = linear_head(means, -(means * (common + means / 2)).sum(1))
    turn = rotation(d, angle=angle, seed=1000 + seed)

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        truth = torch.arange(count) % classes
        expert = common + means[truth] + normal(count, d)
        return shrink * expert @ turn + shift + 0.5 * normal(count, d), expert, truth

    merged, expert, _ = drawn(per_class * classes)
    test, _, truth = drawn(2000)
    return PlantedTask(head, pair_of(merged, expert), test, truth)


def accuracy(classifier: Classifier, task: PlantedTask) -> float:
    return float((classifier(task.test).argmax(1) == task.truth).double().mean())
