"""The one writer of model folders; the manifest is written last and makes a folder a result.

OUT/encoder.safetensors        the only large file (or shards); names as in the stock classifier
OUT/tokenizer.json ...         tokenizer or image processor
OUT/TASK/head.safetensors      the head; with an aligner that adds a module, extra.safetensors beside it
OUT/TASK/config.json           only where a stock class computes what the head does: that class loads this folder,
                               through an index and links to the encoder and the tokenizer above it
OUT/README.md                  model card
OUT/orthomerge.json            manifest: inputs with hashes, how they were opened, method, the hash of every other file
OUT/orthomerge.local.json      where experts were on this machine; never pushed, not in the manifest
"""

from __future__ import annotations

import math
import os
import platform
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.sizes import parse_size
from orthomerge.core.version import VERSION
from orthomerge.files.checkpoint import DTYPES, Spec
from orthomerge.files.ownership import LOCAL, MANIFEST, names_in
from orthomerge.files.paths import RawFile
from orthomerge.files.publish import publish, write_bytes, write_json
from orthomerge.files.shards import write_index, write_shards
from orthomerge.models.card import model_card
from orthomerge.models.heads import Head, head_of
from orthomerge.models.manifest import EXTRA, FORMAT, HEAD, read_manifest
from orthomerge.models.processors import COMPANIONS
from orthomerge.models.record import local_document, record_of
from orthomerge.models.stock import classifier_config, head_names, main_dtype, named_tensors, why_not_stock
from orthomerge.models.tensors import ContentHash

if TYPE_CHECKING:
    import torch

    from orthomerge.models.model_data import ModelData


README = "README.md"
_STEM = "encoder"
_INDEX = "model.safetensors.index.json"

Progress = Callable[[int], None]


def write_model(
    model: ModelData,
    out: Path,
    *,
    force: bool = False,
    max_shard_size: str | int = "5GB",
    inputs: Iterable[Path] = (),
    progress: Progress = lambda count: None,
) -> dict[str, Any]:
    """Write a model folder, whole or not at all, and return its manifest. `inputs`: what `out` must not overlap."""
    most = parse_size(max_shard_size)
    specs = model.weights.specs
    paths = [*inputs, *_inputs(model)]
    for task in model.heads:
        _check_name(task, model)
    need = sum(spec.nbytes for spec in specs.values())
    with publish(out, force=force, need=need, inputs=paths) as folder:
        return _fill(model, folder, out=out, most=most, progress=progress)


def _fill(model: ModelData, folder: Path, *, out: Path, most: int, progress: Progress) -> dict[str, Any]:
    family = model.family
    specs = {family.prefix + key: spec for key, spec in model.weights.specs.items()}
    processor = model.processor.write(folder)
    with closing(_stream(model, most)) as blocks:
        written = write_shards(folder, specs, blocks, most=most, progress=progress, stem=_STEM)
    if len(written) == 1:
        model.encoder.remember(written[0].digest)
    shards = {shard.name: {"size": shard.size, "hash": shard.digest} for shard in written}
    places = {name: shard.name for shard in written for name in shard.tensors}
    heads = {task: _write_task(model, task, folder, places, specs, processor) for task in model.tasks}
    if model.origin.experts is not None:
        for checkpoint in model.origin.experts.checkpoints().values():
            for file in checkpoint.files:
                file.check_unchanged()
    encoder = {
        "class": family.encoder_class,
        "prefix": family.prefix,
        "dtype": main_dtype(specs.values()),
        "config": dict(model.config),
        "content": model.encoder.content,
        "files": list(shards),
        "processor": processor,
    }
    facts = model.origin.facts
    manifest = {
        "format": FORMAT,
        "orthomerge": VERSION,
        "seed": 0,
        "vector": None,
        **facts,
        "family": family.name,
        "encoder": encoder,
        "heads": heads,
        **record_of(model),
        "notes": list(facts.get("notes", ())),
        "versions": versions(),
    }
    local = local_document(model, out)
    if local:
        write_json(folder / LOCAL, local)
    return _finish(folder, plain(manifest), shards)


def _stream(model: ModelData, most: int) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The encoder's blocks; what is written as several files is hashed as the one that it could be."""
    specs, prefix = model.weights.specs, model.family.prefix
    sharded = sum(spec.nbytes for spec in specs.values()) > most and not model.encoder.knows_digest
    content = ContentHash(specs, prefix) if sharded else None
    for key, block in model.weights.blocks():
        if content is not None:
            content.update(block)
        yield prefix + key, block
    if content is not None:
        model.encoder.remember(content.digest())


def _check_name(task: str, model: ModelData) -> None:
    """A task's folder must not have the name of a file that an output may have."""
    taken = {name.casefold() for name in (*COMPANIONS, *model.processor.files, README, MANIFEST, LOCAL)}
    name = task.casefold()
    if name in taken or (name.startswith(_STEM) and name.endswith(".safetensors")):
        raise RecipeError(f"{task!r} cannot name a task, because the output has a file of that name; rename the task")


