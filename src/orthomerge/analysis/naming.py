"""Keys of figures: what a name can be in a file's name."""

from __future__ import annotations

import re
from collections.abc import Sequence


def keyed(what: str, name: str, *, among: Sequence[str]) -> str:
    """`what-name` in lower-case letters, digits and dashes; unlike that of any other of the names `among`."""
    slug = _slug(name)
    alike = [other for other in among if _slug(other) == slug]
    if slug and len(alike) < 2:
        return f"{what}-{slug}"
    return f"{what}-{slug or 'task'}-{list(among).index(name) + 1}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
