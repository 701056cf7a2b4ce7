"""Options of `adapter_config.json`: those that are applied, and those without effect; all others are refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import CheckpointError
from orthomerge.files.documents import parse_json
from orthomerge.files.folders import contained
from orthomerge.files.raw_file import RawFile

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


CONFIG = "adapter_config.json"
_MAX_CONFIG = 1 << 20

WAY_OUT = "merge it into the full model with peft (merge_and_unload) and give that, or train a plain LoRA adapter"

# Others could change the model in another way than W + s B A, as DoRA, bias adapters or changed layers do.
_ALLOWED = frozenset(
    # applied
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "bias"}
    | {"modules_to_save", "task_type", "init_lora_weights"}
    # choose layers, describe training, or matter only before its first step
    | {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"}
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "runtime_config"}
    | {"loftq_config", "corda_config", "eva_config", "lora_ga_config", "ensure_weight_tying"}
    # without effect of their own
    | {"megatron_core", "qalora_group_size", "merge_weights"}
)
# Initialisations that leave the base as it is; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA subtract the factors from it.
_ALLOWED_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Names in patterns are untrusted, and a regular expression can take exponential time: only names and ends of names.
_NAME = re.compile(r"\^?([\w.-]|\\\.)+")
_MAX_PATTERNS = 4096


def read_config(folder: Path) -> tuple[dict[str, Any], RawFile]:
    """Read and check the options of an adapter folder; return them and their opened file."""
    path = folder / CONFIG
    document = RawFile(contained(path, folder))
    config = parse_json(document.whole(_MAX_CONFIG), str(path))
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type must be 'LORA', got {kind!r}; {WAY_OUT}")
    for option, value in config.items():
        if value and option not in _ALLOWED:
            raise CheckpointError(
                f"{path}: adapter option {option}={value!r:.80} is not known to be harmless; {WAY_OUT}"
            )
    for option in ("use_rslora", "fan_in_fan_out"):
        if not isinstance(config.get(option, False), bool | None):
            raise CheckpointError(f"{path}: {option} must be true or false, got {config[option]!r:.80}")
    start = config.get("init_lora_weights")
    if (start.lower() if isinstance(start, str) else start) not in _ALLOWED_STARTS:
        raise CheckpointError(
            f"{path}: init_lora_weights={start!r} changes the base before training, so the adapter does not fit the "
            f"base; save it again with path_initial_model_for_weight_conversion, or {WAY_OUT}"
        )
    return config, document


class Scale:
    """Rank or alpha per module: the value of the first pattern that matches its name, else a default."""

    def __init__(self, config: Mapping[str, Any], path: Path, *, option: str, table: str, whole: bool) -> None:
        def number(value: Any, name: str) -> float:
            valid = type(value) is int or (type(value) is float and not whole)
            if not valid or not abs(value) < 2**63 or (whole and value < 1):
                what = "a positive whole number" if whole else "a finite number"
                raise CheckpointError(f"{path}: {name} must be {what}, got {value!r:.80}; fetch the file again")
            return float(value)

        patterns = config.get(table) or {}
        if not isinstance(patterns, dict):
            raise CheckpointError(f"{path}: {table} must map names to numbers, got {patterns!r:.80}; {WAY_OUT}")
        if len(patterns) > _MAX_PATTERNS:
            raise CheckpointError(f"{path}: {table} has {len(patterns)} names, more than {_MAX_PATTERNS}; {WAY_OUT}")
        if unclear := [text for text in patterns if not _NAME.fullmatch(text)]:
            raise CheckpointError(
                f"{path}: {unclear[0]!r:.80} in {table} must be the name of a module, or its end; {WAY_OUT}"
            )
        self._default = number(config.get(option, 8), option)
        # peft's rule: the pattern must match from the start of the name, or from any dot, to its end.
        self._patterns = [
            (re.compile(rf"(.*\.)?({text})$"), number(value, f"{table}[{text!r}]")) for text, value in patterns.items()
        ]

    def of(self, module: str) -> float:
        return next((value for pattern, value in self._patterns if pattern.match(module)), self._default)
