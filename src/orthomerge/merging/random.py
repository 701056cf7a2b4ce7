"""Random masks that depend on (seed, tensor, expert, position) and on nothing else.

A counter-based generator (Philox, Salmon et al. 2011) is keyed by a hash of seed, tensor name and expert name; element
i of the tensor takes 32-bit lane i. So the mask is the same whatever the block size, the order of tensors and experts,
the number of threads, or the device that merges.
"""

import hashlib

import numpy as np
import torch

from orthomerge.merging.kinds import Site

_LANES = 8  # one Philox counter step gives four 64-bit words


def keep_mask(site: Site, task: str, count: int, *, keep: float, seed: int) -> torch.Tensor:
    """Independent Bernoulli(`keep`) draws for `count` elements from `site.start` on, as booleans."""
    digest = hashlib.sha256(f"{seed}\0{site.key}\0{task}".encode()).digest()
    first, skip = divmod(site.start, _LANES)
    # The counter is one 256-bit number, lowest word first.
    generator = np.random.Philox(
        key=np.frombuffer(digest[:16], dtype=np.uint64), counter=np.array([first, 0, 0, 0], dtype=np.uint64)
    )
    words = generator.random_raw(-(-(count + skip) // 2))
    lanes = words.view("<u4")[skip : skip + count]
    below = min(round(keep * 2**32), 2**32)
    return torch.from_numpy(lanes < below)
