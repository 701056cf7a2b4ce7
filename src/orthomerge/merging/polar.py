"""Singular and polar factors in float64, for the methods that merge a matrix as a matrix.

X = U diag(s) V^T and X = W H with W = U V^T, the matrix with orthonormal columns (rows, where X is wide) nearest to X.
Golub & Van Loan, "Matrix Computations", 4th ed., sections 2.4, 6.4.1 and 9.4.3.

Both keep the *numerical rank* p only: directions whose singular value is lost in the rounding of float32 weights are
noise that later steps would amplify. Without full rank W is therefore the partial isometry, which alone is unique.

Letters: X [m, k]; U [m, p], s [p] falling, Vh = V^T [p, k]; R [k, k] the triangle of X = QR.
Differs from the textbook: s^2 and V are eigenvalues and eigenvectors of X^T X, in a third of the time of an SVD, if all
that are needed are large enough; otherwise they come from R. Then U = X V / s, whose columns are orthonormal to 2e-9 or
better, because s never falls below 1e-7 of the largest. Q is never formed.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch

from orthomerge.core.errors import NumericalError

Factors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

ROUNDING = 2.0**-23  # of float32: a singular value below this share of the largest is rounding
_TALL = 1.5  # rows per column above which a QR decomposition first is faster
_RESOLVED = 1e-6  # share of the largest singular value that eigenvalues of a Gram matrix still resolve
_LARGE = 1e-4  # share above which they give eight digits of a value and of its vector
_FAILED = torch.linalg.LinAlgError  # type: ignore[attr-defined]
_TABLES = ("embed", "shared.weight", "position", "relative_attention_bias", "wte.weight", "wpe.weight")


def is_table(key: str) -> bool:
    """Whether the tensor is an embedding table (tokens, positions) by its name."""
    return any(part in key.lower() for part in _TABLES)


def svd(X: torch.Tensor, *, key: str, top: int | None = None, floor: float = 0.0) -> Factors:
    """Truncate the SVD of X to its numerical rank, or to `top`: U, s, Vh in float64. `key` names X in errors.

    Singular values up to `floor` count as zero. The largest entry per row of Vh (column of U of a wide X) is positive.
    """
    if X.shape[0] < X.shape[1]:
        U, s, Vh = svd(X.T, key=key, top=top, floor=floor)
        return Vh.T, s, U.T
    X = X.double()
    s, Vh = _right(X, key=key, floor=floor, top=top)
    return X @ (Vh.T / s), s, Vh


def polar(X: torch.Tensor, *, key: str) -> torch.Tensor:
    """Matrix W with orthonormal columns (rows, where X is wide) nearest to X, in float64."""
    if X.shape[0] < X.shape[1]:
        return polar(X.T, key=key).T
    X = X.double()
    s, Vh = _right(X, key=key)
    return X @ ((Vh.T / s) @ Vh)  # U V^T with one product as tall as X


def basis(X: torch.Tensor, *, key: str, floor: float = 0.0) -> torch.Tensor:
    """Left singular vectors U in float64, strongest first; V of a wide X is never formed."""
    if X.shape[0] >= X.shape[1]:
        return svd(X, key=key, floor=floor)[0]
    return _right(X.double().T, key=key, floor=floor)[1].T


def joined(parts: Sequence[Factors]) -> Factors:
    """Concatenate the directions of several matrices: [U_1 U_2 ..], [s_1 s_2 ..], [V_1 V_2 ..]^T."""
    U, s, Vh = zip(*parts, strict=True)
    return torch.cat(U, 1), torch.cat(s), torch.cat(Vh)


def _right(
    X: torch.Tensor, *, key: str, floor: float = 0.0, top: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    m, k = X.shape
    if not torch.isfinite(X).all():
        raise NumericalError(
            f"{key!r} must be finite to be decomposed, but {int((~torch.isfinite(X)).sum())} of {X.numel()} "
            "elements of a task vector are not; find the sound checkpoint, or leave that expert out"
        )
    if top == 0 or not X.any():
        return X.new_zeros(0), X.new_zeros(0, k)
    factors = from_gram(X, top=top, floor=floor)
    if factors is None:
        factors = _factors(torch.linalg.qr(X, mode="r").R if m > _TALL * k else X, key=key)
    s, Vh = factors
    rank = int((s > max(ROUNDING * float(s[0]), floor)).sum())
    s, Vh = s[:rank][:top], Vh[:rank][:top]
    return s, Vh * Vh.gather(1, Vh.abs().argmax(1, keepdim=True)).sign()


def from_gram(
    X: torch.Tensor, *, top: int | None = None, floor: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Factors s and Vh, the first `top` or all above `floor`, by eigenvectors of X^T X; None if one is too small."""
    try:
        s, Vh = _gram(X)
    except _FAILED:
        return None
    resolved = _LARGE * float(s[0])
    s, Vh = s[:top], Vh[:top]
    doubtful = (s < resolved) & (s > min(floor, resolved))
    return None if doubtful.any() or not resolved else (s, Vh)


def _factors(R: torch.Tensor, *, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors s and Vh by an SVD or, if that does not converge, from the Gram matrix."""
    with suppress(_FAILED):
        _, s, Vh = torch.linalg.svd(R, full_matrices=False)
        return s, Vh
    try:
        s, Vh = _gram(R)
    except _FAILED as error:
        raise NumericalError(
            f"neither an SVD of {key!r} nor the eigenvalues of its Gram matrix converged; "
            "merge with a method that needs no singular values, such as task_arithmetic"
        ) from error
    return torch.where(s > _RESOLVED * s[0], s, 0.0), Vh


def _gram(X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors s and Vh from eigenvalues of X^T X, which keep half of the digits."""
    values, vectors = torch.linalg.eigh(X.T @ X)
    return values.flip(0).clamp_min(0).sqrt(), vectors.flip(1).T
