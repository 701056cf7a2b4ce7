"""Whoever wants to know how far a run is."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Stages begin and end; within a stage, `stage` and `advance` tell how far its work is."""

    def begin(self, name: str, *, place: int, count: int) -> None: ...

    def end(self, name: str, *, seconds: float, found: bool) -> None: ...

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...


class Silent:
    """Nobody does."""

    def begin(self, name: str, *, place: int, count: int) -> None: ...

    def end(self, name: str, *, seconds: float, found: bool) -> None: ...

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...
