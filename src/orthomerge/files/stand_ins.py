"""Inert records of the content of a pickle: globals, objects, storages and tensors.

Globals that torch needs for tensors and mappings have a function here; a call of any other becomes an `Object`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from orthomerge.files.checkpoint import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# Storage class -> dtype. Storages of `_OTHER` (bytes per element) are skipped: their tensors cannot be read.
_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "UntypedStorage": "U8", "_UntypedStorage": "U8",
}  # fmt: skip
_OTHER: Mapping[str, int] = {
    "ComplexFloatStorage": 8, "ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4,
    "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip
_TORCH_DTYPES = {f"torch.{name}": dtype for dtype, (_, name) in DTYPES.items() if dtype != "C64"}

# Modules that no weight file has a reason to name, except `_HARMLESS`. Nothing would be run anyway: it warns the user.
_HOSTILE = re.compile(
    "builtins|__builtins?__|pathlib|os|posix|nt|subprocess|_posixsubprocess|commands|popen2|sys|importlib|imp|runpy|pty|shutil|_?socket|ssl|"
    "_?ctypes|_?pickle|cPickle|code|codeop|webbrowser|multiprocessing|asyncio|http|httplib|urllib2?|requests|"
    "ftplib|smtplib|xmlrpc|socketserver|signal|pdb|bdb|timeit|c?[Pp]rofile|trace|tempfile|pip|ensurepip|venv|"
    "zipimport|pkgutil|pydoc|marshal|sqlite3|atexit|mmap|fcntl"
)
_HOSTILE_PATHS = re.compile(r"_?io\.(open|FileIO).*|torch\.(serialization\.)?load|torch\.hub\..*")
_HARMLESS = re.compile(
    r"(builtins|__builtins?__)\.(set|frozenset|dict|list|tuple|int|float|bool|complex|slice|x?range|bytes|bytearray|str|"
    r"unicode|long|object|type|getattr|Ellipsis|NotImplemented)|pathlib\.(Pure)?(Posix|Windows)?Path"
)


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """A class or function that the pickle names; it is never imported."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """Dotted name, escaped for messages."""
        return f"{self.module}.{self.name}".encode("unicode_escape").decode("ascii")

    @property
    def hostile(self) -> bool:
        """Whether the name is for running programs or accessing files, not for weights."""
        if _HARMLESS.fullmatch(self.path):
            return False
        named = [self.module.split(".")[0], *self.name.split(".")[:-1]]  # an attribute can be a module, too
        return any(_HOSTILE.fullmatch(part) for part in named) or bool(_HOSTILE_PATHS.fullmatch(self.path))


@dataclass(slots=True, eq=False)
class Object:
    """An object that `maker` would have created, with the `state` and `content` that the pickle sets."""

    maker: object
    state: object = None
    content: dict[object, object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    key: str
    kind: str
    width: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """Unchecked description of a tensor; `refused` is its unsupported type, if it cannot be read."""

    storage: Storage | None = None
    dtype: str = ""
    offset: Any = 0
    shape: Any = ()
    strides: Any = ()
    refused: str = ""


def storage(key: str, kind: str, numel: int) -> Storage:
    if kind not in _STORAGES and kind not in _OTHER:
        raise UnpicklingError(f"{kind!r} is not a known type of storage")
    width = DTYPES[_STORAGES[kind]][0] if kind in _STORAGES else _OTHER[kind]
    return Storage(key, kind, width, numel * width)


def fill(mapping: dict[object, object], keys: list[Any], values: list[Any]) -> None:
    """Set items; keys that are not strings are replaced by distinct objects, because hashing them could crash."""
    for key, value in zip(keys, values, strict=True):
        mapping[key if type(key) is str else object()] = value


def make(maker: object, args: tuple[object, ...]) -> object:
    """Return a record of the result of a call, without calling anything."""
    if not isinstance(maker, Global | Object):
        raise UnpicklingError("it calls something that is neither a class nor a function")
    path = maker.path.replace("__builtin__.", "builtins.") if isinstance(maker, Global) else ""  # as Python 2 calls it
    if _FROM_TYPE.fullmatch(path):
        func, _, inner, _ = args
        tensor = make(func, inner) if isinstance(inner, tuple) else None
        if not isinstance(tensor, Tensor):
            raise UnpicklingError("a subclass of Tensor is rebuilt from something else")
        return tensor
    if path in _MAKERS:
        return _MAKERS[path](*args)
    if path.startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_")):
        return Tensor(refused=path)
    return Object(maker)


def _tensor_v2(
    storage: object, offset: object, shape: object, strides: object, _grad: object, _hooks: object,
    metadata: object = None,
) -> Tensor:  # fmt: skip
    if not isinstance(storage, Storage):
        raise UnpicklingError("a tensor is rebuilt from something that is not a storage")
    if storage.kind not in _STORAGES:
        return Tensor(refused=f"torch.{storage.kind}")
    if metadata:
        return Tensor(refused="a view that is negated or conjugated when read")
    return Tensor(storage, _STORAGES[storage.kind], offset, shape, strides)


def _tensor_v3(
    storage: object, offset: object, shape: object, strides: object, grad: object, hooks: object, dtype: object,
    metadata: object = None,
) -> Tensor:  # fmt: skip
    name = dtype.path if isinstance(dtype, Global) else "a tensor without dtype"
    if name not in _TORCH_DTYPES:
        return Tensor(refused=name)
    return replace(_tensor_v2(storage, offset, shape, strides, grad, hooks, metadata), dtype=_TORCH_DTYPES[name])


def _mapping(*args: object) -> dict[object, object]:
    """Return an `OrderedDict`, `defaultdict` or `Counter` as a dict; the default factory is dropped."""
    mapping: dict[object, object] = {}
    for arg in args:
        if isinstance(arg, dict):
            mapping.update(arg)
        elif isinstance(arg, list | tuple):
            fill(mapping, [key for key, _ in arg], [value for _, value in arg])
    return mapping


def _members(items: object = ()) -> object:
    """Return the members of a `set`, `frozenset` or `torch.Size` as they are, because hashing them could crash."""
    return items if isinstance(items, list | tuple) else []


_FROM_TYPE = re.compile(r"torch\._?tensor\._rebuild_from_type(_v2)?")
_MAKERS: Mapping[str, Callable[..., object]] = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": _mapping,
    "collections.Counter": _mapping,
    "builtins.dict": _mapping,
    "builtins.set": _members,
    "builtins.frozenset": _members,
    "torch.Size": _members,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
}
