"""Files of torch.save, real and hostile, read without running anything in them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import types
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from orthomerge.core.errors import CheckpointError
from orthomerge.files import pickles, state_dicts, unpickler
from orthomerge.files.checkpoint import DTYPES, Checkpoint
from orthomerge.files.pickles import read_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(params=[False, True], ids=["zip", "legacy"])
def legacy(request: pytest.FixtureRequest) -> bool:
    """Whether files are written as torch before 1.6 wrote them."""
    return bool(request.param)


def save(value: object, path: Path, *, legacy: bool = False, protocol: int = 2) -> Path:
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    return path


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)


def check(checkpoint: Checkpoint, expected: Mapping[str, torch.Tensor]) -> None:
    """Names in order, dtypes, shapes and values must be those of `expected`."""
    assert list(checkpoint.entries) == [name for name in expected if name not in checkpoint.aliases]
    assert set(expected) == {*checkpoint.entries, *checkpoint.aliases}
    for name, tensor in expected.items():
        entry = checkpoint.entries[checkpoint.aliases.get(name, name)]
        value = entry.read(0, entry.spec.numel).reshape(entry.spec.shape)
        assert value.dtype == tensor.dtype, name
        assert value.shape == tensor.shape, name
        assert torch.equal(bits(value), bits(tensor)), name


def refused(path: Path, match: str | None) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_pickle(path)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> dict[str, torch.Tensor]:
    return {"a.weight": normal(4, 3, seed=1), "a.bias": normal(4, seed=2)}


class Store:
    """Stands for a storage in a pickle that is written by hand."""

    def __init__(self, kind: object = torch.FloatStorage, key: object = "0", numel: object = 4) -> None:
        self.pid: object = ("storage", kind, key, "cpu", numel)


class Call:
    """Pickles as a call of a global, whatever it is."""

    def __init__(self, function: Callable[..., object], *args: object, state: object = None) -> None:
        self.reduced = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Forger(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Store) else None


def dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    Forger(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def tensor(store: object = None, offset: object = 0, shape: object = (4,), strides: object = (1,)) -> Call:
    store = Store() if store is None else store
    return Call(torch._utils._rebuild_tensor_v2, store, offset, shape, strides, False, OrderedDict())


def forge(path: Path, data: bytes | object, *, extra: dict[str, bytes] | None = None, packed: bool = False) -> Path:
    """An archive like torch.save's, with any pickle and one storage of 16 bytes."""
    payload = data if isinstance(data, bytes) else dumps(data)
    members = {"archive/data.pkl": payload, "archive/data/0": np.arange(4, dtype="<f4").tobytes(), **(extra or {})}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def forge_stream(path: Path, *parts: object, tail: bytes = b"") -> Path:
    path.write_bytes(b"".join(dumps(part) for part in parts) + tail)
    return path


MAGIC, PROTOCOL, INFO = 0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.arange(5), persistent=False)
        self.register_buffer("absent", None)
        self.scale = nn.Parameter(normal(3, seed=5))
        self.act: Any = torch.nn.functional.gelu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2, bias=False)
        self.tied = self.head
        self.values = nn.ParameterList([nn.Parameter(normal(2))])
        self.missing: nn.Module | None
        self.register_module("missing", None)
        self.callback: Any = partial(torch.nn.functional.softmax, dim=1)
        self.path = Path("somewhere")
        self.array = np.float64(3.0)


class Odd(dict[str, Any]):
    """A mapping of a class that the reader does not know."""


class Slots:
    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = 1


class Sub(torch.Tensor):
    pass


def every_dtype() -> dict[str, torch.Tensor]:
    names = [name for _, name in DTYPES.values() if name != "complex64"]
    return {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names}


def parameters() -> dict[str, torch.Tensor]:
    marked = nn.Parameter(normal(2, 2), requires_grad=False)
    marked.note = "kept by _rebuild_parameter_with_state"  # type: ignore[attr-defined]
    return {"plain": nn.Parameter(normal(3)), "marked": marked}


