"""The generator of damage: each function spoils a small sound world in one way, and has a name.

The world is the working directory: a base, three experts, tables of inputs and a merge of them. Most damage is done to
the expert `two`. An `Edit` gives other tensors for those of a file; a `Damage` is called with the patches of the test.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.berts import HEADS, merge_berts

QUERY = "encoder.layer.0.attention.self.query.weight"
ADAPTER = "two/adapter_model.safetensors"
EVIL = "../evil"  # what hostile code would make
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], Tensors]
Damage = Callable[[pytest.MonkeyPatch], object]
P = ParamSpec("P")


def damaging(act: Callable[P, object]) -> Callable[P, Damage]:
    """Make `name(...)` the damage that `act(...)` does."""

    def prepared(*args: P.args, **options: P.kwargs) -> Damage:
        return lambda patch: act(*args, **options)

    return prepared


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The sound world itself; the command does the damage."""


def both(*damages: Damage) -> Damage:
    """One after the other."""
    return lambda patch: [damage(patch) for damage in damages]


def merged_from(damage: Damage) -> Damage:
    """The damage was done before the merge, which is made again."""
    return both(damage, lambda patch: shutil.rmtree("merged"), lambda patch: merge_berts(Path.cwd(), Path("merged")))


# Tensors


@damaging
def tensors(edit: Edit, *names: str) -> None:
    """Edit the tensors of `two`, or of the folders or files named."""
    for name in names or ("two",):
        file = Path(name, "model.safetensors") if Path(name).is_dir() else Path(name)
        edited = {key: value.contiguous() for key, value in edit(load_file(file)).items()}
        save_file(edited, file, {"format": "pt"})


