"""KnOTS: transform the experts' updates of a matrix to a common basis, merge them there, and transform back.

Stoica et al., "Model merging with SVD to tie the Knots", 2025, arXiv 2410.19735. Per matrix the updates side by side
are decomposed together, [M_1 .. M_T] = U S [V_1 .. V_T]^T; a merger gets the *parts* S V_t^T = U^T M_t instead of
the updates, and delta = U merged. Among equal singular values, U and element-wise merges are not unique.

From factors M_t = B_t A_t it is B = [B_1 .. B_T] = Q R and A_t^T = Q_t L_t^T, and U = Q U' with U' of the small matrix
[R_1 L_1 .. R_T L_T]: O(m (sum r)^2). From dense updates it costs a QR decomposition of [T k, m], O(T k m^2).

Letters: T experts; M_t [m, k] with m outputs and k inputs; r_t the rank of expert t; U [m, p], p the common rank.
Differs from the paper, which writes that V_t is merged; its code, and this, merge S V_t^T. Directions are dropped whose
singular value is rounding (2^-23 of the largest), not 1e-5 or less. Tensors that are no matrices are merged and trimmed
as they are, and a table of tokens or positions is decomposed as its transpose. The paper's KnOTS-TIES is `ties` with
density 0.2 and scale 0.6, its KnOTS-DARE-TIES `dare_ties@peft` with density 0.9 and weights 0.7.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch

from orthomerge.core.errors import RecipeError
from orthomerge.core.schema import build, maker_of, schema
from orthomerge.merging.elect import PerExpert
from orthomerge.merging.kinds import Block, Scope, Site, Surveyed, SurveyMethod, TensorMethod, Vectors
from orthomerge.merging.methods import METHODS
from orthomerge.merging.polar import ROUNDING, basis, is_table

Merger = Literal[
    "average", "task_arithmetic", "ties", "ties_sum", "ties_per_tensor", "ties@peft", "dare", "dare_ties", "dare@peft",
    "dare_ties@peft", "magmax",
]  # fmt: skip
Pair = tuple[torch.Tensor, torch.Tensor]
Updates = torch.Tensor | tuple[Pair, ...]  # dense [T, m, k], or each expert's factors B_t [m, r_t] and A_t [r_t, k]
_OPTIONS = ("scale", "density", "drop", "weights")
_KEPT = 128 << 20  # bytes of bases that are kept from one pass to the next; others are computed again


@dataclass(frozen=True)
class Knots:
    """`merger`: merges the parts; `scale`, `density`, `drop`, `weights`: an option of it, by default its own."""

    merger: Merger = "ties"
    scale: PerExpert | None = None
    density: float | None = None
    drop: float | None = None
    weights: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.inner()

    def inner(self) -> TensorMethod | SurveyMethod:
        """Build the merger with its options, and refuse options that it does not have."""
        maker = maker_of(METHODS[self.merger])
        fields = schema(maker)
        options: dict[str, Any] = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        for name in options:
            if name not in fields:
                has = ", ".join(option for option in _OPTIONS if option in fields)
                raise RecipeError(f"method knots: merger {self.merger!r} has no {name!r}; it has {has}")
        if "seed" in fields:
            options["seed"] = self.seed
        return cast("TensorMethod | SurveyMethod", build(maker, options, where=f"method knots: merger {self.merger}"))

    def survey(self, vectors: Vectors) -> Surveyed:
        aligned, inner = Parts(vectors), self.inner()
        merger = inner.survey(aligned) if hasattr(inner, "survey") else inner

        def merge(base: torch.Tensor, deltas: torch.Tensor, *, site: Site) -> torch.Tensor:
            if len(site.shape) != 2:
                return merger.merge(base.cpu(), deltas.cpu(), site=site).to(base.device)
            U, part = aligned.part(Block(site, base, deltas))
            if not U.shape[1]:
                return torch.zeros_like(base)
            merged = U @ merger.merge(part.base, part.deltas, site=part.site).to(U)
            return (merged.T if is_table(site.key) else merged).float()

        return Surveyed(merge, "matrix")


@dataclass(frozen=True)
class Parts:
    """Task vectors with every matrix in the common basis of its updates: the input of the merger."""

    vectors: Vectors
    _bases: dict[str, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.vectors.tasks

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name; that of a matrix [m, k] is [p, k], where p comes from its decomposition."""
        shapes = dict(self.vectors.shapes)
        for key, shape in self.vectors.shapes.items():
            if len(shape) == 2 and 0 not in shape:
                shapes[key] = next(iter(self.blocks(keys=(key,)))).site.shape
        return shapes

    def blocks(self, *, keys: tuple[str, ...] | None = None, scope: Scope = "element") -> Iterator[Block]:
        for key in self.vectors.shapes if keys is None else keys:
            pairs = self._pairs(key)
            if pairs is not None:  # no need to multiply the factors
                yield self._block(key, parts(self._basis(key, pairs), pairs))
                continue
            for block in self.vectors.blocks(keys=(key,), scope="matrix"):
                if len(block.site.shape) == 2:
                    yield self.part(block)[1]
                else:
                    yield replace(block, base=block.base.cpu(), deltas=block.deltas.cpu())

    def sample(self) -> Iterator[Block]:
        """Yield nothing: each block takes a decomposition."""
        return iter(())

    def factors(self, key: str) -> None:
        return None

    def part(self, block: Block) -> tuple[torch.Tensor, Block]:
        """Return U of one matrix, and the block of its parts."""
        key = block.site.key
        updates: Updates | None = self._pairs(key)
        if updates is None:
            updates = block.deltas.transpose(1, 2) if is_table(key) else block.deltas
        U = self._basis(key, updates).to(block.deltas.device)
        return U, self._block(key, parts(U, updates))

    def _pairs(self, key: str) -> tuple[Pair, ...] | None:
        """Factors of each expert's update of a matrix, of a table of its transpose; None if they are not known."""
        shape = self.vectors.shapes[key]
        pairs = self.vectors.factors(key) if len(shape) == 2 and 0 not in shape else None
        return tuple((A.T, B.T) for B, A in pairs) if pairs is not None and is_table(key) else pairs

    def _basis(self, key: str, updates: Updates) -> torch.Tensor:
        if key in self._bases:
            return self._bases[key]
        U = joint_basis(updates, key=key)
        if sum(stored.nbytes for stored in list(self._bases.values())) + U.nbytes <= _KEPT:
            self._bases[key] = U
        return U

    def _block(self, key: str, values: torch.Tensor) -> Block:
        shape = (values.shape[1], values.shape[2])
        return Block(Site(key, shape, 0, self.tasks), values.new_zeros(shape), values)


