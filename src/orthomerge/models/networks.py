"""Modules of a model: one encoder with all heads, and an encoder linearised around the base.

The tangent is f_lin(x; theta) = f(x; theta_b) + J(x) tau, with tau = theta - theta_b (Ortiz-Jimenez et al. 2023, arXiv
2305.12827). f [B, d] are the features that the head reads; J(x) tau is computed in one forward-mode pass at theta_b,
with the encoder in eval mode. A merge of such experts must be evaluated as f_lin too: `Model.linearised`.

Differs from the paper: the trained parameters are tau, so weight decay pulls the weights towards theta_b, not zero.
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
    """A classifier as a module: its tensors are parameters, or buffers if they are extra."""

    def __init__(self, classifier: Head | Extra) -> None:
        super().__init__()
        self._head, self._kind = head_of(classifier), None if isinstance(classifier, Head) else classifier.kind
        extra = {} if isinstance(classifier, Head) else classifier.extra_tensors()
        self._extra = {name: f"extra_{_without_dots(name)}" for name in extra}
        for name, tensor in self._head.tensors().items():
            self.register_parameter(_without_dots(name), nn.Parameter(tensor.detach().clone()))
        for name, tensor in extra.items():
            self.register_buffer(self._extra[name], tensor.detach().clone())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        head = self._head.with_tensors({name: self.get_parameter(_without_dots(name)) for name in self._head.tensors()})
        if self._kind is None:
            return head(features)
        extra = {name: self.get_buffer(buffer) for name, buffer in self._extra.items()}
        return rebuilt(self._kind, head, extra, where=Path(self._kind))(features)


class MultiHead(nn.Module):
    """One encoder with a classifier per task; the encoder is run once per batch."""

    def __init__(self, encoder: nn.Module, family: Family, heads: Mapping[str, Head | Extra]) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({_without_dots(task): ClassifierModule(head) for task, head in heads.items()})
        self._family = family
        self._poolings = {task: head_of(head).pooling or family.default_pooling for task, head in heads.items()}

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        if not self._poolings:
            raise RecipeError("this model has no heads; give it some with `with_heads`")
        output, config = self._family.forward(self.encoder, batch), getattr(self.encoder, "config", None)
        features = {
            pooling: self._family.poolings[pooling](output, batch, config) for pooling in {*self._poolings.values()}
        }
        return {task: self.heads[_without_dots(task)](features[pooling]) for task, pooling in self._poolings.items()}


def _without_dots(name: str) -> str:
    return name.replace(".", "__")


class LinearisedEncoder(nn.Module):
    """Features of the linearised model. `deltas`: tau by the encoder's parameter names, None to train it from zero.

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
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        features, change = self._features_and_change(batch)
        return features + change

    def change(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute J(x) tau, [B, d]."""
        return self._features_and_change(batch)[1]

    def tuned(self) -> nn.Module:
        """Return an ordinary encoder with the weights theta_b + tau."""
        encoder = copy.deepcopy(self.encoder)
        parameters = dict(encoder.named_parameters())
        with torch.no_grad():
            for name, delta in zip(self.names, self.deltas, strict=True):
                parameters[name].add_(delta)
        return encoder

    def _features_and_change(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_inference_mode_enabled():  # in which torch 2.11 returns zeros for forward derivatives
            with torch.inference_mode(False), torch.no_grad():
                return self._features_and_change({name: value.clone() for name, value in batch.items()})
        base = dict(self.encoder.named_parameters())
        primals = {name: base[name].detach() for name in self.names}
        tangents = dict(zip(self.names, self.deltas, strict=True))

        def features(parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return self._family.features(_Functional(self.encoder, parameters), batch, self._pooling)

        results = jvp(features, (primals,), (tangents,))
        return results[0], results[1]


@cache
def _load_rules() -> None:
    """Have torch load its forward-mode rules, and silence its warnings about compiling some of them."""
    with quiet():
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


class _Functional:
    """An encoder as a function of given parameters, with the config that poolings may read."""

    def __init__(self, encoder: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self._encoder, self._parameters = encoder, dict(parameters)
        self.config = getattr(encoder, "config", None)

    def __call__(self, **batch: torch.Tensor) -> Any:
        return functional_call(self._encoder, self._parameters, args=(), kwargs=batch)


def deltas_between(base: nn.Module, tuned: nn.Module) -> dict[str, torch.Tensor]:
    """Compute tau = theta - theta_b by parameter name, for two encoders of one architecture."""
    after = dict(tuned.named_parameters())
    return {name: after[name].detach().to(before) - before.detach() for name, before in base.named_parameters()}


def tangent(
    family: Family, config: Mapping[str, Any], start: Tensors, tensors: Tensors, pooling: str
) -> tuple[LinearisedEncoder, Family]:
    """Build a linearised encoder, whose output is the features, and a family that returns them unchanged."""
    base = Skeleton.build(family, config, dict(tensors.specs))
    base.fill(start)
    tuned = copy.deepcopy(base)
    tuned.fill(tensors)
    deltas = deltas_between(base.module, tuned.module)
    module = LinearisedEncoder(family, pooling, base.module, deltas).requires_grad_(False)
    unpooled = replace(
        family,
        forward=lambda tangent, batch: tangent(batch),
        poolings={pooling: lambda features, batch, config: features},
    )
    return module, unpooled
