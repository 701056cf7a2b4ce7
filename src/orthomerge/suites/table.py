"""Table of suites."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from orthomerge.core.schema import find_row

if TYPE_CHECKING:
    from orthomerge.suites.suite import Say, Suite


@dataclass(frozen=True)
class Row:
    """One suite. `maker`: `module:function`; `needs`: requirements, shown to users."""

    name: str
    maker: str
    title: str
    tasks: tuple[str, ...]
    needs: str


_CLIP8 = ("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd")
_TEXT5 = ("ag_news", "yelp", "amazon", "yahoo", "dbpedia")
_TEXT8 = ("ag_news", "yelp5", "dbpedia14", "banking77", "clinc150", "trec6", "sst5", "subj")
_VISION8 = (
    "mnist", "fashion_mnist", "cifar10", "gtsrb", "resisc12", "quickdraw345", "clothing10", "signdigits",
)  # fmt: skip
_DIGITS = ("digit", "parity", "size", "rotation", "mirrored", "negative", "shift")
_HUB = "the Hugging Face hub, or its cache"

SUITES: Mapping[str, Row] = {
    row.name: row
    for row in (
        Row("digits", "digits:build", "Seven tasks from scikit-learn's digits, a tiny ViT", _DIGITS, "nothing"),
        Row("text8", "eights:text", "Eight text tasks, all-MiniLM-L6-v2", _TEXT8, "--data with the eight tables"),
        Row("vision8", "eights:vision", "Eight image tasks, a small ViT", _VISION8, "--data with the eight arrays"),
        Row("clip-vit-b32-8", "published:clip", "The papers' eight vision tasks, CLIP ViT-B/32", _CLIP8, _HUB),
        Row("clip-vit-b16-8", "published:clip", "The papers' eight vision tasks, CLIP ViT-B/16", _CLIP8, _HUB),
        Row("clip-vit-l14-8", "published:clip", "The papers' eight vision tasks, CLIP ViT-L/14", _CLIP8, _HUB),
        Row("bert-text5", "published:text", "The papers' five text tasks, BERT", _TEXT5, _HUB),
        Row("t5-base-text5", "published:text", "The papers' five text tasks, T5-base", _TEXT5, _HUB),
        Row("t5-large-text5", "published:text", "The papers' five text tasks, T5-large", _TEXT5, _HUB),
    )
}


def suite_root() -> Path:
    """Return the folder of all suites: `suites` in $ORTHOMERGE_CACHE, or in `~/.cache/orthomerge`."""
    return Path(os.environ.get("ORTHOMERGE_CACHE") or "~/.cache/orthomerge").expanduser() / "suites"


def build_suite(
    name: str,
    *,
    folder: str | Path | None = None,
    data: str | Path | None = None,
    base: str | None = None,
    device: str = "auto",
    say: Say = print,
) -> Suite:
    """Build a suite in a folder, by default in the cache; existing parts are kept. `data`: folder with the tasks."""
    row, target = find_row(SUITES, name, what="suite"), Path(folder) if folder else suite_root() / name
    source = Path(data) if data else None
    module, _, function = row.maker.partition(":")
    build = getattr(import_module(f"orthomerge.suites.{module}"), function)
    return cast("Suite", build(name=name, folder=target, data=source, base=base, device=device, say=say))
