"""Progress of long work, reported to an observer."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One stage after the other, each with a count of what is done."""

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


class Watch:
    """Progress over several results: they begin and end, and within one there are stages. Shows nothing itself."""

    def begin(self, name: str, *, place: int, count: int) -> None:
        """A result begins, number `place` of `count`."""

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None:
        """A result is complete. `found`: it was in the store before."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage of `total` units begins."""

    def advance(self, count: int) -> None:
        """`count` more units are done."""


SILENT: Progress = Watch()
