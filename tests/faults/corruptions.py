"""The generator of damage: each function spoils a small sound world in one way, and has a name.

A world is a folder with a base, three experts, tables of inputs and a merge of them. Most damage is done to the expert
`two`; `as_pickle` and `as_adapter` first give it another format.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthomerge.runs.models import write as write_recipe
from orthomerge.runs.recipe import Recipe

QUERY = "encoder.layer.0.attention.self.query.weight"
EXPERTS = ("two", "three", "five")
Tensors = dict[str, torch.Tensor]
Damage = Callable[["World"], object]
P = ParamSpec("P")


def damaging(act: Callable[Concatenate[World, P], object]) -> Callable[P, Damage]:
    """Make `name(...)` the damage that `act(world, ...)` does."""

    def prepared(*args: P.args, **options: P.kwargs) -> Damage:
        return lambda world: act(world, *args, **options)

    return prepared


@dataclass
class World:
    """Everything a command can be given, in one folder; `patch` is for faults of the machine."""

    folder: Path
    patch: pytest.MonkeyPatch
    experts: list[str] = field(default_factory=lambda: list(EXPERTS))
    words: list[str] = field(default_factory=list)  # the command, where it is not that of the row
    data: str = ""  # the inputs of `two`, where they are not its table

    def __post_init__(self) -> None:
        self.evil = self.folder.parent / "evil"  # what hostile code would make
        self.out = self.folder / "results" / "out"

    def weights(self, name: str) -> Path:
        return self.folder / name / "model.safetensors"

    def table(self, name: str) -> Path:
        return self.folder / "data" / f"{name}.csv"

    def change(self, name: str, edit: Callable[[Tensors], object]) -> None:
        tensors = load_file(self.weights(name))
        edit(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, self.weights(name), {"format": "pt"})

    def configure(self, /, name: str = "two", **changes: Any) -> None:
        path = self.folder / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Formats


def as_pickle(world: World) -> None:
    """Save the expert `two` as torch did before safetensors, with hostile code in it."""
    world.patch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    tensors = load_file(world.weights("two"))
    world.weights("two").unlink()
    torch.save({**tensors, "evil": Evil(world.evil)}, world.folder / "two" / "pytorch_model.bin")


class Evil:
    """An object that makes a folder when it is unpickled as usual."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def as_adapter(world: World) -> Path:
    """Put a LoRA adapter with the head of `two` in its place; gives the path of its weights."""
    head = {key: value for key, value in load_file(world.weights("two")).items() if key.startswith("classifier.")}
    folder = world.folder / "two"
    shutil.rmtree(folder)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"], "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": ["classifier"]}))
    generator = torch.Generator().manual_seed(1)
    tensors = {f"base_model.model.{key}": value for key, value in head.items()}
    for layer in (0, 1):
        name = f"base_model.model.bert.encoder.layer.{layer}.attention.self.query"
        tensors[f"{name}.lora_A.weight"] = torch.randn(2, 32, generator=generator) / 8
        tensors[f"{name}.lora_B.weight"] = torch.randn(32, 2, generator=generator) / 8
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder / "adapter_model.safetensors"


def evil_adapter(world: World) -> None:
    """An adapter whose weights are a hostile pickle."""
    as_adapter(world).unlink()
    torch.save({"evil": Evil(world.evil)}, world.folder / "two" / "adapter_model.bin")


@damaging
def factors(world: World, /, edit: Callable[[Tensors], object]) -> None:
    path = as_adapter(world)
    tensors = load_file(path)
    edit(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)


FACTOR = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_"


# Bytes


@damaging
def both(world: World, /, *damages: Damage) -> None:
    """One after the other."""
    for each in damages:
        each(world)


