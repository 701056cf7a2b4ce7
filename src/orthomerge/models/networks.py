"""Networks made of a model: one encoder with all heads, and an encoder replaced by its tangent.

The tangent is f_lin(x; theta) = f(x; theta_b) + J(x) tau, with tau = theta - theta_b (Ortiz-Jimenez et al. 2023, arXiv
2305.12827). Features f [B, d] are those that the head reads; J(x) tau comes from one forward-mode pass at theta_b, the
encoder in eval mode. Task vectors of such experts add up exactly in function space, so what is merged from them must
be evaluated as f_lin too: `Model.linearised`.

Differs from the paper: the parameters that are trained are tau, so weight decay draws towards theta_b, not zero.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.func import functional_call, jvp

from orthomerge.core.errors import RecipeError
from orthomerge.models.family import Family
from orthomerge.models.heads import Extra, Head, head_of, rebuilt
from orthomerge.models.skeleton import Skeleton, quiet
from orthomerge.models.tensors import Tensors


class ClassifierModule(nn.Module):
    """A classifier whose tensors move with the module that it is in."""

    def __init__(self, classifier: Head | Extra) -> None:
        super().__init__()
        self._head, self._kind = head_of(classifier), None if isinstance(classifier, Head) else classifier.kind
        extra = {} if isinstance(classifier, Head) else classifier.extra_tensors()
        self._extra = {name: f"extra_{_plain(name)}" for name in extra}
        for name, tensor in self._head.tensors().items():
            self.register_parameter(_plain(name), nn.Parameter(tensor.detach().clone()))
        for name, tensor in extra.items():
            self.register_buffer(self._extra[name], tensor.detach().clone())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        head = self._head.with_tensors({name: self.get_parameter(_plain(name)) for name in self._head.tensors()})
        if self._kind is None:
            return head(features)
        extra = {name: self.get_buffer(buffer) for name, buffer in self._extra.items()}
        return rebuilt(self._kind, head, extra, where=Path(self._kind))(features)


class MultiHead(nn.Module):
    """One encoder and a classifier per task; the encoder is run once per batch."""

    def __init__(self, encoder: nn.Module, family: Family, heads: Mapping[str, Head | Extra]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({_plain(task): ClassifierModule(head) for task, head in heads.items()})
        self._family = family
        self._poolings = {task: head_of(head).pooling or family.default_pooling for task, head in heads.items()}

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        """Logits [B, C] by task."""
        if not self._poolings:
            raise RecipeError("this model has no heads; give it some with `with_heads`")
        output, config = self._family.forward(self.encoder, batch), getattr(self.encoder, "config", None)
        features = {
            pooling: self._family.poolings[pooling](output, batch, config) for pooling in {*self._poolings.values()}
        }
        return {task: self.heads[_plain(task)](features[pooling]) for task, pooling in self._poolings.items()}


def _plain(name: str) -> str:
    return name.replace(".", "__")


class LinearisedEncoder(nn.Module):
    """Features of the tangent model. `deltas`: tau by the encoder's parameter names, zero if it is to be trained.

    The encoder is switched to eager attention: fused kernels have no forward-mode derivative.
    """

    def __init__(
        self, family: Family, pooling: str, encoder: nn.Module, deltas: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        _load_rules()
        if callable(switch := getattr(encoder, "set_attn_implementation", None)):
            switch("eager")
        self.encoder = encoder.eval().requires_grad_(False)
        self._family, self._pooling = family, pooling
        parameters = dict(encoder.named_parameters())
        self.names = tuple(parameters)
        # In a list, because a parameter's name may not contain dots.
        self.deltas = nn.ParameterList(
            torch.zeros_like(parameter) if deltas is None else deltas[name].detach().to(parameter).clone()
            for name, parameter in parameters.items()
        )

    def train(self, mode: bool = True) -> Self:
        """The tangent is taken in eval mode, whatever the mode of what is around it."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """f(x; theta_b) + J(x) tau, [B, d]."""
        features, change = self._push(batch)
        return features + change

    def change(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """J(x) tau, [B, d]."""
        return self._push(batch)[1]

    def tuned(self) -> nn.Module:
        """An ordinary encoder with the weights theta_b + tau."""
        encoder = copy.deepcopy(self.encoder)
        parameters = dict(encoder.named_parameters())
        with torch.no_grad():
            for name, delta in zip(self.names, self.deltas, strict=True):
                parameters[name].add_(delta)
        return encoder

    def _push(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        base = dict(self.encoder.named_parameters())
        primals = {name: base[name].detach() for name in self.names}
        tangents = dict(zip(self.names, self.deltas, strict=True))

        def features(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return self._family.features(_Functional(self.encoder, parameters), batch, self._pooling)

        pushed = jvp(features, (primals,), (tangents,))
        return pushed[0], pushed[1]


@cache
def _load_rules() -> None:
    """Have torch load its forward-mode rules; it compiles some of them in a way that it warns about itself."""
    with quiet():
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


class _Functional:
    """An encoder as a function of its parameters; poolings may ask for its config."""

    def __init__(self, encoder: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self._encoder, self._parameters = encoder, dict(parameters)
        self.config = getattr(encoder, "config", None)

    def __call__(self, **batch: torch.Tensor) -> Any:
        return functional_call(self._encoder, self._parameters, args=(), kwargs=batch)


def deltas_between(base: nn.Module, tuned: nn.Module) -> dict[str, torch.Tensor]:
    """Tau = theta - theta_b by parameter name, for two encoders of one architecture."""
    after = dict(tuned.named_parameters())
    return {name: after[name].detach().to(before) - before.detach() for name, before in base.named_parameters()}


def tangent(
    family: Family, config: Mapping[str, Any], start: Tensors, tensors: Tensors, pooling: str
) -> tuple[LinearisedEncoder, Family]:
    """A module that gives the features of a linearised encoder, and a family that takes them as they come."""
    base = Skeleton.build(family, config, dict(tensors.specs))
    base.fill(start)
    tuned = copy.deepcopy(base)
    tuned.fill(tensors)
    deltas = deltas_between(base.module, tuned.module)
    module = LinearisedEncoder(family, pooling, base.module, deltas).requires_grad_(False)
    # The module takes a batch and gives features, which need no pooling.
    as_it_is = replace(
        family,
        forward=lambda tangent, batch: tangent(batch),
        poolings={pooling: lambda features, batch, config: features},
    )
    return module, as_it_is