STATES: dict[str, Callable[[], Mapping[str, torch.Tensor]]] = {
    "plain": weights,
    "ordered, with metadata": lambda: nn.Linear(3, 2).state_dict(),
    "every dtype": every_dtype,
    "parameters": parameters,
    "a subclass": lambda: {"w": normal(3).as_subclass(Sub)},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_state_dicts_come_back(
    tmp_path: Path, state: Callable[[], Mapping[str, torch.Tensor]], legacy: bool, protocol: int
) -> None:
    expected = state()
    checkpoint = read_pickle(save(expected, tmp_path / "m.pt", legacy=legacy, protocol=protocol))
    check(checkpoint, expected)
    assert checkpoint.aliases == {}


def test_views_strides_and_empties(tmp_path: Path, legacy: bool) -> None:
    whole = normal(6, 8)
    state = {
        "transposed": whole.T,
        "slice": whole[2:4],
        "columns": whole[:, 1:7:2],
        "one": whole[3:4, 2:3],
        "scalar": whole[1, 1],
        "expanded": torch.arange(5).expand(3, 5),
        "channels_last": normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 4),
    }
    checkpoint = read_pickle(save(state, tmp_path / "m.pt", legacy=legacy))
    check(checkpoint, state)
    strides = [checkpoint.entries[name].strides for name in ("transposed", "slice", "one")]
    assert (strides, checkpoint.aliases) == ([(1, 8), None, None], {})


def test_tied_weights_are_aliases(tmp_path: Path, legacy: bool) -> None:
    shared = normal(4, 4)
    state = {"embed": shared, "lm_head": shared, "same_bytes_other_shape": shared.T, "again": shared[:]}
    checkpoint = read_pickle(save(state, tmp_path / "m.pt", legacy=legacy))
    assert checkpoint.aliases == {"lm_head": "embed", "again": "embed"}
    check(checkpoint, state)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = save(weights(), tmp_path / "m.pt")
    code = "import sys; from pathlib import Path; from orthomerge.files.pickles import read_pickle; "
    code += f"print(len(read_pickle(Path({str(path)!r})).entries), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda w: {"state_dict": w, "epoch": 3},
        lambda w: {"model_state_dict": w, "optimizer_state_dict": {"a": w}},
        lambda w: {"module": w, "lr_schedulers": [1], "scaler": {"s": normal(1)}},
        lambda w: {"net": w, "rng_state": torch.zeros(3)},
        lambda w: {"whatever": w, "note": "text", 3: normal(2)},
        lambda w: {"model": w, "loss": torch.tensor(0.5)},
        lambda w: {"outer": {"model": w, "opt": {"m": normal(1)}}},
        lambda w: {"weights": w, "adam": {"state": {0: {"m": normal(1)}, "y": w}, "param_groups": []}},
        Odd,
        lambda w: defaultdict(list, w),
        lambda w: {**w, "a._extra_state": {"scale": normal(1)}},
        lambda w: {"state_dict": w, "hyper": [Counter("aab"), {1, 2}, frozenset("x"), b"b", bytearray(b"c")]},
        lambda w: {"state_dict": w, "np": [np.float32(1.5), np.arange(3), np.dtype("int8")]},
        lambda w: {"state_dict": w, "x": [torch.Size([1]), torch.device("cpu"), torch.float16, slice(2)]},
        lambda w: {"state_dict": w, "args": [types.SimpleNamespace(a=1), 1j, Slots(), (1, (2, 3)), 1 << 90]},
        lambda w: {"state_dict": w, (1, 2): "tuple key", None: 1, 2.5: 2},
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_wrapped_state_dicts(tmp_path: Path, wrap: Callable[[Any], Any], legacy: bool, protocol: int) -> None:
    checkpoint = read_pickle(save(wrap(weights()), tmp_path / "m.pt", legacy=legacy, protocol=protocol))
    check(checkpoint, weights())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"net": weights(), "ema": weights()}, r"several sets of weights \('net', 'ema'\).*file of its own"),
        ({"w": normal(2), "deep": weights()}, r"beside them.*\('deep'\); it is unclear"),
        (normal(2), "a single tensor with no tensors by name"),
        ([weights()], "a list with no tensors by name"),
        (Slots(), r"test_pickles\.Slots with no tensors by name"),
        (nn.ReLU(), r"holds torch.nn.modules.activation.ReLU with no tensors by name"),
        ({"optimizer": weights()}, "with no tensors by name"),
    ],
)
def test_no_guessing(tmp_path: Path, value: object, match: str) -> None:
    refused(save(value, tmp_path / "m.pt"), match)


