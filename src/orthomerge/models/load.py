"""Calling transformers without its reports."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Iterator


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
