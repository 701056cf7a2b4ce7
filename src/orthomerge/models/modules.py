"""The weights of a model with what is needed to run them, and stock encoders in memory that are filled with them.

transformers never sees a folder that somebody else made: the module is built from a config of known keys, and filled
here. transformers 5 gives some modules other names than the tensors it saves, so a state dict whose
tensors hold their own number is loaded once, and where each number ends up is read back.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal

from orthomerge.core.errors import CheckpointError, RecipeError, some
from orthomerge.files.checkpoint import Spec, is_float, torch_dtype
from orthomerge.models.load import quiet
from orthomerge.models.split import matches
from orthomerge.models.stock import KNOWN
from orthomerge.models.tensors import ContentHash, FileTensors, content_digest

if TYPE_CHECKING:
    import torch

    from orthomerge.models.family import Family
    from orthomerge.models.tensors import Tensors


Mode = Literal["ordinary", "linearised"]

_POOLER = "pooler.*"  # optional in exactly those families whose class can be built without one
_FIRST = 3  # of the numbers that tag tensors: 0 and 1 are what a module starts with
_MOST_KEPT = 2  # modules in memory at a time: a merge and the expert that it is compared with


@dataclass(frozen=True, eq=False)
class Encoder:
    """`config`: of the family's encoder class. `start`: of a linearised encoder, the weights it is linear around."""

    family: Family
    config: Mapping[str, Any]
    tensors: Tensors
    start: Tensors | None = None

    @property
    def mode(self) -> Mode:
        return "ordinary" if self.start is None else "linearised"

    @property
    def digest(self) -> str:
        """Identity of content: tensors and config; not of paths, options or heads."""
        if not self.knows_digest:
            if isinstance(self.tensors, FileTensors) or not self.family.encoder_class:
                self.remember(content_digest(self.tensors, self.family.prefix))
            else:
                loaded(self)  # computes the weights once for both
        parts = [self.family.name, self.content, self.config]
        if self.start is not None:
            parts.append(content_digest(self.start, self.family.prefix))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def knows_digest(self) -> bool:
        return "_content" in self.__dict__

    @property
    def content(self) -> str:
        """The hash of the one file that the tensors would be written to, once it is known."""
        content: str = self.__dict__["_content"]
        return content

    def remember(self, content: str) -> None:
        """Keep the hash of the tensors, which somebody computed while they passed by."""
        self.__dict__["_content"] = content

    def runner(self, pooling: str) -> tuple[Any, Family]:
        """What gives features: a module that others may use too, and the family that says how it is read."""
        if self.start is None:
            return loaded(self).module, self.family
        from orthomerge.models.linearised import tangent

        return tangent(self, pooling)

    def module(self, *, eager: bool = False) -> torch.nn.Module:
        """A new module with these weights, in eval mode, on the CPU."""
        if self.start is not None:
            raise RecipeError(
                "a linearised model is a tangent, which stock classes cannot run; use predict or evaluate"
            )
        skeleton = Skeleton.build(self.family, self.config, dict(self.tensors.specs), eager=eager)
        skeleton.fill(self.tensors)
        return skeleton.module


def stock_config(family: Family, config: Mapping[str, Any]) -> Any:
    """The config of a family's encoder class, from known keys."""
    with quiet():
        import transformers

        cls = getattr(transformers, family.encoder_class).config_class
        try:
            return cls(**{key: value for key, value in config.items() if key in KNOWN and key != "model_type"})
        except Exception as error:  # validators of transformers raise errors of their own
            raise CheckpointError(f"the config does not fit {cls.__name__}: {error}; fetch the model again") from error


@dataclass(frozen=True, eq=False)
class Skeleton:
    """A stock encoder. `names`: canonical name -> name in the module's state dict; optional tensors may be absent.

    `architecture`: the same for modules that can hold each other's weights.
    """

    module: torch.nn.Module
    names: Mapping[str, str]
    specs: Mapping[str, Spec]
    architecture: str = ""

    @classmethod
    def build(
        cls, family: Family, config: Mapping[str, Any], specs: Mapping[str, Spec], *, eager: bool = False
    ) -> Skeleton:
        """The module for tensors of these names and shapes; a weight that has no place, or a place without a weight,
        is an error.
        """
        if not family.encoder_class:
            raise RecipeError(f"family {family.name!r} has no class to build; build the module yourself")
        import torch

        options: dict[str, Any] = dict(family.encoder_options)
        if _POOLER in family.optional and not any(fnmatchcase(key, _POOLER) for key in specs):
            options["add_pooling_layer"] = False
        if eager:
            options["attn_implementation"] = "eager"
        tags = {key: torch.full(spec.shape, float(_FIRST + place)) for place, (key, spec) in enumerate(specs.items())}
        module = _load(family, stock_config(family, config), tags, options)
        names = _places(family, module, tags)
        return cls(module.to(_widest(specs)).eval(), names, specs, _architecture(family, config, specs))

    def fill(self, tensors: Tensors, *, content: ContentHash | None = None) -> None:
        """Copy a stream of tensors into the module; `content` is fed what passes by."""
        import torch

        state = self.module.state_dict()
        places = {key: state[name].view(-1) for key, name in self.names.items()}
        filled = dict.fromkeys(self.specs, 0)
        with torch.no_grad():
            for key, block in tensors.blocks():
                if content is not None:
                    content.update(block)
                start, flat = filled[key], block.reshape(-1)
                if key in places:
                    places[key][start : start + len(flat)].copy_(flat)
                filled[key] = start + len(flat)
        short = [key for key, spec in self.specs.items() if filled[key] != spec.numel]
        if short:
            raise AssertionError(f"the stream ended before {some(short)} was complete")


