"""Flags of several commands, alone and in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from orthomerge.cli.flags import How, Input, Output, Parts
from orthomerge.core.errors import RecipeError

if TYPE_CHECKING:
    from orthomerge.core.progress import Progress
    from orthomerge.models.encoding import Encoding
    from orthomerge.models.experts import Experts
    from orthomerge.models.model import Model
    from orthomerge.runs.recipe import Recipe

_EXPERTS = (
    "Folder, file, LoRA adapter or hub id; NAME=EXPERT names its task  [default: the folder's name]. Or a recipe of "
    "orthomerge or mergekit."
)
_DATA = "A folder with one TASK.csv, .jsonl, .parquet or image folder per task; or TASK=PATH, repeated. Labels are {}."

ExpertPaths = Annotated[tuple[str, ...], Input(_EXPERTS, "EXPERT...", positional=True)]
SavedModel = Annotated[str, Input("Folder of a merged model.", "MODEL", positional=True)]
Unlabelled = Annotated[Mapping[str, str] | str | None, Input(_DATA.format("not used"), "PATH")]
Labelled = Annotated[Mapping[str, str] | str | None, Input(_DATA.format("needed"), "PATH")]
Base = Annotated[str | None, Input("Model that all experts were fine-tuned from.", "BASE", default="none")]
Split = Literal["train", "val", "test"]
Limit = Annotated[int | None, Input("At most N inputs per task.", "N", default="no limit")]
Suite = Annotated[str | None, Input("Named benchmark instead of --data (`list suites`).", "SUITE")]
SuiteFolder = Annotated[str | None, Input("Folder of the suite.", "FOLDER", default="a cache")]
Device = Annotated[str, How("Device: auto, cpu, cuda, cuda:1, ...", "DEVICE")]
Out = Annotated[str, Output("Folder to write.", "FOLDER", short="-o")]
Dtype = Annotated[
    Literal["keep", "float32", "float16", "bfloat16", "float64"] | None,
    Output("Data type of the written weights.", "TYPE", default="keep"),
]
Force = Annotated[bool, Output("Replace an earlier output that has no other files.")]


@dataclass(frozen=True)
class Columns:
    """Names of columns in tables."""

    text_column: Annotated[str, Input("Column of texts in the tables of --data.", "NAME")] = "text"
    label_column: Annotated[str, Input("Column of labels in these tables.", "NAME")] = "label"

    def of(self, data: Any) -> Any:
        """Attach the names of columns to the paths of tables."""
        if self == Columns():
            return data
        from orthomerge.data.reading import ColumnSource

        if isinstance(data, Mapping):
            return {task: ColumnSource(path, self.text_column, self.label_column) for task, path in data.items()}
        return ColumnSource(data, self.text_column, self.label_column)


@dataclass(frozen=True)
class Compute:
    """Device and batch size for encoding inputs."""

    device: Device = "auto"
    batch: Annotated[int, How("Batch size for encoding inputs.", "N")] = 64

    def encoding(self, *, cached: bool = True) -> Encoding:
        """Return the encoding of inputs. `cached`: whether features are kept for later commands."""
        from orthomerge.models.encoding import Encoding
        from orthomerge.models.features import FeatureCache

        return Encoding(FeatureCache() if cached else None, self.device, batch=self.batch)


@dataclass(frozen=True)
class Saved(Compute):
    """Paths of a saved model's base and experts, if they were moved, and how inputs are encoded."""

    expert: Annotated[
        Mapping[str, str] | None, Input("Path of a moved expert, repeated.", "TASK=PATH", default="as recorded")
    ] = None
    base: Annotated[str | None, Input("Path of the moved base.", "PATH", default="as recorded")] = None

    def options(self) -> dict[str, Any]:
        """Return the arguments of `align`, `evaluate` and `diagnose`."""
        return {"experts": self.expert, "base": self.base, "encoding": self.encoding()}


@dataclass(frozen=True)
class Edit(Compute):
    """Flags of `negate` and `analogy`: experts, the grid of a search, and the output."""

    experts: ExpertPaths = ()
    base: Base = None
    grid: Annotated[tuple[float, ...] | None, How("Scales to try.", "0.2,0.5,1", default="0.05 to 1")] = None
    out: Annotated[str | None, Output("Folder to write.", "FOLDER", short="-o", default="none, scores only")] = None
    dtype: Dtype = None
    force: Force = False

    def open(self, progress: Progress) -> tuple[Recipe, Experts, dict[str, Any]]:
        """Return the recipe of the command line, whose output is checked, its experts, and options of the search."""
        from orthomerge.api.request import read_request
        from orthomerge.files.publish import check_target
        from orthomerge.models.experts import Experts

        request = read_request(self.experts, edit=True, base=self.base, out=self.out, dtype=self.dtype)
        if request.out is not None:
            check_target(Path(request.out), force=self.force)
        how = {"dtype": request.dtype, "seed": request.seed, "encoding": self.encoding(cached=False)}
        grid = {} if self.grid is None else {"grid": self.grid}
        return request, Experts(request.opening).check(), {**how, **grid, "progress": progress}

    def write(
        self, model: Model | None, request: Recipe, *, data: Iterable[str], failure: str, progress: Progress
    ) -> Parts:
        """Write the model that a search chose. `failure`: why it chose none."""
        from orthomerge.models.writing import write_model
        from orthomerge.runs.models import existing

        if request.out is None:
            return
        if model is None:
            raise RecipeError(f"{failure}, so {request.out} was not written; give another --grid")
        out, size, inputs = Path(request.out), request.max_shard_size, existing(data)
        manifest = write_model(model, out, force=self.force, max_shard_size=size, inputs=inputs, progress=progress)
        yield f"wrote {request.out}, verified; heads: {', '.join(manifest['heads'])}"