def joint_basis(updates: Updates, *, key: str) -> torch.Tensor:
    """U [m, p] in float64; `key` names the matrix in errors."""
    if isinstance(updates, torch.Tensor):
        T, m, k = updates.shape
        rows = torch.empty(T, k, m, dtype=torch.float64, device=updates.device).copy_(updates.transpose(1, 2))
        return basis(rows.reshape(T * k, m).T, key=key)
    Q, R = torch.linalg.qr(torch.cat([B for B, _ in updates], 1).double())
    blocks, start, size = [], 0, 0.0
    for B, A in updates:
        size += float(B.norm() * A.norm())
        L = torch.linalg.qr(A.double().T, mode="r").R.T
        blocks.append(R[:, start : start + B.shape[1]] @ L)
        start += B.shape[1]
    # If products cancel (a - a), the rest is rounding of float64, not a direction.
    return torch.matmul(Q, basis(torch.cat(blocks, 1), key=key, floor=ROUNDING**2 * size))


def parts(U: torch.Tensor, updates: Updates) -> torch.Tensor:
    """Parts U^T M_t [T, p, k], in float32 on the CPU."""
    if not isinstance(updates, torch.Tensor):
        return torch.stack([((U.T @ B.to(U)) @ A.to(U)).float() for B, A in updates]).cpu()
    result = torch.empty(len(updates), U.shape[1], updates.shape[2])
    for part, M in zip(result, updates, strict=True):
        part.copy_(U.T @ M.double())
    return result
