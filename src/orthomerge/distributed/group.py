"""The processes of one run, and what they say to each other.

A process by itself is a group of one, for which everything here gives back what it was given; torch.distributed is not
even imported. Sums are the same to the last bit in every process, so that what is computed from them stays the same
everywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from orthomerge.distributed.packing import Packed, pack, unpack
from orthomerge.errors import NumericalError, OrthomergeError, RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from orthomerge.distributed.failures import Failures

__all__ = ["TIMEOUT", "Group", "current_group", "open_group"]

TIMEOUT = "ORTHOMERGE_TIMEOUT"  # seconds after which a silent process counts as lost

Item = TypeVar("Item")
_SECONDS = "1800"
_POLL = 0.02


class Group:
    """`rank`: which of `world` processes this is; 0 drives. `backend`: what carries tensors, empty for one alone."""

    def __init__(self, rank: int = 0, world: int = 1, backend: str = "", failures: Failures | None = None) -> None:
        self.rank, self.world, self.backend, self.failures = rank, world, backend, failures
        self._store: Any = None
        self._jobs, self._busy, self._process = 0, False, os.getpid()

    def __reduce__(self) -> tuple[type[Group], tuple[()]]:
        """Another process gets a group of its own."""
        return Group, ()

    @property
    def several(self) -> bool:
        """Whether there is anybody else."""
        return self.world > 1

    @property
    def open(self) -> bool:
        """Whether it was opened under torchrun, be it by one process."""
        return bool(self.backend)

    @property
    def driving(self) -> bool:
        """Whether the others wait for what this process calls."""
        return self.several and self.rank == 0 and not self._busy

    def mine(self, items: Sequence[Item]) -> list[Item]:
        """The share of this process: every `world`-th item."""
        return list(items[self.rank :: self.world])

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up, in place, what all have."""
        if not self.open:
            return tensor
        import torch.distributed as dist

        with self._guarded():
            if tensor.is_cuda and "nccl" not in self.backend:
                tensor.copy_(self.sum_(tensor.cpu()))
            else:
                dist.all_reduce(tensor)
        return tensor

    def gather(self, rows: torch.Tensor, *, everywhere: bool = True) -> list[torch.Tensor]:
        """What every process has, by rank, on the CPU; numbers of rows may differ, and there may be none.

        `everywhere=False`: only the first process gets it, all others nothing.
        """
        own = rows.detach().cpu().contiguous()
        if not self.open:
            return [own]
        import torch.distributed as dist

        shapes = self.exchange(tuple(own.shape))
        wide = next((shape[1:] for shape in shapes if shape[0]), tuple(own.shape[1:]))
        found = [own if rank == self.rank else own.new_empty(shape[0], *wide) for rank, shape in enumerate(shapes)]
        with self._guarded():
            for rank, part in enumerate(found):
                if not len(part):
                    continue
                if everywhere:
                    dist.broadcast(part, rank)
                elif self.rank in (0, rank) and rank:
                    _ = dist.send(part, 0) if self.rank else dist.recv(part, rank)
        return [part.view(len(part), *wide) for part in found] if everywhere or not self.rank else []

    def exchange(self, value: Item) -> list[Item]:
        """Small things of all, by rank."""
        if not self.open:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        with self._guarded():
            dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: Item) -> Item:
        """What the first process has, tensors and all; those on an accelerator arrive on the CPU."""
        if not self.several:
            return value
        received: Item = self._sent(pack(value) if self.rank == 0 else Packed(b"", ()))
        return value if self.rank == 0 else received

    def _sent(self, packed: Packed) -> Any:
        import torch
        import torch.distributed as dist

        specs = [(tensor.shape, tensor.dtype) for tensor in packed.tensors]
        told: list[Any] = [(replace(packed, tensors=[]), specs)]
        with self._guarded():
            dist.broadcast_object_list(told)
            packed_there, specs = told[0]
            if self.rank:
                packed = replace(packed_there, tensors=[torch.empty(shape, dtype=kind) for shape, kind in specs])
            for tensor in packed.tensors:
                dist.broadcast(tensor, 0)
        return unpack(packed) if self.rank else None

    def scatter(self, values: Sequence[Item] | None) -> Item:
        """One thing for each, from the first process, which has all of them."""
        if not self.several:
            if values is None:
                raise AssertionError("the first process has what is given out")
            return values[0]
        import torch.distributed as dist

        with self._guarded():
            if self.rank == 0 and values is not None:
                for other in range(1, self.world):
                    dist.send_object_list([values[other]], dst=other)
                return values[0]
            told: list[Any] = [None]
            dist.recv_object_list(told, src=0)
        received: Item = told[0]
        return received

    def barrier(self) -> None:
        """Wait for all."""
        if self.open:
            self.exchange(0)

    def agree(self, tensor: torch.Tensor, what: str) -> None:
        """Refuse to go on where processes have come to different numbers."""
        if not self.several:
            return
        import torch

        sums = torch.stack([tensor.sum(dtype=torch.float64), torch.linalg.vector_norm(tensor, dtype=torch.float64)])
        told = self.exchange(sums.tolist())
        strange = next((rank for rank, each in enumerate(told) if each != told[0]), None)
        if strange is not None:
            raise NumericalError(
                f"{what} of process {strange} are not those of process 0 any more; use machines of one kind"
            )

    def wait_for(self, path: Path) -> None:
        """Until the first process has published something; all see the same file system."""
        end = time.monotonic() + _timeout()
        while not path.exists():
            if time.monotonic() > end:
                raise OrthomergeError(
                    f"{path} did not appear within {_timeout():.0f} s; all machines must share the folder of the "
                    f"output, and {TIMEOUT} may be raised"
                )
            time.sleep(_POLL)

    def call(self, function: Callable[[Group, Any], Item], own: object, others: object) -> Item:
        """Have a function done by all processes at once; gives what it gives here.

        It is called with the group and `own` here, with `others` elsewhere.
        """
        if self._busy or self.rank:
            raise AssertionError("only the first process calls, and one thing at a time")
        packed = pack(others) if self.several else None
        if self.several:
            self._store.set(f"job/{self._jobs}", f"{function.__module__}:{function.__qualname__}")
            self._jobs += 1
        self._busy = True
        try:
            if packed is not None:
                self._sent(packed)
            return function(self, own)
        finally:
            self._busy = False

    def end(self) -> None:
        """Let the others go."""
        self._store.set(f"job/{self._jobs}", "")

    def serve(self) -> None:
        """Do what the first process calls, until it says that there is no more."""
        while True:
            key = f"job/{self._jobs}"
            while not self._store.check([key]):
                time.sleep(_POLL)
            name = self._store.get(key).decode()
            if not name:
                return
            self._jobs += 1
            module, _, function = name.partition(":")
            getattr(import_module(module), function)(self, self._sent(Packed(b"", ())))

    def abort(self) -> None:
        """Cut all connections, so that nobody waits for this process."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 - nothing public does it

    def close(self) -> None:
        """Take leave."""
        import torch.distributed as dist

        if self.open and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A connection that breaks is told as what broke it."""
        import torch

        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.failures is None:
                raise
            raise self.failures.found(str(error).partition("\n")[0][:200]) from error