def test_wrappers_and_modules_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested: Any = weights()
    for _ in range(9):
        nested = {"model": nested}
    refused(save(nested, tmp_path / "m.pt"), "more than 8 mappings; save them again")
    loop: dict[str, Any] = weights()
    loop["model"] = loop
    refused(save(loop, tmp_path / "m.pt"), "more than 8 mappings")
    net = nn.Sequential(nn.Linear(2, 2))
    net._modules["self"] = net
    refused(save(net, tmp_path / "m.pt"), r"contains itself, or too many \('self.self.*save its state dict")
    monkeypatch.setattr(state_dicts, "_MAX_MODULES", 5_000)
    module: nn.Module = nn.Linear(2, 2)
    for _ in range(40):
        module = nn.Sequential(module, module)
    refused(save(module, tmp_path / "m.pt"), "contains itself, or too many")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("wrapped", [False, True])
def test_whole_module(tmp_path: Path, legacy: bool, protocol: int, wrapped: bool) -> None:
    net = Net()
    path = save({"model": net, "epoch": 1} if wrapped else net, tmp_path / "m.pt", legacy=legacy, protocol=protocol)
    checkpoint = read_pickle(path)
    check(checkpoint, net.state_dict())
    assert checkpoint.aliases == {"tied.weight": "head.weight"}
    assert not any("passing" in name for name in checkpoint.entries)


def hollow(**children: object) -> Call:
    """A module with nothing but children."""
    return Call(nn.Module, state={"_parameters": {}, "_buffers": {}, "_modules": children})


def test_modules_that_cannot_be_read(tmp_path: Path) -> None:
    refused(forge(tmp_path / "m.pt", hollow(x=deque())), "sub-module 'x' is collections.deque, whose weights")
    unknown = hollow(x=Call(partial(nn.Linear), 3))
    refused(forge(tmp_path / "m.pt", unknown), "sub-module 'x' is an object of unknown class")
    module = Call(nn.Module, state={"_parameters": {3: tensor()}, "_modules": {}})
    refused(forge(tmp_path / "m.pt", module), "a parameter has a name that is not text")
    lazy = nn.Module()
    lazy.register_parameter("w", None)
    lazy._parameters["w"] = np.arange(3)  # type: ignore[assignment]
    refused(save(lazy, tmp_path / "m.pt"), r"tensor 'w' is stored as .*_reconstruct")


