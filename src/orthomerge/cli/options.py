"""Arguments and options that several commands have."""

from typing import Annotated

import typer

RecipePath = Annotated[str | None, typer.Argument(metavar="[RECIPE.yaml]", help="A recipe, ours or mergekit's.")]
Base = Annotated[
    str | None,
    typer.Option("--base", help="The model that the experts were fine-tuned from: folder, file or hub id."),
]
Experts = Annotated[list[str] | None, typer.Option("--expert", metavar="NAME=PATH", help="An expert; repeat for each.")]
Method = Annotated[str | None, typer.Option("--method", help="See `orthomerge methods`.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the method or of the recipe; repeat for each."),
]
Out = Annotated[str | None, typer.Option("--out", help="The folder to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output of ours, if no other file is in it.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="keep, float32, float16 or bfloat16.")]
ShardSize = Annotated[str | None, typer.Option("--max-shard-size", help="For example 5GB.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Folder = Annotated[str | None, typer.Option("--folder", help="Where the suite is kept; a cache folder if not given.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, ...")]
Grid = Annotated[str | None, typer.Option("--grid", help="Scales to try, e.g. 0.2,0.5,1; else 0.05 to 1.")]
Batch = Annotated[int, typer.Option("--batch", help="Inputs encoded at once.")]
