"""Interpret pickles without calling anything: calls become inert records.

The opcodes are decoded by `pickletools`. Python's own unpickler is unsafe even with its hooks: it allocates
gigabytes for one large memo index, and hashing nested tuples overflows its stack.
"""

from __future__ import annotations

import io
import pickletools
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final

from orthomerge.core.errors import CheckpointError
from orthomerge.files.stand_ins import Global, Object, Storage, Tensor, fill, make, storage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from orthomerge.files.raw_file import RawFile


MAX_BYTES: Final = 64 << 20  # of one pickle; the names and shapes of the largest models take a few MiB
_MAX_STEPS: Final = 5_000_000
_NOTHING_RUN: Final = "nothing was run: do not open it with torch.load either"

# fmt: off
_PUSHED = (  # opcodes that push their argument
    "INT", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "NONE", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
)
# fmt: on


class Stream(io.BufferedReader):
    """A buffered stream that never reads more than `max_bytes` bytes at once, whatever a header asks for."""

    def __init__(self, file: RawFile, max_bytes: int) -> None:
        super().__init__(file.stream())
        self._max_bytes = max_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self._max_bytes:
            raise UnpicklingError(f"a length in the header must be at most {self._max_bytes} bytes, got {size}")
        return super().read(self._max_bytes if size is None or size < 0 else size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(self._max_bytes)


@dataclass
class Machine:
    """Interpreter of the pickles in a stream; `storages` are those that they name, in order of first mention."""

    path: Path
    stream: IO[bytes]
    storages: dict[str, Storage] = field(default_factory=dict)

    def load(self) -> object:
        """Interpret one pickle and return its content."""
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._steps = 0
        begin = self.stream.tell()
        for opcode, arg, at in pickletools.genops(self.stream):
            self._steps += 1
            if self._steps > _MAX_STEPS or (at or 0) - begin > MAX_BYTES:
                raise CheckpointError(
                    f"{self.path} has a header of more than {_MAX_STEPS:,} steps or {MAX_BYTES >> 20} MiB; "
                    "weights need a fraction of that: save the state dict alone, without the training state"
                )
            action = self._ACTIONS.get(opcode.name)
            if action is None:
                raise CheckpointError(
                    f"{self.path} uses the pickle opcode {opcode.name}, which torch does not write; {_NOTHING_RUN}"
                )
            action(self, arg)
        return self._stack.pop()

    def _find(self, module: object, name: object) -> Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnpicklingError("the name of a class is not a string")
        cls = Global(module, name)
        if cls.hostile:
            raise CheckpointError(
                f"{self.path} asks to run {cls.path}; this is not how weights are stored; {_NOTHING_RUN}"
            )
        return cls

    def _persistent(self, pid: object) -> object:
        match pid:
            case ("module", Global() as cls, *_):  # the older stream keeps the source code of classes
                return cls
            case ("storage", Global(name=kind), str(key), _, int(numel), *view) if not any(view):
                root = storage(key, kind, numel)
                self.storages.setdefault(key, root)
                return root
        raise UnpicklingError("a persistent id is not that of a storage")

    def _push(self, item: object) -> None:
        self._stack.append(item)

    def _pop(self, _: object = None) -> Any:
        return self._stack.pop() if self._stack else self._pop_mark()

    def _mark(self, _: object) -> None:
        self._marked.append(self._stack)
        self._stack = []

    def _pop_mark(self, _: object = None) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _tuple(self, size: int) -> None:
        self._push(tuple(reversed([self._stack.pop() for _ in range(size)])))

    def _put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Object):
            target.content = {} if target.content is None else target.content
            target = target.content
        if not isinstance(target, dict):
            raise UnpicklingError("items are set on something that is not a mapping")
        fill(target, items[::2], items[1::2])

    def _set_item(self, _: object) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._fill([key, value])

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Object):
            raise UnpicklingError("items are appended to something that is not a list")

    def _reduce(self, _: object) -> None:
        args, maker = self._stack.pop(), self._stack.pop()
        if not isinstance(args, tuple):
            raise UnpicklingError("the arguments of a call are not a tuple")
        # Arguments may be copied, so their items count as steps: many calls on one long list would fill the memory.
        self._steps += len(args) + sum(len(arg) for arg in args if isinstance(arg, list | tuple | dict))
        self._push(make(maker, args))

    def _new_object(self, arguments: int) -> None:
        *_, cls = [self._stack.pop() for _ in range(arguments + 1)]
        self._push(Object(cls))

    def _build(self, _: object) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(target, Object):
            target.state = state
        elif not isinstance(target, dict | Tensor):  # whose state, `_metadata` and hooks, is not needed
            raise UnpicklingError("state is set on something that cannot have any")

    # Left out on purpose: EXT1, PERSID, NEXT_BUFFER, ..., and those of protocols 0 and 1, which torch does not write.
    _ACTIONS: ClassVar[Mapping[str, Callable[[Machine, Any], object]]] = {
        **dict.fromkeys(_PUSHED, _push),
        "NEWTRUE": lambda self, _: self._push(True),
        "NEWFALSE": lambda self, _: self._push(False),
        "EMPTY_TUPLE": lambda self, _: self._push(()),
        "EMPTY_LIST": lambda self, _: self._push([]),
        "EMPTY_SET": lambda self, _: self._push([]),
        "EMPTY_DICT": lambda self, _: self._push({}),
        "TUPLE": lambda self, _: self._push(tuple(self._pop_mark())),
        "FROZENSET": lambda self, _: self._push(self._pop_mark()),
        "TUPLE1": lambda self, _: self._tuple(1),
        "TUPLE2": lambda self, _: self._tuple(2),
        "TUPLE3": lambda self, _: self._tuple(3),
        "APPEND": lambda self, _: self._extend([self._stack.pop()]),
        "APPENDS": lambda self, _: self._extend(self._pop_mark()),
        "ADDITEMS": lambda self, _: self._extend(self._pop_mark()),
        "SETITEM": _set_item,
        "SETITEMS": lambda self, _: self._fill(self._pop_mark()),
        "MARK": _mark,
        "POP": _pop,
        "POP_MARK": _pop_mark,
        **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _put),
        **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda self, at: self._push(self._memo[at])),
        "GLOBAL": lambda self, arg: self._push(self._find(*arg.split(" ", 1))),
        "STACK_GLOBAL": lambda self, _: self._push(self._find(name=self._stack.pop(), module=self._stack.pop())),
        "BINPERSID": lambda self, _: self._push(self._persistent(self._stack.pop())),
        "REDUCE": _reduce,
        "NEWOBJ": lambda self, _: self._new_object(1),
        "NEWOBJ_EX": lambda self, _: self._new_object(2),
        "BUILD": _build,
        **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda self, _: None),
    }