def odd_tensors() -> dict[str, tuple[torch.Tensor, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "complex": (torch.zeros(2, dtype=torch.complex64), "torch.ComplexFloatStorage"),
            "quantised": (torch.quantize_per_tensor(normal(3), 0.1, 0, torch.qint8), "_rebuild_qtensor"),
            "sparse": (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
            "nested": (torch.nested.nested_tensor([normal(2), normal(3)]), "_rebuild_nested_tensor"),
            "meta": (torch.empty(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
            "float8": (torch.zeros(2).to(torch.float8_e4m3fnuz), "torch.float8_e4m3fnuz"),
            "negated": (torch._neg_view(normal(2)), "a view that is negated"),
        }


@pytest.mark.parametrize("name", list(odd_tensors()))
def test_odd_tensors(tmp_path: Path, name: str, legacy: bool) -> None:
    value, how = odd_tensors()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = save({"w": value}, tmp_path / "m.pt", legacy=legacy)
        harmless = save({"state_dict": weights(), "optimizer": {"w": value}}, tmp_path / "n.pt", legacy=legacy)
    refused(path, rf"tensor 'w' is stored as .*{how}.*convert it .*save it again")
    check(read_pickle(harmless), weights())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (tensor(shape=(5,)), "'w' reaches to byte 20 of storage '0', which has 16; the file is damaged: fetch it"),
        (tensor(strides=(2,)), "'w' reaches to byte 28"),
        (tensor(shape=(-1,)), "must have whole numbers from 0 on as shape, strides and offset"),
        (tensor(offset=True), "must have whole numbers"),
        (tensor(shape=(1 << 20_000,), strides=(0,)), "must have whole numbers"),
        (tensor(shape=(2, 2)), "must have whole numbers"),
        (tensor(shape=(1,) * 65, strides=(1,) * 65), "must have whole numbers"),
        (tensor(shape=(1 << 40,), strides=(0,)), r"repeats 16 bytes to make \d+; save a contiguous copy"),
        (tensor(Store(key="7")), "lies in storage '7', which the file does not have; the file is damaged"),
        (tensor(Store(numel=5)), "storage '0', which should have 20 bytes but has 16; the file is damaged"),
        (tensor(Store(numel=-5)), "storage '0', which should have -20 bytes but has 16"),
        (tensor(3), "a tensor is rebuilt from something that is not a storage"),
        (tensor(Store(numel="4")), "a persistent id is not that of a storage"),
        (tensor(Store(kind=nn.Linear)), "'Linear' is not a known type of storage"),
        (Call(torch._utils._rebuild_tensor_v3, Store(), 0, (1,), (1,), False, {}, 3), "as a tensor without dtype"),
        (Call(torch._utils._rebuild_tensor_v2), "damaged, or was not written by torch.save .TypeError"),
        (Call(torch._tensor._rebuild_from_type_v2, nn.Linear, Sub, (1,), {}), "is rebuilt from something else"),
    ],
)
def test_damaged_tensors(tmp_path: Path, value: Call, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_pickle(forge(tmp_path / "m.pt", {"w": value}))
    assert str(tmp_path / "m.pt") in str(caught.value)


def test_forged_archive_is_otherwise_sound(tmp_path: Path) -> None:
    state = {"w": tensor(), "untyped": tensor(Store(torch.UntypedStorage, "0", 16), 1, [2, 2], [1, 2])}
    checkpoint = read_pickle(forge(tmp_path / "m.pt", state, extra={"archive/byteorder": b"little"}))
    raw = torch.arange(4.0).view(torch.uint8)
    check(checkpoint, {"w": torch.arange(4.0), "untyped": torch.as_strided(raw, (2, 2), (1, 2), 1)})


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("nest", [lambda e: e, lambda e: {**weights(), "x": e}, lambda e: {"optimizer": [e]}])
def test_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nest: Callable[[Any], Any], legacy: bool, protocol: int
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = save(nest(Evil(tmp_path / "pwned")), tmp_path / "m.pt", legacy=legacy, protocol=protocol)
    refused(path, r"asks to run posix.system; this is not how.*do not open it with torch")
    assert not (tmp_path / "pwned").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "pwned")))
    assert (tmp_path / "pwned").exists()  # so the test would notice


@pytest.mark.parametrize(
    "path",
    [
        *("os.system", "nt.system", "subprocess.Popen", "sys.exit", "builtins.eval", "builtins.exec", "shutil.rmtree"),
        *("__builtin__.eval", "builtins.__import__", "builtins.open", "importlib.import_module", "runpy.run_path"),
        *("pty.spawn", "socket.socket", "ctypes.CDLL", "pickle.loads", "_pickle.loads", "code.InteractiveConsole"),
        *("webbrowser.open", "multiprocessing.Process", "pathlib.Path.write_text", "io.open", "_io.FileIO"),
        *("torch.load", "torch.serialization.load", "torch.hub.load", "commands.getoutput", "timeit.timeit"),
    ],
)
def test_hostile_globals(tmp_path: Path, path: str) -> None:
    module, _, name = path.partition(".Path")
    module, name = (module, f"Path{name}") if name else tuple(path.rsplit(".", 1))
    match = rf"m.pt asks to run {path.replace('.', '[.]')}; this is not"
    refused(forge(tmp_path / "m.pt", f"c{module}\n{name}\n.".encode()), match)
    (tmp_path / "m.pt").write_bytes(f"c{module}\n{name}\n(tR.".encode())
    refused(tmp_path / "m.pt", match)


