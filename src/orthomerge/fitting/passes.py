"""One forward and backward pass over a batch of all tasks; on a GPU, recorded once and then played back.

A small encoder takes hundreds of launches a step, and Python needs longer to ask for them than the GPU to do them. So
batches are given one of a few shapes, and the second batch of a shape is recorded as a CUDA graph, which every later
one plays back: weights, gradients, inputs and what the objective trains stay where they are in memory. A shape that
comes once is never recorded. Where recording fails (an encoder that looks at its own numbers), or the first recording
takes longer than the pass (some versions of transformers mask attention in it that needs no mask), all is done as
usual.

Of several processes each takes some of every task's inputs. Its loss is weighted by how many these are, so that the sum
over processes is the loss of the whole batch, and its gradient the sum of theirs; that is added up after the pass,
never inside a recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from orthomerge.fitting.inputs import Groups, features_of

if TYPE_CHECKING:
    from orthomerge.fitting.inputs import Inputs
    from orthomerge.fitting.kinds import Setting
    from orthomerge.fitting.objective import Objective

__all__ = ["Passes"]

_MOST = 24  # graphs that are kept


class Passes:
    """Leaves the gradient of the loss in the encoder's and the objective's; `recorded=False`: never record."""

    def __init__(self, setting: Setting, objective: Objective, inputs: Inputs, *, recorded: bool = True) -> None:
        self._setting, self._objective, self._inputs = setting, objective, inputs
        self._share, self._alone = 1.0, not setting.group.open
        self.records = recorded and not setting.shards.open and setting.device.type == "cuda" and inputs.ready
        self._seen: set[Groups] = set()
        self._recorded: dict[Groups, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.records else None
        for parameter in objective.parameters:
            parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Around all that is computed: recording is not possible on the stream that everybody else uses."""
        if not self.records:
            yield
            return
        device = self._setting.device
        main, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own.wait_stream(main)
        try:
            with torch.cuda.stream(own):
                yield
        finally:
            main.wait_stream(own)
            self._recorded.clear()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss, without penalty, of the inputs in `rows` [T, B] (on the CPU)."""
        if self._alone:
            return self._run(rows)
        mine = rows[:, self._setting.group.rank :: self._setting.group.world].contiguous()
        self._share = mine.shape[1] / rows.shape[1]
        # A process without an input in this batch goes along with one that counts for nothing.
        return self._all_together(self._run(mine if mine.shape[1] else rows[:, :1].contiguous()))

    def _all_together(self, loss: torch.Tensor) -> torch.Tensor:
        """Add up gradients and loss; the latter and what the objective trains in one go."""
        setting, trained = self._setting, self._objective.parameters
        setting.encoder.collect(setting.group)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        small = torch.cat([loss.view(1), *(gradient.view(-1) for gradient in gradients)])
        found = torch.split(setting.group.sum_(small), [1, *(gradient.numel() for gradient in gradients)])
        for gradient, total in zip(gradients, found[1:], strict=True):
            gradient.copy_(total.view_as(gradient))
        return found[0].view(())

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        groups, order = self._inputs.grouped(rows.view(-1), few=self.records, whole=self._setting.shards.open)
        there = torch.stack([rows.view(-1), order]).to(self._setting.device, non_blocking=True)
        if not self.records:
            return self._pass(there, groups, rows.shape)
        if groups not in self._recorded and groups in self._seen and len(self._recorded) < _MOST:
            self._record(groups, rows.shape, there)
        if groups in self._recorded:
            return self._recorded[groups].play(there)
        self._seen.add(groups)
        return self._pass(there, groups, rows.shape)

    def _pass(self, there: torch.Tensor, groups: Groups, shape: torch.Size) -> torch.Tensor:
        """`there` [2, T B] on the device: rows, and their places from the first group's to the last's."""
        setting, encoder = self._setting, self._setting.encoder
        encoder.clear()
        for parameter in self._objective.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=setting.half):
            features = features_of(encoder, self._inputs, there[0], groups, there[1])
        loss = self._objective.loss(features.float().view(*shape, -1), there[0].view(shape))
        penalty = self._objective.penalty()
        if not self._alone:
            loss = loss * self._share
            penalty = penalty if setting.group.rank == 0 else None
        (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _record(self, groups: Groups, shape: torch.Size, there: torch.Tensor) -> None:
        graph, given = torch.cuda.CUDAGraph(), there.clone()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                loss = self._pass(given, groups, shape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self.records = False
        else:
            made = _Recorded(graph, given, loss)
            if not self._recorded:
                self.records = _seconds(lambda: made.play(there)) < _seconds(lambda: self._pass(there, groups, shape))
            self._recorded[groups] = made
        if not self.records:
            self._recorded.clear()
            torch.cuda.synchronize()


def _seconds(act: Callable[[], object]) -> float:
    """The least of three times, until the GPU is done."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return min(found)


@dataclass(frozen=True)
class _Recorded:
    """A graph, where it reads its rows and where it leaves its loss."""

    graph: torch.cuda.CUDAGraph
    given: torch.Tensor
    loss: torch.Tensor

    def play(self, there: torch.Tensor) -> torch.Tensor:
        self.given.copy_(there)
        self.graph.replay()
        return self.loss.clone()
