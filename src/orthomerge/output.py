"""The output folder: encoder, heads, model card, and last of all the manifest that makes it a result.

OUT/encoder/          stock transformers checkpoint, with tokenizer or image processor
OUT/heads/TASK/       head.safetensors, labels.json; extra.safetensors where the classifier is more than a head
OUT/README.md         model card
OUT/orthomerge.json   manifest: inputs with hashes, recipe, versions, seed, and the hash of every other file
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.card import model_card
from orthomerge.checkpoints.checkpoint import DTYPES, Checkpoint, is_float
from orthomerge.checkpoints.files import RawFile
from orthomerge.checkpoints.hashing import algorithm_of
from orthomerge.checkpoints.publish import MANIFEST, publish, write_bytes, write_json
from orthomerge.checkpoints.shards import write_shards
from orthomerge.classifiers import write_classifier
from orthomerge.errors import CheckpointError
from orthomerge.licences import licence_of
from orthomerge.manifest import FORMAT, contained, read_manifest
from orthomerge.models.config import encoder_config
from orthomerge.recipe import parse_size
from orthomerge.version import VERSION

if TYPE_CHECKING:
    import torch

    from orthomerge.checkpoints.lora import Adapter
    from orthomerge.heads import Head
    from orthomerge.planning import Job

__all__ = [
    "COMPANIONS",
    "README",
    "companions",
    "copy_files",
    "finish_output",
    "link_files",
    "manifest_of",
    "plain",
    "rewrite_card",
    "versions",
    "write_output",
]

# Files beside the weights that the encoder is of no use without.
COMPANIONS = (
    "added_tokens.json", "bpe.codes", "feature_extractor_config.json", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "sentencepiece.bpe.model", "special_tokens_map.json", "spiece.model", "spm.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
README = "README.md"
_MOST_COMPANION = 64 << 20


def write_output(
    job: Job,
    heads: dict[str, Head],
    blocks: Iterable[tuple[str, torch.Tensor]],
    *,
    out: Path,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Write everything and return the manifest."""
    paths = [source.path for source in job.sources.values()]
    most = parse_size(job.recipe.max_shard_size)
    beside = companions(*paths)  # before the merge, which may take long: they may be refused
    with publish(out, force=force, need=job.bytes_to_write, inputs=paths) as folder:
        encoder = folder / "encoder"
        encoder.mkdir()
        shards = write_shards(encoder, job.specs, blocks, most=most, progress=progress)
        for task, head in heads.items():
            write_classifier(folder / "heads" / task, head)
        _write_encoder_files(job, encoder, beside)
        for source in job.sources.values():
            for file in source.files:
                file.check_unchanged()
        known = {f"encoder/{shard.name}": {"size": shard.size, "hash": shard.digest} for shard in shards}
        return finish_output(folder, manifest_of(job, heads), known)


def link_files(source: Path, folder: Path, names: Iterable[str]) -> None:
    """Files of one folder in another too, the very same where the file system has hard links, else copied."""
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        path = contained(source / name, source)
        try:
            os.link(path, target)
        except OSError:
            shutil.copyfile(path, target)


def copy_files(source: Path, folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy files of one output into another, byte for byte; each copy must have the size and hash of its row."""
    for name, facts in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not (source / name).is_file():
            raise CheckpointError(f"{source / name} is missing; fetch the folder again, or merge again")
        shutil.copyfile(contained(source / name, source), target)
        copy = RawFile(target, algorithm=algorithm_of(facts["hash"]))
        if (copy.size, copy.digest()) != (facts["size"], facts["hash"]):
            raise CheckpointError(
                f"{source / name} has changed since it was written; fetch the folder again, or merge again"
            )


def finish_output(folder: Path, manifest: dict[str, Any], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The last two files: card and manifest with the table of all others; `known` rows are not hashed again."""
    write_bytes(folder / README, model_card(manifest).encode())
    manifest = {**manifest, "files": _file_table(folder, known)}
    write_json(folder / MANIFEST, manifest)
    return manifest


def rewrite_card(folder: Path, evaluation: Mapping[str, Any] | None) -> None:
    """Write card and manifest anew with what was measured since, in one step: the output verifies at any time.

    All other files stay the very same (hard links, where the file system has them).
    """
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "evaluation"}
    if evaluation is not None:
        manifest["evaluation"] = plain(evaluation)
    with publish(folder, force=True) as partial:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [path.relative_to(folder).as_posix() for path in paths]
        link_files(folder, partial, [name for name in names if name not in (README, MANIFEST)])
        card = partial / README
        write_bytes(card, model_card(manifest).encode())
        row = {README: {"size": card.stat().st_size, "hash": RawFile(card).digest()}}
        write_json(partial / MANIFEST, {**manifest, "files": {**manifest["files"], **row}})