def test_globals_that_are_looked_up_nowhere(tmp_path: Path) -> None:
    """A module whose import would leave a mark is never imported, and a call on it never made."""
    (tmp_path / "trap_of_ours.py").write_text("raise SystemExit('imported')")
    trap = b"ctrap_of_ours\nTrap\n"
    calls = trap + b"(tR" + trap + b")\x81" + trap + b")}\x92"
    data = b"\x80\x04](" + calls + trap + b")\x81}b" + trap + b")\x81Na" + trap + b")\x81(K\x01K\x02u" + b"e."
    refused(forge(tmp_path / "m.pt", data), "a list with no tensors")
    assert "trap_of_ours" not in sys.modules


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"\x80\x02\x82\x01.", "uses the pickle opcode EXT1, which torch does not write"),
        (b"Pname\n.", "opcode PERSID"),
        (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
        (b"\x80\x02N", "damaged, or was not written by torch.save .ValueError"),
        (b"\x80\x02.", "damaged.*IndexError"),
        (b"\x80\x02K\x01\x85.", "a tuple with no tensors"),
        (b"\x80\x02K\x01)R.", "it calls something that is neither a class nor a function"),
        (b"\x80\x02cfoo\nbar\nK\x01R.", "the arguments of a call are not a tuple"),
        (b"\x80\x02K\x01}b.", "state is set on something that cannot have any"),
        (b"\x80\x02K\x01K\x02a.", "items are appended to something that is not a list"),
        (b"\x80\x02K\x01K\x02K\x03s.", "items are set on something that is not a mapping"),
        (b"\x80\x02}(K\x02u.", "ValueError"),
        (b"\x80\x04K\x01K\x02\x93.", "the name of a class is not a string"),
        (b"(ios\nsystem\n.", "opcode INST"),
        (b"(cos\nopen\no.", "asks to run os.open"),
        (b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "asks to run torch.os.system"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "a NoneType with no tensors"),  # 64 GiB for Python's own unpickler
        (b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.", "no tensors"),  # a crash for Python's own unpickler
        (b"\x80\x02" + b"}U\x01a" * 20_000 + b"}" + b"s" * 20_000 + b".", "RecursionError"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "ValueError"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "a NoneType with no tensors"),
        (b"I" + b"9" * 5_000 + b"\n.", "ValueError"),
        (b"\x80\x02X\x02\x00\x00\x00\xff\xff.", "UnicodeDecodeError"),
        (b"\x80\x02(K\x01t0](K\x021\x85K\x010.", "a tuple with no tensors"),
    ],
)
def test_broken_pickles(tmp_path: Path, data: bytes, match: str) -> None:
    refused(forge(tmp_path / "m.pt", data), match)
    (tmp_path / "m.pt").write_bytes(dumps(MAGIC) + dumps(PROTOCOL) + dumps(INFO) + data + dumps([]))
    refused(tmp_path / "m.pt", match if "ValueError" not in match else None)


def test_bombs_of_copies_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickler, "_MAX_STEPS", 100_000)
    many = b"\x80\x02ccollections\nOrderedDict\nq\x00](" + b"NN\x86" * 20_000 + b"eq\x01"
    for data in (many + b"h\x00h\x01\x85R" * 5_000, b"\x80\x02" + b"]" * 200_000):
        refused(forge(tmp_path / "m.pt", data + b"."), "more than 100,000 steps.*save the state dict alone")


def test_long_headers_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(unpickler, "MAX_BYTES", 1 << 20)
    note = {"note": b"x" * (1 << 20), **{name: tensor() for name in "ab"}}
    refused(forge(tmp_path / "m.pt", note), r"data.pkl of .*m.pt must have at most .* bytes, got .*; save the state")
    stream = forge_stream(tmp_path / "m.pt", MAGIC, PROTOCOL, INFO, ["x" * 600_000, "y" * 600_000])
    refused(stream, "steps or 1 MiB; weights need a fraction")
    long = dumps(MAGIC) + dumps(PROTOCOL) + dumps(INFO) + b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40)
    (tmp_path / "m.pt").write_bytes(long)
    refused(tmp_path / "m.pt", "a length in the header must be at most .* bytes, got 1099511627776")
    monkeypatch.setattr(pickles, "_MAX_DIRECTORY", 1_000)
    path = forge(tmp_path / "m.pt", {}, extra={f"archive/{i}": b"" for i in range(100)})
    refused(path, r"damaged, or was not written by torch.save")


@pytest.mark.parametrize(("at", "value"), [(0, 0), (6, 1), (8, 8), (26, 3), (30, 65)])
def test_local_header_must_agree(tmp_path: Path, at: int, value: int) -> None:
    path = forge(tmp_path / "m.pt", {"w": tensor()})
    data = bytearray(path.read_bytes())
    data[data.index(b"archive/data/0") - 30 + at] = value
    path.write_bytes(data)
    refused(path, "member archive/data/0 is not where the directory says")


