"""PEFT LoRA adapters as experts: two low-rank factors per layer, multiplied for a range of elements at a time.

W' = W + s B A with A [r, in], B [out, r] and s = alpha / r (Hu et al. 2022, arXiv 2106.09685), or
s = alpha / sqrt(r) when rank-stabilised (Kalajdzievski 2023, arXiv 2312.03732). Embeddings and Conv1D keep W
transposed. Options of `adapter_config.json` mean what they mean in peft 0.21.2.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from orthomerge.core.errors import CheckpointError
from orthomerge.files.checkpoint import Entry, Spec, is_float
from orthomerge.files.folders import contained
from orthomerge.files.lora_options import CONFIG, WAY_OUT, Scale, read_config
from orthomerge.files.raw_file import MemoryTensor, RawFile
from orthomerge.files.weights import read_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch


_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in the order of preference
_PREFIX = "base_model.model."

# Older versions of peft save these heads without naming them in `modules_to_save`.
_HEADS: Mapping[str, tuple[str, ...]] = {
    "SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score"), "QUESTION_ANS": ("qa_outputs",),
}  # fmt: skip
_FACTOR = re.compile(r"(?P<module>.+)\.(?:lora_(?P<side>[AB])\.weight|lora_embedding_(?P<table>[AB]))")
_EMBEDDING = re.compile(r".*embed[^.]*|(.*\.)?(wte|wpe|shared|lm_head)")


@dataclass(frozen=True)
class Factors:
    """A and B of one weight. `transposed`: the weight is stored as (B A)^T, as embeddings and Conv1D do."""

    a: Entry
    b: Entry
    scaling: float
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight that the product is added to."""
        (_, inward, *kernel), outward = self.a.spec.shape, self.b.spec.shape[0]
        return (inward, outward) if self.transposed else (outward, inward, *kernel)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float32 factors [rows, r] and [r, columns] of s B A in the layout of the weight."""
        rank = self.a.spec.shape[0]
        a = self.a.read(0, self.a.spec.numel).float().reshape(rank, -1)
        b = self.b.read(0, self.b.spec.numel).float().reshape(-1, rank)
        left, right = (a.T, b.T.contiguous()) if self.transposed else (b, a)
        return left.mul(self.scaling), right

    def delta(self, start: int, stop: int) -> torch.Tensor:
        """Compute elements [start, stop) of the flattened s B A in float32, and only the rows that contain them.

        The r outer products are added one by one: unlike in a matrix product, the bits of an element then depend
        neither on the range that is computed nor on the number of threads.
        """
        import torch

        columns = math.prod(self.shape[1:])
        first, last = start // columns, -(-stop // columns)
        left, right = self.pair()
        product = torch.zeros((last - first, columns))
        for column, row in zip(left[first:last].T, right, strict=True):
            product += torch.outer(column, row)
        return product.reshape(-1)[start - first * columns : stop - first * columns]


@dataclass(frozen=True)
class Adapter:
    """An adapter as a task vector, by names of the adapted model; products are added to tensors in `replaced`."""

    path: Path
    config: Mapping[str, Any]
    products: Mapping[str, Factors]
    replaced: Mapping[str, Entry]
    stored: Mapping[str, Entry] = field(default_factory=dict)  # all tensors of the file, by their names in it
    files: tuple[RawFile | MemoryTensor, ...] = ()  # with the config, which scales every product
    revision: str | None = None
    reference: str = ""
    in_memory: ClassVar[bool] = False

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Shape and stored dtype of every tensor that the adapter changes."""
        products = {name: Spec(factors.shape, factors.b.spec.dtype) for name, factors in self.products.items()}
        return {**products, **{name: entry.spec for name, entry in self.replaced.items()}}

    def entry(self, key: str) -> Entry:
        return self.replaced[key]

    def under(self, names: Mapping[str, str]) -> Adapter:
        """Return the adapter with other names, `names` from new to old; other tensors are left out."""
        products = {new: self.products[old] for new, old in names.items() if old in self.products}
        replaced = {new: self.replaced[old] for new, old in names.items() if old in self.replaced}
        return replace(self, products=products, replaced=replaced)

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor that the adapter changes; None for any other."""
        return self.specs[key].shape if key in self.specs else None

    def delta(self, key: str, start: int, stop: int, *, base: torch.Tensor) -> torch.Tensor:
        """Compute elements [start, stop) of a flattened delta, where `base` has these elements of the base."""
        factors, replaced = self.products.get(key), self.replaced.get(key)
        if replaced is None:
            return base.new_zeros(base.shape) if factors is None else factors.delta(start, stop)
        whole = replaced.read(start, stop).float() - base
        return whole if factors is None else whole.add_(factors.delta(start, stop))

    def factors(self, key: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the two factors of a matrix's delta; None if the adapter stores the tensor whole."""
        factors = self.products.get(key)
        if factors is None or key in self.replaced or len(factors.shape) != 2:
            return None
        return factors.pair()

    def origin(self, key: str) -> str:
        entry = self.products[key].b if key in self.products else self.replaced.get(key)
        return str(self.path if entry is None else entry.file.path)