_current = Group()


def current_group() -> Group:
    """The group that `launch` opened in this process; without it, one process alone."""
    return _current if _current._process == os.getpid() else Group()  # noqa: SLF001 - ours


def open_group() -> Group:
    """Join the processes that torchrun started, as its environment variables say."""
    global _current  # noqa: PLW0603 - a process is in one group
    from datetime import timedelta

    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist

    from orthomerge.distributed.failures import Failures

    rank, world, local = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    own_gpu = torch.cuda.is_available() and int(os.environ.get("LOCAL_WORLD_SIZE", world)) <= torch.cuda.device_count()
    backend = "cpu:gloo,cuda:nccl" if own_gpu and dist.is_nccl_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    # torchrun's store outlives a restart, and with it what the processes before said in it.
    prefix, own = f"orthomerge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", rank == 0 and not _agent_store()

    def connect(*, serve: bool = False) -> Any:
        host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
        store = c10d.TCPStore(host, port, is_master=serve, timeout=timedelta(seconds=60), wait_for_workers=False)
        return c10d.PrefixStore(prefix, store)

    store = connect(serve=own)
    timeout = timedelta(seconds=_timeout())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    group = Group(rank, world, backend, Failures(rank, world, connect))
    group._store = store  # noqa: SLF001 - ours
    _current = group
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # what this process starts is not one of the group
        os.environ.pop(name, None)
    return group


def _agent_store() -> bool:
    """Whether torchrun itself keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise RecipeError(f"{name} must be a whole number, got {text!r}; start the processes with torchrun")
    return int(text)


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, _SECONDS)
    if not text.isdecimal() or not int(text):
        raise RecipeError(f"{TIMEOUT} must be a number of seconds, got {text!r}")
    return float(text)
