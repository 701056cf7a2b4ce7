"""The state of a run on disk, of one process or of several.

Where every process has all of the encoder, the first one writes and reads, and tells the others. Of a sharded encoder
each writes its own shard, in turn to one of two places: should the run be killed while they write, the last state that
all have is still there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from orthomerge.fitting.kinds import Setting
    from orthomerge.tuning.state import RunState

__all__ = ["read_state", "write_state"]

_PLACES = ("a", "b")


def read_state(setting: Setting) -> dict[str, Any] | None:
    """Where a killed run stood, if it left a state."""
    if not setting.shards.open:
        return setting.group.broadcast(None if setting.state is None else setting.state.read())
    if setting.state is None:  # as in all other processes
        return None
    places = [_of_shard(setting, setting.state, place) for place in _PLACES]
    found = {int(state["step"]): (state, place) for place in places if (state := place.read()) is not None}
    known = set.intersection(*map(set, setting.group.exchange(list(found))))
    chosen, kept = found[max(known)] if known else (None, None)
    for place in places:
        if place != kept:
            place.remove()  # what not all have is of no use
    return chosen


def write_state(setting: Setting, state: dict[str, Any]) -> None:
    """Keep a state; all processes of a sharded encoder do so at the same step."""
    if setting.state is None:
        return
    if not setting.shards.open:
        setting.state.write(state)
        return
    places = [_of_shard(setting, setting.state, place) for place in _PLACES]
    min(places, key=lambda place: _age(place.folder)).write(state)
    setting.group.barrier()


def _age(folder: Path) -> int:
    return folder.stat().st_mtime_ns if folder.exists() else -1


def _of_shard(setting: Setting, state: RunState, place: str) -> RunState:
    return replace(state, folder=state.folder / f"shard-{setting.group.rank}-{place}")