def each(part: str, edit: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Damage:
    """Replace every tensor with `part` in its name."""
    return tensors(lambda state: {key: edit(value) if part in key else value for key, value in state.items()}, *names)


def without(part: str, *names: str) -> Damage:
    """Leave out every tensor with `part` in its name."""
    return tensors(lambda state: {key: value for key, value in state.items() if part not in key}, *names)


def added(key: str, value: torch.Tensor, *names: str) -> Damage:
    return tensors(lambda state: state | {key: value}, *names)


def renamed(pattern: str, new: str, *names: str) -> Damage:
    return tensors(lambda state: {re.sub(pattern, new, key): value for key, value in state.items()}, *names)


def repeated(pattern: str, new: str) -> Damage:
    """Add a copy of every tensor whose name matches, under a new name."""
    return tensors(lambda state: state | {re.sub(pattern, new, key): value + 0 for key, value in state.items()})


def numbered() -> Damage:
    """Names that say nothing."""
    return tensors(lambda state: {f"x{number}": value for number, value in enumerate(state.values())})


def shuffled(name: str) -> Damage:
    """Shuffle the rows of every matrix: same shapes, same statistics, another model."""

    def mix(value: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        return value[torch.randperm(len(value), generator=generator)] if value.ndim == 2 else value

    return each("", mix, name)


def spoil(name: str, key: str, value: float) -> Damage:
    """One element of one tensor."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] = value
        return tensor

    return each(key, one, name)


def copied(source: str, target: str, part: str, prefix: str = "") -> Damage:
    """Put tensors of one model into another: those whose names start with `part`, under `prefix`."""

    def edit(state: Tensors) -> Tensors:
        theirs = load_file(f"{source}/model.safetensors")
        return state | {prefix + key: value for key, value in theirs.items() if key.startswith(part)}

    return tensors(edit, target)


def base_of_the_base() -> Damage:
    """The base is near, but not where the experts started: all have one way in common."""

    def move(state: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(3)
        for key, value in load_file("base/model.safetensors").items():
            way = 0.008 * torch.randn(value.shape, generator=generator)
            state[f"bert.{key}"] = value + way + 0.1 * (state[f"bert.{key}"] - value)
        return state

    return tensors(move, *HEADS)


def one_head() -> Damage:
    """The experts `two` and `three` with the same head."""
    return both(copied("two", "three", "classifier."), configured("three", id2label={"0": "two-0", "1": "two-1"}))


def position_ids(*, base: torch.Tensor, two: torch.Tensor) -> Damage:
    """An integer buffer in the base and in one expert."""
    buffer = "embeddings.position_ids"
    return both(added(buffer, base, "base"), added(f"bert.{buffer}", two))


# Formats


class Evil:
    """An object that makes a folder when it is unpickled as usual."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.path.realpath(EVIL),)


@damaging
def as_pickle() -> None:
    """Save the expert `two` as torch did before safetensors, with hostile code in it."""
    tensors = load_file("two/model.safetensors")
    Path("two/model.safetensors").unlink()
    torch.save({**tensors, "evil": Evil()}, "two/pytorch_model.bin")


@damaging
def as_adapter() -> None:
    """Put a LoRA adapter with the head of `two` in its place."""
    head = {key: value for key, value in load_file("two/model.safetensors").items() if key.startswith("classifier.")}
    shutil.rmtree("two")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"], "task_type": "SEQ_CLS"}
    write_file("two/adapter_config.json", json.dumps({**config, "modules_to_save": ["classifier"]}).encode())
    generator = torch.Generator().manual_seed(1)
    factors = {f"base_model.model.{key}": value for key, value in head.items()}
    for layer in (0, 1):
        name = f"base_model.model.bert.encoder.layer.{layer}.attention.self.query"
        factors[f"{name}.lora_A.weight"] = torch.randn(2, 32, generator=generator) / 8
        factors[f"{name}.lora_B.weight"] = torch.randn(32, 2, generator=generator) / 8
    save_file(factors, ADAPTER, {"format": "pt"})


def evil_adapter() -> Damage:
    """The weights of an adapter are a hostile pickle."""
    return both(as_adapter(), lose(ADAPTER), lambda patch: torch.save({"evil": Evil()}, "two/adapter_model.bin"))


@damaging
def batch_norm() -> None:
    """A module of one's own with BatchNorm, as base and experts, and the recipe that merges them."""
    for name in ("base", *HEADS):
        shutil.rmtree(name)
        Path(name).mkdir()
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        body: Tensors = {"body.weight": torch.eye(8) + 0.01 * torch.randn(8, 8, generator=generator)}
        body |= {f"body.bn.{part}": torch.ones(8) for part in ("running_mean", "running_var", "weight")}
        body |= {"body.bn.num_batches_tracked": torch.tensor(5)}
        save_file(body if name == "base" else body | {"fc.weight": torch.ones(2, 8)}, f"{name}/model.safetensors")
    experts = ", ".join(f"{name}: {{path: ./{name}, head: {{layers: [fc]}}}}" for name in HEADS)
    text = f"base: ./base\nfamily: generic\nencoder_prefix: body\nexperts: {{{experts}}}\n"
    write_file("recipe.yaml", text.encode())


# Files


def write_file(name: str, data: bytes) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(data)


write = damaging(write_file)


@damaging
def rewrite(name: str, edit: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    Path(name).write_bytes(edit(Path(name).read_bytes()))


def flip(name: str) -> Damage:
    """Change the last bit."""
    return rewrite(name, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def blank(name: str) -> Damage:
    """Zeros from the middle of a file on: it has its size, but was not written out."""
    return rewrite(name, lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def cut(name: str, share: float) -> Damage:
    return rewrite(name, lambda data: data[: int(len(data) * share)])


@damaging
def lose(name: str) -> None:
    Path(name).unlink()


def several_changes() -> Damage:
    """An output with a file more, one less, one that is shorter and one with a flipped bit."""
    files = write("merged/two/extra.txt", b"?"), write("merged/two/config.json", b"{}")
    return both(*files, lose("merged/README.md"), flip("merged/encoder.safetensors"))


@damaging
def configured(name: str = "two", /, **changes: Any) -> None:
    path = Path(name, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remote_model(name: str, **more: Any) -> Damage:
    """A model whose config asks for code beside it."""
    code = f"import os\nos.mkdir({EVIL!r})\n".encode()
    return both(configured(name, auto_map={"AutoModel": "odd.OddModel"}, **more), write(f"{name}/odd.py", code))


@damaging
def other_words() -> None:
    """A tokenizer of `two` with the words of the base in another order."""
    words = Path("base/vocab.txt").read_text().splitlines()
    Path("two/vocab.txt").write_text("\n".join([*words[:5], *reversed(words[5:])]) + "\n")


def rows(*lines: str, head: str = "text,label,split") -> Damage:
    """Another table of `two`."""
    return write("data/two.csv", "\n".join((head, *lines, "")).encode())


@damaging
def npz_bomb(name: str) -> None:
    """An archive that says of itself that it unpacks to more than is read."""
    with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(5):
            archive.writestr(f"x_{number}.npy", bytes(1 << 16))
    data = bytearray(Path(name).read_bytes())
    for entry in re.finditer(rb"PK\x01\x02", data):
        data[entry.start() + 24 : entry.start() + 28] = struct.pack("<I", 0xFFFFFFF0)
    Path(name).write_bytes(data)


# The machine


def little_room(patch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    patch.setattr(shutil, "disk_usage", lambda folder: usage)


def reads_fail(patch: pytest.MonkeyPatch) -> None:
    """Reads of the expert `two` fail as on a file server that has gone."""
    target = os.path.realpath("two/model.safetensors")
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int, *more: Any) -> int:
        if offset > 8 and os.path.realpath(f"/proc/self/fd/{fd}") == target:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(fd, buffers, offset, *more)

    patch.setattr(os, "preadv", broken)


def renames_fail(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Path, target: Path) -> Path:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    patch.setattr(Path, "rename", broken)


def old_and_new_times(patch: pytest.MonkeyPatch) -> None:
    """Clocks that jump: files from before 1971 and from the next century."""
    for number, path in enumerate(sorted(Path.cwd().rglob("*"))):
        os.utime(path, (1000, 1000) if number % 2 else (5e9, 5e9))
    patch.setattr(time, "time", lambda: 10.0)
