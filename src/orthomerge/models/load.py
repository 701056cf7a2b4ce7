"""Loading an encoder from a local folder into its stock class, with every weight accounted for."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import reduce
from typing import TYPE_CHECKING, Any

from orthomerge.checkpoints.checkpoint import Checkpoint, is_float, torch_dtype
from orthomerge.checkpoints.opening import open_checkpoint
from orthomerge.errors import CheckpointError, RecipeError, some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from orthomerge.models.family import Family

__all__ = ["load_encoder", "load_whole", "quiet"]

_POOLER = "pooler.*"  # optional in exactly those families whose class can be built without one


def load_encoder(folder: Path, family: Family) -> torch.nn.Module:
    """The encoder of a folder, ready to run, in the dtype of its files."""
    if not family.encoder_class:
        raise RecipeError(f"family {family.name!r} has no class to load {folder} into; build the module yourself")
    checkpoint = open_checkpoint(folder)
    kind = (checkpoint.config or {}).get("model_type")
    if kind not in family.model_types:
        raise CheckpointError(
            f"{folder / 'config.json'} must say 'model_type' {' or '.join(map(repr, family.model_types))} "
            f"for family {family.name!r}, got {kind!r}"
        )
    options = dict(family.encoder_options)
    if _POOLER in family.optional and not any(fnmatchcase(key, _POOLER) for key in checkpoint):
        options["add_pooling_layer"] = False
    model: torch.nn.Module = load_whole(
        family.encoder_class, folder, dtype=_widest(checkpoint), optional=family.optional, options=options
    )
    return model


def load_whole(
    class_name: str,
    folder: Path,
    *,
    dtype: torch.dtype,
    optional: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A model of transformers in eval mode; a weight that is missing, misshapen or left over is an error.

    Those that match `optional` may be left over.
    """
    with quiet():
        import transformers

        try:
            model, info = getattr(transformers, class_name).from_pretrained(
                folder,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed then, and refused below
                dtype=dtype,
                **(options or {}),
            )
        except Exception as error:  # of whatever class: each library underneath has its own
            raise CheckpointError(f"transformers cannot load {folder} as {class_name}: {error}") from error
    mismatched = [f"{name} {tuple(found)} instead of {tuple(built)}" for name, found, built in info["mismatched_keys"]]
    problems = {
        "it lacks": info["missing_keys"],
        "its config gives other shapes to": mismatched,
        "the model has no place for": {key for key in info["unexpected_keys"] if not _matches(key, optional)},
    }
    for what, keys in problems.items():
        if keys:
            raise CheckpointError(
                f"{folder} does not fit {class_name}: {what} {some(sorted(keys))}; "
                "no weight is ever initialised at random"
            )
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers, whose reports are errors of our own, and put everything back afterwards."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise RecipeError("running a model needs transformers: pip install 'orthomerge[models]'") from error
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        # DeBERTa-v2's file compiles functions in the old way when it is imported.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.script` is deprecated", category=DeprecationWarning)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def _widest(checkpoint: Checkpoint) -> torch.dtype:
    """The one dtype of a checkpoint's weights, or the one that holds all of them."""
    import torch

    dtypes = {checkpoint.spec(key).dtype for key in checkpoint}
    found = [torch_dtype(dtype) for dtype in sorted(dtypes) if is_float(dtype)]
    return reduce(torch.promote_types, found) if found else torch.float32


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