def loaded(encoder: Encoder) -> Skeleton:
    """A module with the weights of an encoder, shared by everybody who asks; nothing but its device may be changed.

    The last two are kept, and refilled where the next encoder has the same architecture.
    """
    skeleton = next((skeleton for skeleton, owner in _kept if owner() is encoder), None)
    if skeleton is None:
        specs = dict(encoder.tensors.specs)
        skeleton = unshared(encoder.family, encoder.config, specs)
        skeleton.module.to("cpu")
        content = None if encoder.knows_digest else ContentHash(specs, encoder.family.prefix)
        skeleton.fill(encoder.tensors, content=content)
        if content is not None:
            encoder.remember(content.digest())
    _kept[:] = [each for each in _kept if each[0] is not skeleton]
    _kept.append((skeleton, weakref.ref(encoder)))
    return skeleton


def finished(encoder: Encoder) -> None:
    """Let the module of an encoder be refilled for the next one of its architecture."""
    _kept[:] = [(skeleton, _nobody if owner() is encoder else owner) for skeleton, owner in _kept]


def unshared(family: Family, config: Mapping[str, Any], specs: Mapping[str, Spec]) -> Skeleton:
    """A module with any weights that nobody else will see: one that may be refilled, else a new one."""
    free = [skeleton for skeleton, owner in _kept if owner() is None]
    if len(_kept) - len(free) >= _MOST_KEPT:
        free.append(next(skeleton for skeleton, owner in _kept if owner() is not None))
    _kept[:] = [each for each in _kept if each[0] not in free]
    architecture = _architecture(family, config, specs)
    same = next((skeleton for skeleton in free if skeleton.architecture == architecture), None)
    return same or Skeleton.build(family, config, specs)


def release() -> None:
    """Let go of all modules in memory."""
    _kept.clear()


_kept: list[tuple[Skeleton, Callable[[], Encoder | None]]] = []  # with whose weights they hold; the last used is last


def _nobody() -> Encoder | None:
    return None


def _architecture(family: Family, config: Mapping[str, Any], specs: Mapping[str, Spec]) -> str:
    shapes = {key: (spec.shape, spec.dtype) for key, spec in specs.items()}
    return json.dumps([family.name, config, shapes], sort_keys=True, default=str)


def _load(family: Family, config: Any, tags: Mapping[str, torch.Tensor], options: Mapping[str, Any]) -> torch.nn.Module:
    with quiet():
        import torch
        import transformers

        try:
            module, info = getattr(transformers, family.encoder_class).from_pretrained(
                None,
                config=config,
                state_dict=dict(tags),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed then, and refused below
                dtype=torch.float32,
                **options,
            )
        except Exception as error:  # of whatever class: each library underneath has its own
            raise CheckpointError(f"transformers cannot build {family.encoder_class}: {error}") from error
    mismatched = [f"{name} {tuple(here)} instead of {tuple(built)}" for name, here, built in info["mismatched_keys"]]
    optional = family.optional
    problems = {
        "it lacks": info["missing_keys"],
        "its config gives other shapes to": mismatched,
        "the model has no place for": {key for key in info["unexpected_keys"] if not matches(key, optional)},
    }
    for what, keys in problems.items():
        if keys:
            raise CheckpointError(
                f"the weights do not fit {family.encoder_class}: {what} {some(sorted(keys))}; "
                "no weight is ever initialised at random"
            )
    built: torch.nn.Module = module
    return built


def _places(family: Family, module: torch.nn.Module, tags: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Where each tagged tensor is in the module: every tensor of the module holds exactly one tag."""
    keys, names, owners = list(tags), dict[str, str](), dict[int, str]()
    for name, tensor in module.state_dict().items():
        if not tensor.numel():
            continue
        low, high = float(tensor.min()), float(tensor.max())
        place = int(low) - _FIRST
        if low != high or not 0 <= place < len(keys) or low != int(low):
            raise CheckpointError(
                f"{family.encoder_class} keeps {name!r} in another form than checkpoints do; this version of "
                "transformers is not supported for it: install another one"
            )
        if names.get(keys[place], name) != name and owners.get(tensor.data_ptr()) != keys[place]:
            raise CheckpointError(f"{family.encoder_class} holds {keys[place]!r} twice; use another transformers")
        names.setdefault(keys[place], name)
        owners[tensor.data_ptr()] = keys[place]
    return names


def _widest(specs: Mapping[str, Spec]) -> torch.dtype:
    """The one dtype of some weights, or the one that holds all of them."""
    import torch

    dtypes = [torch_dtype(dtype) for dtype in sorted({spec.dtype for spec in specs.values()}) if is_float(dtype)]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32
