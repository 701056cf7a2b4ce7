"""Model Tailor: add a sparse patch per expert; the rest of its linear layers reverts to the base.

Zhu et al., "Model Tailor: Mitigating Catastrophic Forgetting in Multi-modal Large Language Models", 2024, arXiv
2402.12048. Code: didizhu-zju/Model-Tailor.

Per expert and linear layer, with W_b of the base, W_t of the expert, and U the upper Cholesky factor of H^-1, H = G +
damping * mean(diag G) * I, from left to right in blocks of `block` columns:

    score = balance * z(|W_t - W_b|) + (1 - balance) * z(W^2 / diag(U)^2),    z: standardised in each row of the block.

The lowest `sparsity` share of a block reverts to W_b. Each column j that does leaves an error e = (W - W_b)[:, j] /
U[j, j], and all columns to its right get sign * e U[j, :]: with -1, the least squares compensation of W x
(SparseGPT, Frantar and Alistarh 2023). The difference to W_b is the patch; patches are added, times `scale`.

Letters: W, W_b, W_t [m, k]; G, H, U [k, k]; see `grams` for G and for which weights are linear layers.
Differs from the paper: the paper patches the decoder layers from the 20th on of a multi-modal language model; here it
is every linear layer of each expert. G comes from the unpatched expert, in the paper's code from inputs after the
patched layers below. That code *adds* the compensation (`sign` 1), which increases the error, and has balance 0.5.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from orthomerge.core.checks import at_least_one, choices, finite, fraction, positive
from orthomerge.core.errors import NumericalError, RecipeError
from orthomerge.fitting.grams import called, grams
from orthomerge.fitting.setting import Fitted, Setting


@dataclass(frozen=True)
class ModelTailor:
    """`sparsity`: share of each linear layer that reverts to the base. `balance`: weight of the change in the score.

    `sign`: of the compensation; -1 is consistent, 1 as released, 0 none. `scale`: of the patches and of the rest.
    `rest`: other tensors become the experts' mean, or stay at the base. `inputs`: number per task, drawn by the seed.
    """

    sparsity: float = 0.9
    balance: float = 0.8
    sign: int = -1
    scale: float = 1.0
    rest: Literal["base", "mean"] = "mean"
    damping: float = 0.01
    block: int = 128
    inputs: int = 128

    def __post_init__(self) -> None:
        fraction(sparsity=self.sparsity, balance=self.balance, zero=True)
        finite(scale=self.scale)
        positive(damping=self.damping)
        if self.sign not in (-1, 0, 1):
            raise RecipeError(f"'sign' must be -1 (consistent), 1 (as released) or 0 (none), got {self.sign}")
        choices(self)
        at_least_one(block=self.block, inputs=self.inputs)

    def fit(self, setting: Setting) -> Fitted:
        inputs = setting.drawn(self.inputs)
        called(setting, inputs)  # refuses an encoder without linear layers
        base, weights = dict(setting.layout.views(setting.base)), setting.base.clone()
        merged = dict(setting.layout.views(weights))
        kept, layers = {}, 0
        for task in setting.tasks:
            setting.say(f"patch: {task}")
            flat = setting.tuned(task)
            setting.encoder.load(flat)
            moments = grams(setting, inputs, task)
            changed, entries, layers = 0, 0, len(moments)
            for name, expert in setting.layout.views(flat):
                if name in moments:
                    W_t, W_b = (tensor.to(setting.device).double() for tensor in (expert, base[name]))
                    delta, count = self.patch(W_t, W_b, moments[name], what=f"{name!r} of task {task!r}")
                    merged[name].add_(delta.float().cpu(), alpha=self.scale)
                    changed, entries = changed + count, entries + expert.numel()
                elif self.rest == "mean":
                    merged[name].add_(expert - base[name], alpha=self.scale / len(setting.tasks))
            kept[task] = changed / entries
        return Fitted(weights, setting.heads, {"layers": layers, "kept": kept})

    def patch(
        self, tuned: torch.Tensor, base: torch.Tensor, gram: torch.Tensor, *, what: str
    ) -> tuple[torch.Tensor, int]:
        """Return the patch of one layer [m, k], and the number of its entries; `what` names the layer in messages."""
        U = self._factor(gram, what)
        W, kept = tuned.clone(), 0
        for start in range(0, W.shape[1], self.block):
            columns = slice(start, min(start + self.block, W.shape[1]))
            reverted = self._lowest(tuned[:, columns], base[:, columns], W[:, columns], U.diagonal()[columns])
            kept += reverted.numel() - int(reverted.sum())
            errors = torch.zeros_like(W[:, columns])
            for place in range(errors.shape[1]):
                j = start + place
                w, b = W[:, j], base[:, j]
                errors[:, place] = torch.where(reverted[:, place], w - b, 0.0) / U[j, j]
                W[:, j] = torch.where(reverted[:, place], b, w)
                W[:, j + 1 : columns.stop].addr_(errors[:, place], U[j, j + 1 : columns.stop], alpha=self.sign)
            W[:, columns.stop :].addmm_(errors, U[columns, columns.stop :], alpha=self.sign)
        if not torch.isfinite(W).all():
            raise NumericalError(f"the patch of {what} is not finite; raise 'damping'")
        return W - base, kept

    def _factor(self, gram: torch.Tensor, what: str) -> torch.Tensor:
        """U with H^-1 = U^T U; as in SparseGPT, inputs that are always zero have 1 on the diagonal of G."""
        H = gram + torch.diag((gram.diagonal() == 0).to(gram))
        H = H + self.damping * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype, device=H.device)
        factor, failed = torch.linalg.cholesky_ex(H)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not int(failed):
                return torch.triu(upper)
        raise NumericalError(f"the second moments of the inputs of {what} are singular; raise 'damping'")

    def _lowest(
        self, tuned: torch.Tensor, base: torch.Tensor, weight: torch.Tensor, diagonal: torch.Tensor
    ) -> torch.Tensor:
        score = self.balance * _standard((tuned - base).abs())
        score = score + (1 - self.balance) * _standard((weight / diagonal).square())
        lowest = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
        lowest[score.flatten().argsort(stable=True)[: int(self.sparsity * score.numel())]] = True
        return lowest.view_as(score)


def _standard(values: torch.Tensor) -> torch.Tensor:
    centred = values - values.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return torch.where(deviation > 0, centred / deviation, 0.0)