@damaging
def rewrite(world: World, /, name: str, edit: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path = world.folder / name
    path.write_bytes(edit(path.read_bytes()))


def write(name: str, data: bytes) -> Damage:
    """Put bytes into the place of a file."""
    return rewrite(name, lambda _: data)


def cut(name: str, share: float) -> Damage:
    return rewrite(name, lambda data: data[: int(len(data) * share)])


def flip(name: str) -> Damage:
    """Change the last bit."""
    return rewrite(name, lambda data: data[:-1] + bytes([data[-1] ^ 1]))


def blank(name: str) -> Damage:
    """Zeros from the middle of a file on: it has its size, but was not written out."""
    return rewrite(name, lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


# Models


@damaging
def spoil(world: World, /, name: str, key: str, value: float) -> None:
    """One element of one tensor."""
    world.change(name, lambda tensors: tensors[key].view(-1)[7].fill_(value))


@damaging
def tensors(world: World, /, edit: Callable[[Tensors], object], *names: str) -> None:
    """Tensors of `two`, or of those named."""
    for name in names or ("two",):
        world.change(name, edit)


@damaging
def merged_from(world: World, /, damage: Damage) -> None:
    """The damage was done before the merge, which is made again."""
    damage(world)
    shutil.rmtree(world.folder / "merged")
    experts = {name: str(world.folder / name) for name in world.experts}
    recipe = Recipe(experts, base=str(world.folder / "base"), method="task_arithmetic", parameters={"scale": 0.5})
    write_recipe(recipe, out=world.folder / "merged")


configured = damaging(World.configure)


@damaging
def shuffled(world: World, /, name: str) -> None:
    """Shuffle the rows of every matrix: same shapes, same statistics, another model."""

    def mix(state: Tensors) -> None:
        for key, value in state.items():
            if value.ndim == 2 and not key.startswith("classifier."):
                state[key] = value[torch.randperm(len(value), generator=torch.Generator().manual_seed(7))]

    world.change(name, mix)


def base_of_the_base(world: World) -> None:
    """The base is near, but not where the experts started: all have one way in common."""
    base = load_file(world.weights("base"))
    generator = torch.Generator().manual_seed(3)
    way = {key: 0.008 * torch.randn(value.shape, generator=generator) for key, value in base.items()}

    def move(state: Tensors) -> None:
        for key, value in base.items():
            state[f"bert.{key}"] = value + way[key] + 0.1 * (state[f"bert.{key}"] - value)

    for name in world.experts:
        world.change(name, move)


def without_training(world: World) -> None:
    """The expert `two` with the encoder of the base."""
    base = load_file(world.weights("base"))
    world.change("two", lambda state: state.update({f"bert.{key}": value for key, value in base.items()}))


def twin(world: World) -> None:
    """The expert `three` with the encoder of `two`."""
    other = {key: v for key, v in load_file(world.weights("two")).items() if not key.startswith("classifier.")}
    world.change("three", lambda state: state.update(other))


def fewer_layers(state: Tensors) -> None:
    for key in [key for key in state if "layer.1." in key]:
        del state[key]


def more_layers(state: Tensors) -> None:
    for key in [key for key in state if "layer.1." in key]:
        state[key.replace("layer.1.", "layer.2.")] = state[key] + 0


def wider(state: Tensors) -> None:
    for key, value in state.items():
        state[key] = torch.cat((value, value), -1) if key.endswith("output.dense.weight") else value


def more_words(state: Tensors) -> None:
    key = "bert.embeddings.word_embeddings.weight"
    state[key] = torch.cat((state[key], torch.zeros(3, 32)))


def other_words(world: World) -> None:
    words = (world.folder / "base" / "vocab.txt").read_text().splitlines()
    (world.folder / "two" / "vocab.txt").write_text("\n".join([*words[:5], *reversed(words[5:])]) + "\n")


def in_dtype(dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda state: state.update({key: value.to(dtype) for key, value in state.items()})


def quantised(state: Tensors) -> None:
    state[f"bert.{QUERY}"] = (state[f"bert.{QUERY}"] * 1000).round().to(torch.int8)


def packed_query(state: Tensors) -> None:
    """A weight under the name and in the dtype that quantisers give it."""
    state[f"bert.{QUERY}".replace("weight", "qweight")] = state.pop(f"bert.{QUERY}").to(torch.int32)


def prefixed(prefix: str) -> Callable[[Tensors], object]:
    def edit(state: Tensors) -> None:
        for key in list(state):
            state[prefix + key] = state.pop(key)

    return edit


def numbered(state: Tensors) -> None:
    """Names that say nothing."""
    for number, key in enumerate(list(state)):
        state[f"x{number}"] = state.pop(key)


@damaging
def head(world: World, /, *names: str, **parts: torch.Tensor | None) -> None:
    """Other parts of the head of `two`, or of those named; None takes a part away."""

    def edit(state: Tensors) -> None:
        for part, value in parts.items():
            state.pop(f"classifier.{part}")
            if value is not None:
                state[f"classifier.{part}"] = value

    for name in names or ("two",):
        world.change(name, edit)


def one_head(world: World) -> None:
    """The experts `two` and `three` with the same head."""
    head = {key: value for key, value in load_file(world.weights("two")).items() if key.startswith("classifier.")}
    world.change("three", lambda state: state.update(head))
    world.configure("three", id2label={"0": "two-0", "1": "two-1"})


@damaging
def position_ids(world: World, /, *, base: torch.Tensor, two: torch.Tensor) -> None:
    """An integer buffer in the base and in one expert."""
    world.change("base", lambda state: state.update({"embeddings.position_ids": base}))
    world.change("two", lambda state: state.update({"bert.embeddings.position_ids": two}))


def without_poolers(world: World) -> None:
    """NaN in what only the base has."""
    for name in world.experts:
        world.change(name, lambda state: [state.pop(key) for key in list(state) if "pooler" in key])
    spoil("base", "pooler.dense.weight", float("nan"))(world)


def batch_norm(world: World) -> None:
    """A module of one's own with BatchNorm, as base and experts."""
    for name in ("base", *world.experts):
        shutil.rmtree(world.folder / name)
        (world.folder / name).mkdir()
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        body: Tensors = {"body.weight": torch.eye(8) + 0.01 * torch.randn(8, 8, generator=generator)}
        body |= {"body.bn.running_mean": torch.ones(8), "body.bn.running_var": torch.ones(8)}
        body |= {"body.bn.weight": torch.ones(8), "body.bn.num_batches_tracked": torch.tensor(5)}
        body |= {} if name == "base" else {"fc.weight": torch.ones(2, 8)}
        save_file(body, world.weights(name))
    experts = "\n".join(f"  {name}: {{path: {world.folder / name}, head: {{layers: [fc]}}}}" for name in world.experts)
    text = f"base: {world.folder / 'base'}\nfamily: generic\nencoder_prefix: body\nexperts:\n{experts}\n"
    recipe(text, "--out {out} --quiet")(world)


def overflowing(world: World) -> None:
    for name in ("base", *world.experts):
        key = QUERY if name == "base" else f"bert.{QUERY}"
        world.change(name, lambda state, key=key: state[key].mul_(1e6))  # type: ignore[misc]


# Commands


@damaging
def command(world: World, /, words: str, damage: Damage = lambda world: None) -> None:
    """Another command than that of the row; {folder} and {out} stand for those of the world."""
    damage(world)
    world.words = shlex.split(words.format(folder=world.folder, out=world.out))


@damaging
def recipe(world: World, /, text: str, words: str = "") -> None:
    """A merge by a recipe, from the root of the file system."""
    (world.folder / "recipe.yaml").write_text(text)
    world.patch.chdir("/")
    command(f"merge {{folder}}/recipe.yaml {words}")(world)


@damaging
def lose(world: World, /, name: str) -> None:
    (world.folder / name).unlink()


def several_changes(world: World) -> None:
    """An output with a file more, one less, one that is shorter and one with a flipped bit."""
    (world.folder / "merged" / "two" / "extra.txt").write_text("?")
    (world.folder / "merged" / "two" / "config.json").write_text("{}")
    lose("merged/README.md")(world)
    flip("merged/encoder.safetensors")(world)


# Data


@damaging
def rows(world: World, /, *lines: str, name: str = "two", head: str = "text,label,split") -> None:
    world.table(name).write_text("\n".join((head, *lines)) + "\n")


@damaging
def other_data(world: World, /, name: str, data: bytes) -> None:
    """A file of another format as the inputs of `two`."""
    path = world.folder / "data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    world.data = str(path.parents[1] if path.suffix == ".png" else path)


def npz_bomb(world: World) -> None:
    """An archive that says of itself that it unpacks to more than is read."""
    path = world.folder / "data" / "two.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(5):
            archive.writestr(f"x_{number}.npy", bytes(1 << 16))
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        data[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)
        at = data.find(b"PK\x01\x02", at + 1)
    path.write_bytes(data)
    world.data = str(path)


# The machine


def little_room(world: World) -> None:
    usage = shutil.disk_usage(world.folder)._replace(free=1000)
    world.patch.setattr(shutil, "disk_usage", lambda folder: usage)


@damaging
def reads_fail(world: World, /, number: int) -> None:
    """Reads of the expert `two` fail as on a file server that has gone."""
    target = os.path.realpath(world.weights("two"))
    real = os.preadv

    def broken(fd: int, buffers: Any, offset: int, *more: Any) -> int:
        if offset > 8 and os.path.realpath(f"/proc/self/fd/{fd}") == target:
            raise OSError(number, os.strerror(number))
        return real(fd, buffers, offset, *more)

    world.patch.setattr(os, "preadv", broken)


@damaging
def renames_fail(world: World, /, number: int) -> None:
    def broken(self: Path, target: Path) -> Path:
        raise OSError(number, os.strerror(number))

    world.patch.setattr(Path, "rename", broken)


def old_and_new_times(world: World) -> None:
    """Clocks that jump: files from before 1971 and from the next century."""
    for number, path in enumerate(sorted(world.folder.rglob("*"))):
        os.utime(path, (1000, 1000) if number % 2 else (5e9, 5e9))
    import time

    world.patch.setattr(time, "time", lambda: 10.0)


@damaging
def spelled(world: World, /, name: str) -> None:
    """The expert `two` and the output under an unusual name."""
    (world.folder / "two").rename(world.folder / name)
    world.out = world.folder / "results" / name
    words = ["merge", f"two={world.folder / name}", "--base", str(world.folder / "base")]
    world.words = [*words, "--method", "average", "--out", str(world.out), "--quiet"]


@damaging
def remote_model(world: World, /, name: str, **more: Any) -> None:
    world.configure(name, auto_map={"AutoModel": "odd.OddModel"}, **more)
    (world.folder / name / "odd.py").write_text(f"import os\nos.mkdir({str(world.evil)!r})\n")
