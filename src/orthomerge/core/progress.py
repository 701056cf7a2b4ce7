"""Progress of long work, reported to an observer."""

from __future__ import annotations


class Progress:
    """One stage after the other, each with a count of what is done. Shows nothing itself."""

    def stage(self, title: str, total: int | None) -> None:
        """A stage of `total` units begins."""

    def advance(self, count: int) -> None:
        """`count` more units are done."""


class Watch(Progress):
    """Progress over several results, which begin and end; within one there are stages."""

    def begin(self, name: str, *, place: int, count: int) -> None:
        """A result begins, number `place` of `count`."""

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None:
        """A result is complete. `found`: it was in the store before."""


SILENT = Progress()
