"""The basis that the experts' updates of one matrix have in common, from their thin factors if these are known.

Stoica et al., "Model merging with SVD to tie the Knots", 2025, arXiv 2410.19735: [M_1 .. M_T] = U S [V_1 .. V_T]^T.
In the basis U expert t's update is the *part* S V_t^T = U^T M_t; nothing is lost, for U spans whatever any M_t maps to.

From factors M_t = B_t A_t it is B = [B_1 .. B_T] = Q R and A_t^T = Q_t L_t^T, and U = Q U' with U' of the small matrix
[R_1 L_1 .. R_T L_T]: O(m (sum r)^2). From dense updates it costs a QR decomposition of [T k, m], O(T k m^2).

Letters: T experts; M_t [m, k], m what goes out and k what comes in; r_t the rank of expert t; U [m, p], p the rank of
all together.
Differs from the paper: directions are dropped whose singular value is rounding (2^-23 of the largest), not those of
1e-5 or less. A table of tokens or positions is stored as [in, out] and is taken so: its M_t is the transpose.
"""

from collections.abc import Sequence

import torch

from orthomerge.merging.polar import ROUNDING, basis

Pair = tuple[torch.Tensor, torch.Tensor]


def joint_basis(updates: torch.Tensor, *, key: str) -> torch.Tensor:
    """U [m, p] in float64 from dense updates [T, m, k]; `key` names them in errors."""
    T, m, k = updates.shape
    rows = torch.empty(T, k, m, dtype=torch.float64, device=updates.device).copy_(updates.transpose(1, 2))
    return basis(rows.reshape(T * k, m).T, key=key)


def joint_basis_of_factors(pairs: Sequence[Pair], *, key: str) -> torch.Tensor:
    """U [m, p] in float64 from each expert's factors B_t [m, r_t] and A_t [r_t, k]."""
    Q, R = torch.linalg.qr(torch.cat([B for B, _ in pairs], 1).double())
    blocks, start, size = [], 0, 0.0
    for B, A in pairs:
        size += float(B.norm() * A.norm())
        L = torch.linalg.qr(A.double().T, mode="r").R.T
        blocks.append(R[:, start : start + B.shape[1]] @ L)
        start += B.shape[1]
    # Products may cancel (a - a): what is left is then the rounding of float64, not a direction.
    return torch.matmul(Q, basis(torch.cat(blocks, 1), key=key, floor=ROUNDING**2 * size))


def parts(U: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """Each update in the basis U: U^T M_t, [T, p, k] in float32, on the host even if U is on a device."""
    result = torch.empty(len(updates), U.shape[1], updates.shape[2])
    for part, M in zip(result, updates, strict=True):
        part.copy_(U.T @ M.double())
    return result


def parts_of_factors(U: torch.Tensor, pairs: Sequence[Pair]) -> torch.Tensor:
    """The same from factors: (U^T B_t) A_t."""
    return torch.stack([((U.T @ B.to(U)) @ A.to(U)).float() for B, A in pairs]).cpu()
