from collections.abc import Mapping
from typing import Annotated

from orthomerge.cli.flags import How, Input, Parts, command
from orthomerge.cli.options import Columns, Force, Out
from orthomerge.core.progress import Progress

_SETTINGS = (
    "mode=full, head_first, frozen_head, lora, linearised or tau_jp; also epochs, lr, batch, max_length, device, ...; "
    "repeated."
)


@command("finetune --base base --data topic.csv --out topic --set lr=5e-5")
def finetune(
    *,
    base: Annotated[str, Input("Encoder to start from: folder or hub id.", "BASE")],
    data: Annotated[str, Input("Labelled task: table, .npz, image folder or dataset.", "PATH")],
    other: Annotated[
        tuple[str, ...], Input("Data of another task, for mode=tau_jp; repeated.", "PATH", default="none")
    ] = (),
    columns: Columns,
    settings: Annotated[
        Mapping[str, str] | None, How(_SETTINGS, "KEY=VALUE", name="--set", default="mode=full")
    ] = None,
    out: Out,
    force: Force = False,
    progress: Progress,
) -> Parts:
    """Make an expert: fine-tune a base on one task."""
    from orthomerge.api.finetune import write_expert
    from orthomerge.api.request import read_options

    tuning, others = read_options(settings), [columns.of(source) for source in other]
    metrics = write_expert(base, columns.of(data), out, tuning, others=others, force=force, progress=progress)
    yield {"out": out, "metrics": metrics}
    yield f"wrote {out}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