def two_of_one_name(path: Path) -> None:
    forge(path, {"w": tensor()}, extra={"archive/data/1": b""})
    path.write_bytes(path.read_bytes().replace(b"archive/data/1", b"archive/data/0"))


def encrypted(path: Path) -> None:
    data = bytearray(forge(path, {"w": tensor()}).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)


def archive_with(name: str, data: bytes = b"") -> Callable[[Path], object]:
    """An archive of torch with one member more."""
    return lambda path: forge(path, {"w": tensor()}, extra={name: data})


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
OTHER_FILES: list[tuple[Callable[[Path], object] | bytes, str]] = [
    (b"", "m.pt is empty: fetch it again"),
    (LFS, "LFS pointer.*`git lfs pull`"),
    (b"\n <!DOCTYPE html><html>", "is a web page, not the weights"),
    (b"\x02\0\0\0\0\0\0\0{}", "is a safetensors file: give it the ending .safetensors"),
    (b"hello world", r"is not a file of torch.save \(it begins with b'hello wo'\); fetch the weights again"),
    (b"\x80", "is damaged"),
    (pickle.dumps({"a": 1}), "is a plain pickle, not a file of torch.save; save it again"),
    (b"PK\x03\x04 and no more", "is damaged, or was not written by torch.save .File is not a zip file"),
    (b"PK\x05\x06" + bytes(18), "with 0 files 'data.pkl'"),
    (archive_with("other/data.pkl"), r"zip archive with 2 files 'data.pkl'"),
    (archive_with("archive/constants.pkl"), r"TorchScript archive; save torch.jit.load"),
    (archive_with("archive/byteorder", b"big"), r"must have byte order b'little', got b'big'; load it"),
    (partial(forge, data={}, packed=True), r"members that are packed or encrypted \('archive/data.pkl'.*save it again"),
    (two_of_one_name, "two members of the same name; do not trust it"),
    (encrypted, "members that are packed or encrypted"),
]


@pytest.mark.parametrize(("content", "match"), OTHER_FILES)
def test_files_that_are_no_weights(tmp_path: Path, content: Callable[[Path], object] | bytes, match: str) -> None:
    path = tmp_path / "m.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content(path)
    refused(path, match)


def test_older_stream_by_hand(tmp_path: Path) -> None:
    path, state, tail = tmp_path / "m.pt", {"w": tensor()}, struct.pack("<q4f", 4, 0, 1, 2, 3)
    check(read_pickle(forge_stream(path, MAGIC, PROTOCOL, INFO, state, ["0"], tail=tail)), {"w": torch.arange(4.0)})
    view = Store()
    view.pid = ("storage", torch.FloatStorage, "0", "cpu", 4, ("1", 1, 2))  # of torch before 0.4
    for parts, match in [
        ((MAGIC, PROTOCOL, INFO, {"w": tensor(view)}, ["0"]), "a persistent id is not that of a storage"),
        ((MAGIC, 1000, INFO, state, ["0"]), "must have protocol 1001, got 1000; fetch it again"),
        ((MAGIC, PROTOCOL, {"little_endian": False}, state, ["0"]), "not written on a little-endian machine"),
        ((MAGIC, PROTOCOL, INFO, state, ["9"]), "the list of storages does not fit the tensors"),
        ((MAGIC, PROTOCOL, INFO, state, 3), "the list of storages does not fit the tensors"),
        ((MAGIC, PROTOCOL, INFO, state, []), "lies in storage '0', which the file does not have"),
    ]:
        refused(forge_stream(path, *parts, tail=tail), match)
    for bad in (tail[:-1], struct.pack("<q", -1), struct.pack("<q", 1 << 60)):
        cut = forge_stream(path, MAGIC, PROTOCOL, INFO, state, ["0"], tail=bad)
        refused(cut, r"was cut short: storage '0' at byte .*; fetch it again")


def test_cut_anywhere(tmp_path: Path, legacy: bool) -> None:
    whole = save(weights(), tmp_path / "m.pt", legacy=legacy).read_bytes()
    path = tmp_path / "cut.pt"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(path, r"cut.pt")
    path.write_bytes(whole)
    check(read_pickle(path), weights())