def read_adapter(folder: Path) -> Adapter:
    """Open an adapter folder without reading its tensors; unknown options and tensors are refused."""
    config, document = read_config(folder)
    file = next((folder / name for name in _WEIGHTS if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} holds an adapter without {' or '.join(_WEIGHTS)}; fetch it again")
    checkpoint = read_weights(contained(file, folder))
    stored = {name: checkpoint.entry(name) for name in (*checkpoint, *checkpoint.aliases)}
    reader = _Reader(file, config, stored)
    factors = reader.factors()
    weights = next(iter(stored.values())).file
    return Adapter(folder, config, factors, reader.replaced(factors), stored, (document, weights))


class _Reader:
    """Sorts the tensors of a weights file into factors and whole tensors; others are refused."""

    def __init__(self, file: Path, config: Mapping[str, Any], stored: Mapping[str, Entry]) -> None:
        path = file.parent / CONFIG
        self._file = file
        self._rank = Scale(config, path, option="r", table="rank_pattern", whole=True)
        self._alpha = Scale(config, path, option="lora_alpha", table="alpha_pattern", whole=False)
        self._stabilised, self._transposed = config.get("use_rslora"), config.get("fan_in_fan_out")
        self._bias = config.get("bias") or "none"
        if self._bias not in ("none", "all", "lora_only"):
            raise CheckpointError(f"{path}: bias must be 'none', 'all' or 'lora_only', got {self._bias!r}")
        saved = config.get("modules_to_save") or []
        if not isinstance(saved, list) or not all(isinstance(name, str) and name for name in saved):
            raise CheckpointError(f"{path}: modules_to_save must be a list of names, got {saved!r}")
        self._saved = (*saved, *_HEADS.get(str(config.get("task_type")), ()))
        self._pairs: dict[tuple[str, bool], dict[str, tuple[str, Entry]]] = {}
        self._whole: list[tuple[str, Entry]] = []
        for key, entry in stored.items():
            self._add(key, entry)

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file}: {what}")

    def _add(self, key: str, entry: Entry) -> None:
        if not key.startswith(_PREFIX):
            raise self._fault(f"{key!r} must start with {_PREFIX!r}; save the adapter with peft again")
        match = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if (match or key.endswith((".weight", ".bias"))) and not is_float(entry.spec.dtype):
            raise self._fault(f"{key!r} must be floating point, got {entry.spec.dtype} (quantised?); {WAY_OUT}")
        if match is None:
            self._whole.append((key, entry))
            return
        sides = self._pairs.setdefault((match["module"], match["table"] is not None), {})
        sides[match["side"] or match["table"]] = (key, entry)

    def factors(self) -> dict[str, Factors]:
        """Return factors by the name of the weight that they adapt."""
        factors = {}
        for (module, table), sides in self._pairs.items():
            if ".base_layer." in f".{module}.":
                # peft 0.21.2 adds the product of `out_proj` twice, in training as in merging; others may not.
                layer = module.split(".base_layer")[0]
                raise self._fault(f"{layer!r} (nn.MultiheadAttention) is not supported; {WAY_OUT}")
            if len(sides) == 1:
                ((side, (key, _)),) = sides.items()
                other = "B" if side == "A" else "A"
                raise self._fault(f"{key!r} comes without its factor {other}; fetch the adapter again")
            if f"{module}.weight" in factors:
                raise self._fault(f"{module!r} is adapted both as an embedding and as a layer; save it again")
            factors[f"{module}.weight"] = self._factors(module, sides["A"], sides["B"], table=table)
        if not factors:
            raise self._fault("the file has no LoRA factors; save the adapter with peft again")
        return factors

    def _factors(self, module: str, a: tuple[str, Entry], b: tuple[str, Entry], *, table: bool) -> Factors:
        left, right = a[1].spec.shape, b[1].spec.shape
        ndim, shapes = len(left), f"{a[0]!r} is {left} and {b[0]!r} is {right}"
        if ndim != len(right) or not 2 <= ndim <= (2 if table else 5) or 0 in left + right:
            hint = "if the adapter was trained in shards (ZeRO-3, FSDP), gather them before saving"
            raise self._fault(f"{shapes}, which are no LoRA factors; {hint}")
        if left[0] != right[1] or any(extent != 1 for extent in right[2:]):
            hint = "grouped convolutions are not supported" if ndim > 2 else "save the adapter again"
            raise self._fault(f"ranks differ: {shapes}, but A must be [r, in] and B [out, r]; {hint}")
        rank, alpha = self._rank.of(module), self._alpha.of(module)
        if left[0] != rank:
            raise self._fault(
                f"the rank of {a[0]!r} must be {rank:g} by {CONFIG}, got {left[0]}; "
                "correct r or rank_pattern, on which the scale depends"
            )
        transposed = table or (ndim == 2 and bool(self._transposed))
        return Factors(a[1], b[1], alpha / (math.sqrt(rank) if self._stabilised else rank), transposed)

    def replaced(self, adapted: Mapping[str, Factors]) -> dict[str, Entry]:
        """Return whole tensors by name; the config must account for each."""
        whole: dict[str, tuple[str, Entry]] = {}
        for key, entry in self._whole:
            parts = key.removeprefix(_PREFIX).split(".")
            if "original_module" in parts:  # the base's own copy, kept beside a trained module and never used
                continue
            name = ".".join(part for part in parts if part not in ("base_layer", "modules_to_save"))
            if any(part.startswith("lora_") for part in parts) or not self._is_declared(name):
                raise self._fault(
                    f"{key!r} is neither a LoRA factor nor accounted for by {CONFIG}; "
                    "save the adapter with peft again; if the layer was trained whole, name it in modules_to_save"
                )
            if name in whole and not _are_equal(whole[name][1], entry):
                raise self._fault(
                    f"{whole[name][0]!r} and {key!r} must be equal, as copies of one tensor; save it again"
                )
            whole.setdefault(name, (key, entry))
            shape = adapted[name].shape if name in adapted else entry.spec.shape
            if shape != entry.spec.shape:
                raise self._fault(f"{key!r} must have the shape {shape} of its factors, got {entry.spec.shape}")
        return {name: entry for name, (_, entry) in whole.items()}

    def _is_declared(self, name: str) -> bool:
        module, _, last = name.rpartition(".")
        if last == "bias" and (self._bias == "all" or (self._bias == "lora_only" and (module, False) in self._pairs)):
            return True
        if last == "weight" and ((module, True) in self._pairs or _EMBEDDING.fullmatch(module)):
            return True  # peft's save_embedding_layers
        # peft's rule: a module is saved when its whole name ends in one of the names, even within a word.
        parts = (_PREFIX + name).split(".")
        return any(".".join(parts[:end]).endswith(self._saved) for end in range(1, len(parts)))


def _are_equal(one: Entry, other: Entry) -> bool:
    import torch

    if one.spec != other.spec:
        return False
    first, second = (entry.read(0, entry.spec.numel).view(torch.uint8) for entry in (one, other))
    return torch.equal(first, second)
