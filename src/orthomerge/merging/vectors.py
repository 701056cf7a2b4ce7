"""Task vectors: lazy differences of weights that can be added, subtracted and scaled, also by an expression.

tau = theta_t - theta_b (Ilharco et al. 2023, arXiv 2212.04089). Nothing is read before a block is requested.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch

from orthomerge.core.errors import IncompatibleError, RecipeError, nearest, some
from orthomerge.merging.elect import scaled_sum
from orthomerge.merging.kinds import STRIDE, Block, Scope, Site
from orthomerge.models.tensors import FileTensors

TILE = 1 << 18  # elements in a block: the block, its deltas and the result stay in the cache of a core
_RUN = 1 << 12  # elements per sampled run
_TOKEN = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)|([A-Za-z_][\w.]*)|'([^']*)'|\"([^\"]*)\"")
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Source(Protocol):
    """A term of a task vector: a fine-tuned model or an adapter."""

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Shape of the delta; None if the source does not change that tensor."""

    def delta(self, key: str, start: int, stop: int, *, base: torch.Tensor) -> torch.Tensor:
        """Elements [start, stop) of the delta, float32; `base` holds the same elements of the base."""

    def factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Two thin matrices whose product is the delta, float32; None if they are not known."""

    def origin(self, key: str) -> str:
        """File or other source of a delta, for messages."""


@dataclass(frozen=True, eq=False)
class InMemory:
    """A state dict with the interface of `FileTensors`; tensors that are not floating point are left out."""

    tensors: Mapping[str, torch.Tensor]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InMemory) and other.tensors is self.tensors

    def __hash__(self) -> int:
        return id(self.tensors)

    def keys(self) -> tuple[str, ...]:
        return tuple(key for key, tensor in self.tensors.items() if tensor.is_floating_point())

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].shape)

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[key].detach().reshape(-1)[start:stop].float()

    def origin(self, key: str) -> str:
        return "memory"


Weights = FileTensors | InMemory


@dataclass(frozen=True)
class Difference:
    """A fine-tuned model minus the base. `absent` tensors are taken to be the base's: their delta is zero."""

    tuned: Weights
    absent: frozenset[str] = frozenset()

    def shape(self, key: str) -> tuple[int, ...] | None:
        return None if key in self.absent else self.tuned.shape(key)

    def delta(self, key: str, start: int, stop: int, *, base: torch.Tensor) -> torch.Tensor:
        return base.new_zeros(base.shape) if key in self.absent else self.tuned.read(key, start, stop) - base

    def factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def origin(self, key: str) -> str:
        return "which does not have it" if key in self.absent else self.tuned.origin(key)


@dataclass(frozen=True)
class TaskVector:
    """sum_i coefficient_i * delta_i, all against one base; shapes are checked at construction."""

    base: Weights
    terms: tuple[tuple[float, Source], ...]

    def __post_init__(self) -> None:
        for key in self.base.keys():
            for _, source in self.terms:
                shape = source.shape(key)
                if shape is not None and shape != self.base.shape(key):
                    raise IncompatibleError(f"{key!r} is {self.base.shape(key)} in the base but {shape} in an expert")

    @classmethod
    def between(cls, base: Mapping[str, torch.Tensor], tuned: Mapping[str, torch.Tensor]) -> TaskVector:
        """Task vector of two state dicts, which must hold the same tensors."""
        if set(base) != set(tuned):
            raise IncompatibleError(
                f"only one of the two state dicts has {some(sorted(set(base) ^ set(tuned)))}; "
                "both must hold the same tensors"
            )
        return cls(InMemory(base), ((1.0, Difference(InMemory(tuned))),))

    def read(self, key: str, start: int, stop: int, *, base: torch.Tensor) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor; `base`: the same elements of the base."""
        return scaled_sum(
            [source.delta(key, start, stop, base=base) for _, source in self.terms],
            tuple(coefficient for coefficient, _ in self.terms),
        )

    def read_into(self, row: torch.Tensor, key: str, start: int, stop: int, *, base: torch.Tensor) -> None:
        """Write these elements into a row: in a single pass for one fine-tuned model, the usual case."""
        (coefficient, source), *rest = self.terms
        if not rest and coefficient == 1 and isinstance(source, Difference) and key not in source.absent:
            torch.sub(source.tuned.read(key, start, stop), base, out=row)
        else:
            row.copy_(self.read(key, start, stop, base=base))

    def factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Matrices [m, r] and [r, k] whose product is the delta (r = 0: no change); None if they are not known."""
        m, k = self.base.shape(key)
        left, right = [torch.zeros(m, 0)], [torch.zeros(0, k)]
        for coefficient, source in self.terms:
            if source.shape(key) is None:
                continue
            pair = source.factors(key)
            if pair is None:
                return None
            left.append(pair[0] * coefficient)
            right.append(pair[1])
        return torch.cat(left, 1), torch.cat(right)

    def keys(self) -> tuple[str, ...]:
        return self.base.keys()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self.base.keys():
            raise KeyError(key)
        shape = self.base.shape(key)
        base = self.base.read(key, 0, prod(shape))
        return self.read(key, 0, len(base), base=base).reshape(shape)

    def __add__(self, other: TaskVector | int) -> TaskVector:
        if isinstance(other, int):  # so that sum(vectors) works
            return self if other == 0 else NotImplemented
        if other.base != self.base:
            raise RecipeError("task vectors can only be added when they are measured from the same base")
        return TaskVector(self.base, self.terms + other.terms)

    __radd__ = __add__

    def __mul__(self, factor: float) -> TaskVector:
        return TaskVector(self.base, tuple((factor * number, source) for number, source in self.terms))

    __rmul__ = __mul__

    def __neg__(self) -> TaskVector:
        return self * -1.0

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + -other

    def __truediv__(self, divisor: float) -> TaskVector:
        return self * (1.0 / divisor)


