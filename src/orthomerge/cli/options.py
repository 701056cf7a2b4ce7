"""Flags that several commands have, alone and in groups."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from orthomerge.cli.flags import How, Input, Output
from orthomerge.cli.printing import shown

if TYPE_CHECKING:
    from orthomerge.core.progress import Watch
    from orthomerge.models.encoding import Encoding

_EXPERTS = (
    "Folder, file, LoRA adapter or hub id; NAME=EXPERT names its task  [default: the folder's name]. Or a recipe, ours "
    "or mergekit's."
)
_DATA = "A folder with one TASK.csv, .jsonl, .parquet or image folder per task; or TASK=PATH, repeated. Labels are {}."

Experts = Annotated[tuple[str, ...], Input(_EXPERTS, "EXPERT...", positional=True)]
SavedModel = Annotated[str, Input("Folder of a merged model.", "MODEL", positional=True)]
Unlabelled = Annotated[Mapping[str, str] | str | None, Input(_DATA.format("not used"), "PATH")]
Labelled = Annotated[Mapping[str, str] | str | None, Input(_DATA.format("needed"), "PATH")]
Base = Annotated[
    str | None,
    Input("The model that all experts were fine-tuned from.", "BASE", default="the one adapters name"),
]
Split = Literal["train", "val", "test"]
Limit = Annotated[int | None, Input("At most N inputs per task.", "N", default="no limit")]
Suite = Annotated[str | None, Input("A named benchmark instead (`list suites`).", "SUITE")]
SuiteFolder = Annotated[str | None, Input("Where the suite is kept.", "FOLDER", default="a cache")]
Device = Annotated[str, Input("auto, cpu, cuda, cuda:1, ...", "DEVICE")]
Grid = Annotated[tuple[float, ...] | None, How("Scales to try.", "0.2,0.5,1", default="0.05 to 1")]
Out = Annotated[str, Output("Folder to write.", "FOLDER", short="-o")]
OutIfAny = Annotated[str | None, Output("Folder to write.", "FOLDER", short="-o", default="none, scores only")]
RunFolder = Annotated[str, Output("Run folder to write.", "FOLDER", short="-o")]
Dtype = Annotated[
    Literal["keep", "float32", "float16", "bfloat16", "float64"] | None,
    Output("Type of the weights that are written.", "TYPE", default="keep"),
]
Force = Annotated[bool, Output("Replace an output of ours, if no other file is in it.")]


@dataclass(frozen=True)
class Columns:
    """Where tables keep what is read."""

    text_column: Annotated[str, Input("Column of texts in the tables of --data.", "NAME")] = "text"
    label_column: Annotated[str, Input("Column of labels.", "NAME")] = "label"

    def of(self, data: Any) -> Any:
        """Attach the names of columns to paths of tables."""
        if self == Columns():
            return data
        from orthomerge.data.reading import ColumnSource

        if isinstance(data, Mapping):
            return {task: ColumnSource(path, self.text_column, self.label_column) for task, path in data.items()}
        return ColumnSource(data, self.text_column, self.label_column)


@dataclass(frozen=True)
class Places:
    """Where base and experts are now."""

    expert: Annotated[
        Mapping[str, str] | None, Input("Where an expert is now, repeated.", "TASK=PATH", default="as recorded")
    ] = None
    base: Annotated[str | None, Input("Where the base is now.", "PATH", default="as recorded")] = None


@dataclass(frozen=True)
class Compute:
    """Where inputs are encoded, and how many at once."""

    device: Device = "auto"
    batch: Annotated[int, How("Inputs encoded at once.", "N")] = 64

    def encoding(self, *, cached: bool = True) -> Encoding:
        """The encoding of inputs. `cached`: whether features are kept for the next command."""
        from orthomerge.models.encoding import Encoding
        from orthomerge.models.features import FeatureCache

        return Encoding(FeatureCache() if cached else None, self.device, batch=self.batch)


@dataclass(frozen=True)
class Display:
    """What is printed."""

    json: Annotated[bool, Output("Print one JSON document.")] = False
    quiet: Annotated[bool, Output("Print no progress.", short="-q")] = False
    verbose: Annotated[bool, Output("Print the traceback of an error.", short="-v")] = False

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.json

    def progress(self) -> AbstractContextManager[Watch]:
        """Progress on standard error, if it is shown."""
        return shown(quiet=self.silent)
