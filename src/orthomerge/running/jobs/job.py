"""A job: one step of a run that reads what others made and writes a folder of its own, named by what it depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from orthomerge.running.digests import digest_of
from orthomerge.version import VERSION

__all__ = ["Job", "make_job"]


@dataclass(frozen=True)
class Job:
    """`key`: the hash of everything else. `spec`: plain data. `inputs`: the hash of what it reads beside its needs.

    `needs`: keys of jobs that must be done before, in the order in which their outputs are used.
    """

    key: str
    kind: str
    spec: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""
    needs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """For people: the kind and what tells it from others of its kind."""
        told = [str(value) for value in self.spec.values() if isinstance(value, str | int) and value != ""]
        return " ".join((self.kind, *told[:3]))


def make_job(kind: str, spec: Mapping[str, Any] | None = None, *, inputs: str = "", needs: Iterable[Job] = ()) -> Job:
    """A job under the key that it must have: same key, same bytes."""
    found, keys = dict(spec or {}), tuple(need.key for need in needs)
    made = {"orthomerge": VERSION, "torch": version("torch")}
    return Job(digest_of([made, kind, found, inputs, keys]), kind, found, inputs, keys)
