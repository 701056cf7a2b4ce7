"""How far the work is, told to whoever wants to know."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One stage after the other, each with a count of what is done."""

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


class _Silent:
    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


SILENT: Progress = _Silent()
