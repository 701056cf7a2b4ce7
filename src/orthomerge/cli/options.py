"""Groups of flags that several commands have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from orthomerge.cli.flags import Flag

_EXPERTS = (
    "Folder, file, LoRA adapter or hub id; NAME=EXPERT names its task  [default: the folder's name]. Or a recipe, ours "
    "or mergekit's."
)
_DATA = "A folder with one TASK.csv, .jsonl, .parquet or image folder per task; or TASK=PATH, repeated. Labels are {}."

Experts = Annotated[tuple[str, ...], Flag(_EXPERTS, "EXPERT...", positional=True)]
Unlabelled = Annotated[dict[str, str] | str, Flag(_DATA.format("not used"), "PATH")]
Labelled = Annotated[dict[str, str] | str, Flag(_DATA.format("needed"), "PATH")]
Base = Annotated[
    str | None,
    Flag("The model that all experts were fine-tuned from.", "BASE", default="the one adapters name"),
]
Device = Annotated[str, Flag("auto, cpu, cuda, cuda:1, ...", "DEVICE")]
Dtype = Annotated[
    Literal["keep", "float32", "float16", "bfloat16", "float64"] | None,
    Flag("Type of the weights that are written.", "TYPE", default="keep"),
]
Split = Literal["train", "val", "test"]
Limit = Annotated[int | None, Flag("At most N inputs per task.", "N", default="no limit")]
Force = Annotated[bool, Flag("Replace an output of ours, if no other file is in it.")]
Grid = Annotated[tuple[float, ...] | None, Flag("Scales to try.", "0.2,0.5,1", default="0.05 to 1")]
Suite = Annotated[str | None, Flag("A named benchmark instead (`list suites`).", "SUITE")]
SuiteFolder = Annotated[str | None, Flag("Where the suite is kept.", "FOLDER", default="a cache")]


@dataclass(frozen=True)
class Columns:
    """Where tables keep what is read."""

    text_column: Annotated[str, Flag("Column of texts in the tables of --data.", "NAME")] = "text"
    label_column: Annotated[str, Flag("Column of labels.", "NAME")] = "label"

    def of(self, data: Any) -> Any:
        """The same paths, to be read by these columns."""
        if self == Columns():
            return data
        from orthomerge.data.reading import ColumnSource

        if isinstance(data, dict):
            return {task: ColumnSource(path, self.text_column, self.label_column) for task, path in data.items()}
        return ColumnSource(data, self.text_column, self.label_column)


@dataclass(frozen=True)
class Moved:
    """Where base and experts are now."""

    expert: Annotated[dict[str, str], Flag("Where an expert is now, repeated.", "TASK=PATH", default="as recorded")] = (
        field(default_factory=dict)
    )
    base: Annotated[str | None, Flag("Where the base is now.", "PATH", default="as recorded")] = None


@dataclass(frozen=True)
class Compute:
    """Where inputs are encoded, and how many at once."""

    device: Device = "auto"
    batch: Annotated[int, Flag("Inputs encoded at once.", "N")] = 64


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
