"""Groups of flags that several commands have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from orthomerge.cli.flags import Flag

Data = Annotated[
    dict[str, str] | str | None,
    Flag("Folder with one TASK.csv, .jsonl, .parquet or image folder per task; or TASK=PATH, repeated.", "TASK=PATH"),
]
Device = Annotated[str, Flag("auto, cpu, cuda, ...", "DEVICE")]
Settings = Annotated[
    tuple[str, ...], Flag("Option of the method or of the recipe, repeated.", "KEY=VALUE", name="--set")
]


@dataclass(frozen=True)
class Compute:
    """Where inputs are encoded, and how many at once."""

    device: Device = "auto"
    batch: Annotated[int, Flag("Inputs encoded at once.", "N")] = 64


@dataclass(frozen=True)
class Moved:
    """Where base and experts are now."""

    expert: Annotated[
        dict[str, str], Flag("New place of an expert, if it was moved; repeated.", "TASK=PATH", default="as recorded")
    ] = ()  # type: ignore[assignment]
    base: Annotated[str | None, Flag("New place of the base.", "PATH", default="as recorded")] = None


@dataclass(frozen=True)
class Display:
    """What is printed."""

    json: Annotated[bool, Flag("Print one JSON document.")] = False
    quiet: Annotated[bool, Flag("Print no progress.", short="-q")] = False
    verbose: Annotated[bool, Flag("Print the traceback of an error.", short="-v")] = False

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.json
