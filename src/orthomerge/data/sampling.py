"""Choosing some of the examples: by class, or by share. The same seed always gives the same places.

For one seed a larger choice contains the smaller ones, so that curves over the number of shots compare like with like.
Places are sorted; nothing depends on global random state.
"""

from __future__ import annotations

import numpy as np

from orthomerge.core.errors import RecipeError
from orthomerge.data.task import Labels


def few_shot(labels: Labels, shots: int, *, seed: int, allow_fewer: bool = False) -> Labels:
    """Places of `shots` examples of every class. `allow_fewer`: take all of a class that has fewer."""
    if shots < 1:
        raise RecipeError(f"the number of shots must be at least 1, got {shots}")
    sizes = np.bincount(labels)
    short = np.flatnonzero(sizes < shots)
    if short.size and not allow_fewer:
        raise RecipeError(
            f"class {short[0]} has {sizes[short[0]]} examples, fewer than {shots} shots "
            f"({short.size} of {sizes.size} classes have too few); ask for at most {sizes.min()}, or allow fewer"
        )
    return _of_each(labels, np.minimum(sizes, shots), seed=seed)


def share(count: int, ratio: float, *, seed: int) -> Labels:
    """Places of a share of `count` examples, at least one."""
    if count < 1 or not 0 < ratio <= 1:
        raise RecipeError(f"a share must be above 0 and at most 1 of at least one example, got {ratio} of {count}")
    return np.sort(_generator(seed).permutation(count)[: max(1, round(ratio * count))])


def stratified(labels: Labels, count: int, *, seed: int) -> Labels:
    """Places of at most `count` examples in which classes have the share they have in all; one of each class stays."""
    sizes = np.bincount(labels)
    quota = np.minimum(count * sizes // len(labels), np.maximum(sizes - 1, 0))
    remainders = count * sizes % len(labels)
    for label in np.argsort(-remainders, kind="stable"):
        if quota.sum() < count and quota[label] < sizes[label] - 1:
            quota[label] += 1
    return _of_each(labels, quota, seed=seed)


def _of_each(labels: Labels, quota: Labels, *, seed: int) -> Labels:
    generator = _generator(seed)
    chosen = [generator.permutation(np.flatnonzero(labels == label))[:many] for label, many in enumerate(quota)]
    places: Labels = np.sort(np.concatenate(chosen)).astype(np.int64)
    return places


def _generator(seed: int) -> np.random.Generator:
    if seed < 0:
        raise RecipeError(f"a seed must not be negative, got {seed}")
    return np.random.Generator(np.random.PCG64(seed))