def companions(*folders: Path | None, within: Path | None = None) -> list[Path]:
    """Tokenizer and processor files of the first folder that has any.

    They are copied into the output, so a link must not bring along what lies outside of the folder, or of `within`.
    """
    for folder in folders:
        if folder is None or not folder.is_dir():
            continue
        paths = [folder / name for name in COMPANIONS]
        found = [_companion(path, within or folder) for path in paths if path.is_file() or path.is_symlink()]
        if found:
            return found
    return []


def _companion(path: Path, folder: Path) -> Path:
    contained(path, folder)
    if not path.is_file():
        raise CheckpointError(f"{path} is a link to nothing; fetch the file again, or remove the link")
    size = path.stat().st_size
    if size > _MOST_COMPANION:
        raise CheckpointError(
            f"{path} is {size} bytes long; more than {_MOST_COMPANION} is not believable for a file of a tokenizer or "
            "processor: fetch it again, or remove it"
        )
    return path


def _write_encoder_files(job: Job, encoder: Path, beside: Iterable[Path]) -> None:
    """Config last among the encoder's files: without it the folder is no model to anybody."""
    sources = list(job.sources.values())
    for path in beside:
        shutil.copyfile(path, encoder / path.name)
    config = next((source.config for source in sources if isinstance(source, Checkpoint) and source.config), None)
    if config is not None and job.family.encoder_class:
        widths = [spec.dtype for spec in job.specs.values() if is_float(spec.dtype)]
        dtype = DTYPES[max(sorted(set(widths)), key=widths.count)][1]
        write_json(encoder / "config.json", encoder_config(config, job.family, dtype))


def manifest_of(job: Job, heads: dict[str, Head]) -> dict[str, Any]:
    """What an output says of how it was made; the table of its files comes last."""
    recipe, family = job.recipe, job.family
    method = {"name": recipe.method, "parameters": plain(vars(job.method))}
    return {
        "format": FORMAT,
        "orthomerge": VERSION,
        "method": method,
        "seed": recipe.seed,
        "vector": recipe.vector,
        "family": family.name,
        "pooling": job.pooling,
        "encoder": {"prefix": family.prefix, "class": family.encoder_class, "dtype": recipe.dtype},
        "inputs": {
            "base": _input(job.base, recipe.base or "the first expert"),
            "experts": {task: _input(expert.source, expert.given.path) for task, expert in job.experts.items()},
        },
        "tensors": {
            "merged": len(job.merged),
            "copied": sorted(job.copied),
            "left_out": {
                "base": job.base_split.left_out,
                **{task: expert.split.left_out for task, expert in job.experts.items()},
            },
        },
        "heads": {
            task: {
                "labels": list(head.labels),
                "hidden": head.hidden is not None,
                "names": expert.split.head if (expert := job.experts.get(task)) else {},
            }
            for task, head in heads.items()
        },
        "notes": list(job.notes),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of whatever can change a number."""
    return {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}


def _input(source: Checkpoint | Adapter, reference: str) -> dict[str, Any]:
    """What identifies an input without telling where on this machine it lay."""
    revision = getattr(source, "revision", None)
    name = reference if revision else Path(reference).name
    files = [{"name": file.path.name, "size": file.size, "hash": file.digest()} for file in source.files]
    licence = licence_of(source.path, reference=reference, revision=revision)
    return {"name": name, "revision": revision, "license": licence, "files": files}


def _file_table(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Size and hash of every file, those of the shards as they were verified."""
    table: dict[str, Mapping[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        name = path.relative_to(folder).as_posix()
        table[name] = known.get(name) or {"size": path.stat().st_size, "hash": RawFile(path).digest()}
    return table


def plain(value: Any) -> Any:
    """Fields of a dataclass as JSON, which has no infinity: that becomes a word."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
