from collections.abc import Mapping
from typing import Annotated, Any

import orthomerge as om
from orthomerge.cli.flags import Input, Parts, command


@command("inspect topic", "inspect merged --verify")
def inspect(
    *,
    path: Annotated[str, Input("Folder, file, adapter, hub id or merged model.", "PATH", positional=True)],
    headers: Annotated[bool, Input("Read headers only: no hashes, no count of NaN.")] = False,
    verify: Annotated[bool, Input("Compare every file of a merged model with its recorded hash.")] = False,
) -> Parts:
    """Describe a checkpoint or a merged model.

    Prints family, tensors, dtypes, head and labels, hashes, and the count of NaN.
    """
    document = om.inspect(path, headers=headers, verify=verify)
    yield document
    if verify:
        yield f"{path}: every file is as it was written"
    else:
        yield from _lines(document)


def _lines(document: Mapping[str, Any]) -> Parts:
    for key, value in document.items():
        if key == "tensors":
            yield f"tensors: {len(value)}"
            for name, tensor in value.items():
                yield f"  {name}  {tensor['dtype']} {tuple(tensor['shape'])}"
        elif isinstance(value, Mapping):
            yield f"{key}:"
            for name, item in value.items():
                yield f"  {name}: {item}"
        else:
            yield f"{key}: {value}"
