"""Inputs in the order that a seed gives, as batches on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.models.processing import batches
from orthomerge.tuning.settings import derive
from orthomerge.tuning.store import Room, make_store

if TYPE_CHECKING:
    from orthomerge.data.task import Examples, Task
    from orthomerge.models.processing import Processor
    from orthomerge.tuning.store import Store


Batch = dict[str, torch.Tensor]
Place = tuple[int, list[int]]  # number of a task, and which of its examples


class Feed:
    """Turns places into batches on a device.

    Sources that fit into `room` are processed once, when they are first asked for, and kept on the device. Of others
    the next batch is prepared while a GPU works on one.
    """

    def __init__(
        self, sources: Sequence[Examples], processor: Processor, device: torch.device, *, room: Room | None = None
    ) -> None:
        self._sources, self._processor, self._device = sources, processor, device
        self._room = room or Room(0)
        self._stores: dict[int, Store | None] = {}

    def batch(self, place: Place) -> tuple[Batch, torch.Tensor]:
        """Inputs and labels of one place; labels that are unknown are -1."""
        number, rows = place
        source = self._sources[number]
        made = batches(source, self._processor, len(rows), order=rows)  # refuses rows that there are not
        store = self._store(number)
        batch = next(made) if store is None else store.pick(torch.tensor(rows))
        labels = torch.full((len(rows),), -1) if source.labels is None else torch.as_tensor(source.labels[rows])
        return {name: tensor.to(self._device) for name, tensor in batch.items()}, labels.to(self._device)

    def batches(self, places: Iterable[Place]) -> Iterator[tuple[Place, Batch, torch.Tensor]]:
        """One batch after the other."""
        places = list(places)
        kept = [self._store(number) is not None for number in {number for number, _ in places}]
        ahead = self._device.type == "cuda" and not all(kept)
        made = _ahead(self.batch, places) if ahead else map(self.batch, places)
        for place, (inputs, labels) in zip(places, made, strict=True):
            yield place, inputs, labels

    def ordered(self, number: int, size: int) -> Iterator[tuple[Place, Batch, torch.Tensor]]:
        """The whole of one source in its own order."""
        rows = range(len(self._sources[number]))
        return self.batches((number, list(rows[start : start + size])) for start in rows[::size])

    def _store(self, number: int) -> Store | None:
        if number not in self._stores:
            self._stores[number] = make_store(self._sources[number], self._processor, self._device, self._room)
        return self._stores[number]


def epoch_order(sizes: Sequence[int], batch: int, *, seed: int, epoch: int) -> list[Place]:
    """Every example of every task once: shuffled, cut into batches, and the batches of all tasks shuffled."""
    places: list[Place] = []
    for number, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(derive(seed, "examples", number, epoch))
        rows = torch.randperm(size, generator=generator).tolist()
        places += [(number, rows[start : start + batch]) for start in range(0, size, batch)]
    if len(sizes) == 1:
        return places
    generator = torch.Generator().manual_seed(derive(seed, "tasks", epoch))
    return [places[at] for at in torch.randperm(len(places), generator=generator).tolist()]


def sample(size: int, count: int, *, seed: int, step: int) -> list[int]:
    """Some of `size` examples, none twice, for one step."""
    generator = torch.Generator().manual_seed(derive(seed, "others", step))
    found: list[int] = torch.randperm(size, generator=generator)[:count].tolist()
    return found


def check_labelled(task: Task, split: str) -> Examples:
    """The examples of a split that training or validation can use."""
    examples = task[split]
    if len(examples) == 0:
        raise RecipeError(f"the {split} split of task {task.name!r} is empty; it must have examples")
    if examples.labels is None:
        raise RecipeError(
            f"the {split} split of task {task.name!r} has no labels; an expert is made from labelled data"
        )
    return examples


def _ahead(
    prepare: Callable[[Place], tuple[Batch, torch.Tensor]], places: Sequence[Place]
) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Prepare one batch ahead, in a thread."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(prepare, places[0]) if places else None
        for place in [*places[1:], None]:
            current, coming = coming, None if place is None else pool.submit(prepare, place)
            if current is not None:
                yield current.result()