@dataclass(frozen=True)
class TaskVectors:
    """Several task vectors over one base, streamed block by block in a fixed order. `device`: of blocks and factors."""

    vectors: Mapping[str, TaskVector]
    tile: int = TILE
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if not self.vectors:
            raise RecipeError("there is nothing to merge: give at least one expert")
        if any(vector.base != self.base for vector in self.vectors.values()):
            raise RecipeError("task vectors can only be merged when they are measured from the same base")

    @property
    def base(self) -> Weights:
        return next(iter(self.vectors.values())).base

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.vectors)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: self.base.shape(key) for key in self.base.keys()}

    def blocks(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[Block]:
        for site, stop in self.sites(keys=keys, scope=scope):
            yield self.block(site, stop)

    def sites(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[tuple[Site, int]]:
        """Yield the site and the end of each block, without reading it."""
        for key in self.shapes if keys is None else keys:
            shape = self.shapes[key]
            count = prod(shape)
            step = count if scope == "matrix" and len(shape) == 2 else self.tile
            for start in range(0, count, max(step, 1)):
                yield Site(key, shape, start, self.tasks), min(start + step, count)

    def block(self, site: Site, stop: int) -> Block:
        base = self.base.read(site.key, site.start, stop)
        deltas = torch.empty((len(self.vectors), *base.shape), dtype=torch.float32)
        for row, vector in zip(deltas, self.vectors.values(), strict=True):
            vector.read_into(row, site.key, site.start, stop, base=base)
        if self.device is not None:
            base, deltas = base.to(self.device), deltas.to(self.device)
        if site.start == 0 and stop == prod(site.shape):
            return Block(site, base.reshape(site.shape), deltas.reshape(-1, *site.shape))
        return Block(site, base, deltas)

    def sample(self) -> Iterator[Block]:
        """Read short runs spread over every tensor, and the end of each, where a file that was cut off shows."""
        for key, shape in self.shapes.items():
            count = prod(shape)
            starts = dict.fromkeys((*range(0, count, STRIDE), max(count - _RUN, 0))) if count else {}
            for start in starts:
                yield self.block(Site(key, shape, start, self.tasks), min(start + _RUN, count))

    def factors(self, key: str) -> tuple[tuple[torch.Tensor, torch.Tensor], ...] | None:
        """Thin factors of each expert's delta of one matrix; None unless every expert has them."""
        pairs = [vector.factors(key) for vector in self.vectors.values()]
        thin = tuple((left.to(self.device), right.to(self.device)) for left, right in filter(None, pairs))
        return thin if len(thin) == len(pairs) else None


def evaluate(text: str, vectors: Mapping[str, TaskVector]) -> TaskVector:
    """Evaluate arithmetic on task vectors that is written as text: `c + (b - a)`, `-0.5 * toxic`.

    Allowed are names, numbers, `+ - * /` and parentheses; a name that is not an identifier must be quoted.
    """
    try:
        value = _value(*_parsed(text, vectors))
    except SyntaxError:
        reason = "a name, number, operator or parenthesis is missing, or not expected"
    except (TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        reason = str(error)
    else:
        if isinstance(value, TaskVector):
            return value
        reason = "it is a number, not a task vector"
    raise RecipeError(f"'vector: {text}' cannot be read: {reason}; write for example c + (b - a)")


def _parsed(text: str, vectors: Mapping[str, TaskVector]) -> tuple[ast.AST, dict[str, TaskVector]]:
    """Return the syntax tree, with placeholders `_0`, `_1`, ... for names, and the task vector of each placeholder."""
    named = dict[str, TaskVector]()

    def placeholder(match: re.Match[str]) -> str:
        number, *forms = match.groups()
        if number is not None:
            return f" {number} "
        name = next(form for form in forms if form is not None)
        if name not in vectors:
            raise RecipeError(f"'vector: {text}' names {name!r}, which is no expert; {nearest(name, vectors)}")
        named[f"_{len(named)}"] = vectors[name]
        return f" _{len(named) - 1} "

    plain = " ".join(_TOKEN.sub(placeholder, text).split())
    if unexpected := re.search(r"[^\w\s.()*/+-]", plain):
        raise TypeError(f"{unexpected[0]!r} is not allowed")
    return ast.parse(plain, mode="eval").body, named


def _value(node: ast.AST, named: Mapping[str, TaskVector]) -> Any:
    match node:
        case ast.Name(id=name):
            return named[name]
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, named)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            left, right = _value(node.left, named), _value(node.right, named)
            vectors = isinstance(left, TaskVector), isinstance(right, TaskVector)
            if isinstance(node.op, ast.Add | ast.Sub) and sum(vectors) == 1:
                raise TypeError("a number and a task vector cannot be added")
            if (isinstance(node.op, ast.Mult) and all(vectors)) or (isinstance(node.op, ast.Div) and vectors[1]):
                raise TypeError("task vectors can be multiplied and divided by numbers only")
            return _OPERATORS[type(node.op)](left, right)
    raise TypeError("only names, numbers, + - * / and parentheses are allowed")
