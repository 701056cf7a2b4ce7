from pathlib import Path
from typing import Any

from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.models.saved import inspect_checkpoint, verify_folder


def inspect(path: str | Path, *, headers: bool = False, verify: bool = False) -> dict[str, Any]:
    """Describe a checkpoint, an adapter or a merged model: family, tensors, dtypes, head, hashes, number of NaN.

    `headers`: do not read the weights. `verify`: only compare the files of a merged model with their recorded hashes.
    """
    if not verify:
        return inspect_checkpoint(str(path), headers=headers)
    if headers:
        raise RecipeError("--verify reads every file: leave --headers out")
    problems = verify_folder(Path(path))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise OutputError(f"{path} is not what was written:\n{lines}\nmerge again, or download it again")
    return {"path": str(path), "ok": True}