def _write_task(
    model: ModelData,
    task: str,
    folder: Path,
    places: Mapping[str, str],
    specs: Mapping[str, Spec],
    processor: Iterable[str],
) -> dict[str, Any]:
    """One task's folder; what the manifest says of its head."""
    place, classifier, family = folder / task, model.heads[task], model.family
    head = head_of(classifier)
    place.mkdir()
    tensors = named_tensors(family, head)
    write_tensors(place, HEAD, tensors)
    extra = None
    if not isinstance(classifier, Head):
        extra = classifier.kind
        write_tensors(place, EXTRA, classifier.extra_tensors())
    stock = why_not_stock(family, classifier) is None and bool(model.config)
    if stock:
        config = classifier_config(model.config, family, head.labels, DTYPES[main_dtype(specs.values())][1])
        for name in (*dict.fromkeys(places.values()), *processor):
            _link(folder / name, place / name)
        index = {**places, **dict.fromkeys(tensors, HEAD)}
        total = sum(spec.nbytes for spec in specs.values()) + sum(tensor.nbytes for tensor in tensors.values())
        write_index(place / _INDEX, index, total)
        write_json(place / "config.json", config)
    else:
        write_json(place / "labels.json", list(head.labels))
    return {
        "labels": list(head.labels),
        "kind": head.kind,
        "pooling": head.pooling or family.default_pooling,
        "max_length": head.max_length,
        "activation": head.activation,
        "normalise": head.normalise,
        "names": head_names(family, head),
        "extra": extra,
        "class": family.architecture if stock else None,
    }


def _link(target: Path, link: Path) -> None:
    """The same file in a task's folder: a relative link, else a hard link, else a copy."""
    try:
        link.symlink_to(Path("..") / target.name)
    except OSError:
        try:
            os.link(target, link)
        except OSError:
            shutil.copyfile(target, link)


def write_tensors(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """A small file of tensors, read back and compared."""
    import torch

    names = {getattr(torch, dtype): short for short, (_, dtype) in DTYPES.items()}
    plain_tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    specs = {key: Spec(tuple(tensor.shape), names[tensor.dtype]) for key, tensor in plain_tensors.items()}
    written = write_shards(folder, specs, plain_tensors.items(), most=2**62, stem=Path(name).stem)
    if written[0].name != name:
        raise AssertionError(f"{written[0].name} was written for {name}")


def versions() -> dict[str, str]:
    """Of whatever can change a number."""
    return {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}


def plain(value: Any) -> Any:
    """Fields of a dataclass as JSON, which has no infinity: that becomes a word."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _inputs(model: ModelData) -> list[Path]:
    experts = model.origin.experts
    opened = [] if experts is None else experts.checkpoints().values()
    places = [place for place in map(Path, model.origin.places.values()) if place.exists()]
    folder = [model.processor.folder] if model.processor.folder is not None else []
    return [*(source.path for source in opened if not source.in_memory), *places, *folder]


def _finish(folder: Path, manifest: dict[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The last two files: card, and manifest with the table of all others; files in `rows` are not hashed again."""
    write_bytes(folder / README, model_card(manifest).encode())
    manifest = {**manifest, "files": file_table(folder, rows)}
    write_json(folder / MANIFEST, manifest)
    return manifest


def rewrite_card(folder: Path, evaluation: Mapping[str, Any] | None) -> None:
    """Write card and manifest anew with what was measured since, in one step: the output verifies at any time.

    All other files, also those that the manifest does not list, stay the very same (hard links, if the file system has
    them), and links stay links.
    """
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "evaluation"}
    if evaluation is not None:
        manifest["evaluation"] = plain(evaluation)
    names = list(names_in(folder))
    with publish(folder, force=True, unlisted_but_ours=names) as partial:
        for name in sorted(names):
            if name.endswith("/"):
                (partial / name).mkdir(parents=True)
            elif name not in (README, MANIFEST):
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                _keep(folder / name, partial / name)
        card = partial / README
        write_bytes(card, model_card(manifest).encode())
        row = {README: {"size": card.stat().st_size, "hash": RawFile(card).digest()}}
        write_json(partial / MANIFEST, {**manifest, "files": {**manifest["files"], **row}})


def _keep(path: Path, target: Path) -> None:
    """The same file or the same link at another place."""
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, target, follow_symlinks=False)


def file_table(folder: Path, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Size and hash of every file; those of a link are of what it leads to, which is a file of the same folder."""
    table: dict[str, Mapping[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        name = path.relative_to(folder).as_posix()
        if name == LOCAL:
            continue
        if path.is_symlink():
            target = (path.parent / path.readlink()).resolve().relative_to(folder.resolve()).as_posix()
            table[name] = {**(rows.get(target) or table.get(target) or _row(path)), "link": target}
        else:
            table[name] = rows.get(name) or _row(path)
    return table


def _row(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "hash": RawFile(path).digest()}
