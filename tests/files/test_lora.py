"""Adapters: every delta against peft's own merge, in whole and in pieces, and every refusal."""

from __future__ import annotations

import copy
import json
import math
import warnings
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from orthomerge.core.errors import CheckpointError, IncompatibleError
from orthomerge.files.lora import Adapter, read_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PREFIX = "base_model.model."
SIZES: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 20}


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**SIZES, num_hidden_layers=2, vocab_size=31, max_position_embeddings=7, num_labels=3)
    return BertForSequenceClassification(config)


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SIZES, num_hidden_layers=1, image_size=8, patch_size=4, num_labels=5))


class Small(nn.Module):
    """One layer of each kind, none of them square."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.table = nn.Embedding(29, 6)
        self.wide = Conv1D(10, 6)  # weight [6, 10]
        self.conv1 = nn.Conv1d(3, 4, 3)
        self.conv2 = nn.Conv2d(3, 5, (3, 2))
        self.point = nn.Conv2d(3, 5, 1)
        self.conv3 = nn.Conv3d(2, 3, 2)
        self.inner = nn.ModuleDict({"first": nn.Linear(6, 7), "second": nn.Linear(6, 9)})
        self.head = nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def adapt(model: nn.Module, folder: Path, *, bin_file: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """Save an adapter with random factors, heads and biases; return peft's merge minus the base."""
    from peft import LoraConfig, get_peft_model

    base = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save = {name: options.pop(name) for name in ("save_embedding_layers",) if name in options}
        tuned = get_peft_model(model, LoraConfig(**options))
        generator = torch.Generator().manual_seed(1)
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(noise.to(parameter.dtype), alpha=0.3)
        tuned.save_pretrained(str(folder), safe_serialization=not bin_file, **save)
        merged = tuned.merge_and_unload().state_dict()
    assert set(merged) == set(base)
    return {name: merged[name].float() - base[name].float() for name in base if base[name].is_floating_point()}


def check(adapter: Adapter, base: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Our delta of every tensor equals peft's, and comes out bit for bit the same in runs of odd length."""
    source = adapter.under({f"x.{name}": name for name in expected})
    moved = 0
    for name, wanted in expected.items():
        flat = base[name].float().reshape(-1)
        whole = source.delta(f"x.{name}", 0, flat.numel(), base=flat)
        assert whole.dtype == torch.float32
        torch.testing.assert_close(whole.reshape(wanted.shape), wanted, atol=1e-5, rtol=1e-5)
        assert source.shape(f"x.{name}") in (None, tuple(wanted.shape))
        assert (source.shape(f"x.{name}") is None) <= (not wanted.any())
        moved += bool(wanted.any())
        for length in (1, 7, 17, 61):
            runs = [
                source.delta(f"x.{name}", start, min(start + length, flat.numel()), base=flat[start : start + length])
                for start in range(0, flat.numel(), length)
            ]
            assert torch.equal(torch.cat(runs), whole)
    assert moved == len(adapter.specs)
    assert set(adapter.specs) <= set(expected)


PAIR: dict[str, Any] = {"m.lora_A.weight": [[1.0]], "m.lora_B.weight": [[1.0]]}


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_adapter(folder)


def write(folder: Path, tensors: dict[str, Any], **options: Any) -> None:
    config = {"peft_type": "LORA", "lora_alpha": 1, **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {PREFIX + name: torch.as_tensor(value) for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


# fmt: off
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (bert, {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "r": 3, "lora_alpha": 5}),
    "bert, all linear": (bert, {"task_type": "SEQ_CLS", "target_modules": "all-linear", "lora_dropout": 0.1}),
    "vit": (vit, {"target_modules": ["query", "fc1", "q_proj"], "modules_to_save": ["classifier"], "r": 2}),
    "vit, patches": (vit, {"target_modules": ["projection"], "r": 2}),
    "rslora": (bert, {"target_modules": ["query"], "r": 3, "use_rslora": True}),
    "biases of adapted layers": (bert, {"target_modules": ["query"], "bias": "lora_only", "r": 2}),
    "all biases, and a head": (bert, {"task_type": "SEQ_CLS", "target_modules": ["query"], "bias": "all"}),
    "embedding": (Small, {"target_modules": ["table"], "r": 3, "lora_alpha": 2}),
    "embedding saved too": (bert, {"target_modules": ["word_embeddings", "key"], "save_embedding_layers": True}),
    "untouched embedding saved": (bert, {"target_modules": ["key"], "save_embedding_layers": True}),
    "conv1d of transformers": (Small, {"target_modules": ["wide"], "fan_in_fan_out": True, "r": 4}),
    "convolutions": (Small, {"target_modules": ["conv1", "conv2", "conv3", "point"], "r": 3, "fan_in_fan_out": True}),
    "gaussian": (Small, {"target_modules": ["first"], "init_lora_weights": "Gaussian", "r": 2}),
    "patterns": (bert, {
        "target_modules": ["query", "key", "value", "dense"], "r": 4, "lora_alpha": 6,
        "rank_pattern": {"query": 2, r"layer\.1\.attention\.self\.key": 3, "^dense": 7, r"bert\.pooler\.dense": 5},
        "alpha_pattern": {r"0\.attention\.self\.query": 1.5, "ery": 99, r"output\.dense": 11},
    }),
    "rank-stabilised patterns": (Small, {
        "target_modules": ["first", "second"], "use_rslora": True, "rank_pattern": {"first": 2},
        "alpha_pattern": {"second": 3},
    }),
}
# fmt: on


@pytest.mark.parametrize("case", CASES)
def test_deltas_are_those_of_peft(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    model = make()
    base = copy.deepcopy(dict(model.state_dict()))
    expected = adapt(model, tmp_path, **dict(options))
    adapter = read_adapter(tmp_path)
    untouched = {"bert.embeddings.word_embeddings.weight"} if case == "untouched embedding saved" else set()
    assert untouched <= set(adapter.replaced)
    pruned = {name: entry for name, entry in adapter.replaced.items() if name not in untouched}
    # a head or bias that peft lists but that did not move is still counted, so all of them were moved
    check(Adapter(tmp_path, adapter.config, adapter.products, pruned), base, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_multiplied_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    adapt(Small(), tmp_path, target_modules=["first", "table"], r=3, lora_alpha=4)
    rewrite(tmp_path, lambda tensors: {key: tensor.to(dtype) for key, tensor in tensors.items()})
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    a, b = (tensors[f"{PREFIX}inner.first.lora_{side}.weight"].double() for side in "AB")
    factors = read_adapter(tmp_path).products["inner.first.weight"]
    delta = factors.delta(0, 42).reshape(7, 6)
    assert delta.dtype == torch.float32
    torch.testing.assert_close(delta, (4 / 3 * b @ a).float(), atol=1e-6, rtol=1e-6)


def test_by_hand(tmp_path: Path) -> None:
    write(tmp_path, {"m.lora_A.weight": [[1.0, 2.0, 3.0]], "m.lora_B.weight": [[1.0], [10.0]]}, r=1, lora_alpha=2)
    factors = read_adapter(tmp_path).products["m.weight"]
    assert (factors.shape, factors.scaling) == ((2, 3), 2.0)
    assert factors.delta(0, 6).tolist() == [2, 4, 6, 20, 40, 60]
    assert factors.delta(2, 4).tolist() == [6, 20]
    assert factors.delta(3, 3).tolist() == factors.delta(4, 4).tolist() == factors.delta(0, 0).tolist() == []


def test_a_long_product_has_the_same_bits_in_any_run_and_with_any_threads(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(8, 771, generator=generator), torch.randn(397, 8, generator=generator)
    table_a, table_b = torch.randn(8, 3001, generator=generator), torch.randn(65, 8, generator=generator)
    tensors = {"m.lora_A.weight": a, "m.lora_B.weight": b, "t.lora_embedding_A": table_a, "t.lora_embedding_B": table_b}
    write(tmp_path, tensors, r=8, lora_alpha=8)
    adapter = read_adapter(tmp_path)
    for name, wanted in {"m.weight": b @ a, "t.weight": (table_b @ table_a).T}.items():
        factors = adapter.products[name]
        count = prod(factors.shape)
        whole = factors.delta(0, count)
        torch.testing.assert_close(whole.reshape(factors.shape), wanted, atol=1e-5, rtol=1e-5)
        for length in (4099, 1 << 15, 100_003):
            runs = [factors.delta(start, min(start + length, count)) for start in range(0, count, length)]
            assert torch.equal(torch.cat(runs), whole)
        threads = torch.get_num_threads()
        try:
            for number in (1, 2):
                torch.set_num_threads(number)
                assert torch.equal(factors.delta(0, count), whole)
        finally:
            torch.set_num_threads(threads)


def test_a_base_of_another_shape(tmp_path: Path) -> None:
    from orthomerge.merging.vectors import InMemory, TaskVector

    write(tmp_path, {"m.lora_A.weight": torch.ones(1, 3), "m.lora_B.weight": torch.ones(2, 1)}, r=1)
    with pytest.raises(IncompatibleError, match=r"'m.weight' is \(3, 3\) in the base but \(2, 3\)"):
        TaskVector(InMemory({"m.weight": torch.zeros(3, 3)}), ((1.0, read_adapter(tmp_path)),))


def test_pickled_weights_are_read_and_safetensors_win(tmp_path: Path) -> None:
    model = bert()
    base = copy.deepcopy(dict(model.state_dict()))
    expected = adapt(model, tmp_path, bin_file=True, task_type="SEQ_CLS", target_modules=["query", "word_embeddings"])
    assert not (tmp_path / "adapter_model.safetensors").exists()
    check(read_adapter(tmp_path), base, expected)
    write(tmp_path, PAIR, r=1)
    assert list(read_adapter(tmp_path).specs) == ["m.weight"]


def test_names_without_the_wrappers_of_peft(tmp_path: Path) -> None:
    heads = {"classifier.modules_to_save.weight": [[7.0]], "classifier.original_module.weight": [[8.0]]}
    write(tmp_path, {**PAIR, **heads, "m.base_layer.bias": [9.0]}, r=1, task_type="SEQ_CLS", bias="lora_only")
    adapter = read_adapter(tmp_path)
    assert set(adapter.specs) == {"m.weight", "classifier.weight", "m.bias"}
    assert [adapter.replaced[name].read(0, 1).tolist() for name in ("classifier.weight", "m.bias")] == [[7], [9]]


@pytest.mark.parametrize(
    ("whole", "options"),
    [
        (("score.weight", "pre_classifier.weight"), {"task_type": "SEQ_CLS", "modules_to_save": None}),
        (("qa_outputs.weight",), {"task_type": "QUESTION_ANS"}),  # heads of older adapters
        (("norm.num_batches_tracked",), {"modules_to_save": ["norm"]}),
    ],
)
def test_tensors_that_are_stored_whole(tmp_path: Path, whole: tuple[str, ...], options: dict[str, Any]) -> None:
    write(tmp_path, {**PAIR, **{name: torch.tensor(3 if "num" in name else 1.0) for name in whole}}, r=1, **options)
    assert set(read_adapter(tmp_path).replaced) == set(whole)


def test_specs_files_and_where_deltas_come_from(tmp_path: Path) -> None:
    tensors = {**PAIR, "score.weight": torch.zeros(2, 3, dtype=torch.float16)}
    write(tmp_path, tensors, r=1, task_type="SEQ_CLS")
    adapter = read_adapter(tmp_path)
    assert {name: (spec.shape, spec.dtype) for name, spec in adapter.specs.items()} == {
        "m.weight": ((1, 1), "F32"),
        "score.weight": ((2, 3), "F16"),
    }
    assert set(adapter.stored) == {PREFIX + name for name in tensors}
    assert [file.path.name for file in adapter.files] == ["adapter_config.json", "adapter_model.safetensors"]
    source = adapter.under({"x": "m.weight", "y": "score.weight", "z": "elsewhere"})
    assert (set(source.specs), source.files, source.shape("z")) == ({"x", "y"}, adapter.files, None)
    assert source.delta("z", 0, 2, base=torch.ones(2)).tolist() == [0, 0]
    assert source.origin("x") == source.origin("y") == str(tmp_path / "adapter_model.safetensors")
    assert source.origin("z") == str(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config.json changed while it was read"):
        adapter.files[0].check_unchanged()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "LOHA"}, r"peft_type must be 'LORA', got 'LOHA'; merge it into the full model"),
        ({"use_dora": True}, r"adapter option use_dora=True is not known to be harmless; merge it .*merge_and_unload"),
        ({"lora_bias": True}, "lora_bias=True is not known to be harmless; .* train a plain LoRA adapter"),
        ({"layer_replication": [[0, 1]]}, r"layer_replication=\[\[0, 1\]\] is not known"),
        ({"velora_config": {"scale": 1}}, r"option velora_config=\{'scale': 1\} is not known to be harmless"),
        ({"new_thing": "x" * 200}, r"option new_thing='x{79} is not known to be harmless"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base .*save it again"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights='OLoRA' changes the base"),
        ({"r": 10**400}, "r must be a positive whole number, got 1000"),
        ({"r": 0}, "r must be a positive whole number, got 0"),
        ({"r": True}, "r must be a positive whole number, got True"),
        ({"lora_alpha": "2"}, "lora_alpha must be a finite number, got '2'"),
        ({"lora_alpha": math.nan}, "lora_alpha must be a finite number, got nan"),
        ({"rank_pattern": {"m": -1}}, r"rank_pattern\['m'\] must be a positive whole number, got -1"),
        ({"rank_pattern": [1]}, r"rank_pattern must map names to numbers, got \[1\]"),
        ({"alpha_pattern": {"m": math.inf}}, r"alpha_pattern\['m'\] must be a finite number, got inf"),
        ({"alpha_pattern": {"(": 1}}, r"'\(' in alpha_pattern must be the name of a module, or its end; merge"),
        ({"rank_pattern": {"a?a?": 2}}, r"'a\?a\?' in rank_pattern must be the name of a module, or its end"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false, got 'yes'"),
        ({"fan_in_fan_out": 2}, "fan_in_fan_out must be true or false, got 2"),
        ({"bias": "some"}, "bias must be 'none', 'all' or 'lora_only', got 'some'"),
        ({"modules_to_save": "classifier"}, "modules_to_save must be a list of names, got 'classifier'"),
        ({"r": 2}, "rank of 'base_model.model.m.lora_A.weight' must be 2 by adapter_config.json, got 1"),
        ({"rank_pattern": {"m": 3}}, "must be 3 by adapter_config.json, got 1; correct r or rank_pattern"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, PAIR, **{"r": 1, **options})
    refused(tmp_path, message)


def test_options_without_effect_are_let_in(tmp_path: Path) -> None:
    nothing = {"use_dora": False, "new_flag": False, "new_list": [], "new_text": "", "new_table": {}, "new": None}
    harmless = {"qalora_group_size": 16, "megatron_core": "megatron.core", "eva_config": {"rho": 2.0}}
    write(tmp_path, PAIR, r=1, **nothing, **harmless)
    assert list(read_adapter(tmp_path).specs) == ["m.weight"]


# fmt: off
TENSORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "the file has no LoRA factors"),
    ({"m.lora_A.weight": [[1.0]]}, {}, "'base_model.model.m.lora_A.weight' comes without its factor B; fetch"),
    ({"t.lora_embedding_B": [[1.0]]}, {}, "'base_model.model.t.lora_embedding_B' comes without its factor A"),
    ({**PAIR, "m.lora_B.bias": [1.0]}, {}, "'base_model.model.m.lora_B.bias' is neither a LoRA factor nor"),
    ({**PAIR, "m.lora_magnitude_vector": [1.0]}, {}, "'base_model.model.m.lora_magnitude_vector' is neither"),
    ({**PAIR, "n.weight": [[1.0]]}, {}, "'base_model.model.n.weight' is neither .*name it in modules_to_save"),
    ({**PAIR, "n.bias": [1.0]}, {"bias": "lora_only"}, "'base_model.model.n.bias' is neither"),
    ({**PAIR, "m.lora_embedding_A": [[1.0]], "m.lora_embedding_B": [[1.0]]}, {}, "both as an embedding and as a layer"),
    ({"m.lora_A.weight": [[1.0], [2.0]], "m.lora_B.weight": [[1.0]]}, {},
     r"ranks differ: .*\(2, 1\) .*save the adapter"),
    ({"m.lora_A.weight": torch.ones(4, 2, 3, 3), "m.lora_B.weight": torch.ones(6, 2, 1, 1)}, {"r": 4},
     "ranks differ: .*grouped convolutions are not supported"),
    ({"m.lora_A.weight": torch.ones(0), "m.lora_B.weight": [[1.0]]}, {}, "no LoRA factors; .*gather them before"),
    ({"m.lora_A.weight": torch.ones(1, 2, 3), "m.lora_B.weight": [[1.0]]}, {}, "which are no LoRA factors"),
    ({"m.lora_A.weight": [[1]], "m.lora_B.weight": [[1.0]]}, {}, "must be floating point, got I64 \\(quantised"),
    ({"t.lora_embedding_A": [[1]], "t.lora_embedding_B": [[1.0]]}, {}, "must be floating point, got I64"),
    ({**PAIR, "head.weight": [[1]]}, {"modules_to_save": ["head"]}, "'base_model.model.head.weight' must be floating"),
    ({**PAIR, "head.bias": [1.0], "head.modules_to_save.bias": [2.0]}, {"modules_to_save": ["head"]},
     "'base_model.model.head.modules_to_save.bias' must be equal, as copies of one"),
    ({**PAIR, "head.bias": [1.0], "head.modules_to_save.bias": [2.0, 3.0]}, {"modules_to_save": ["head"]},
     "must be equal, as copies of one tensor"),
    ({"t.lora_embedding_A": [[1.0]], "t.lora_embedding_B": [[1.0]], "t.base_layer.weight": [[1.0, 2.0]]}, {},
     r"'base_model.model.t.base_layer.weight' must have the shape \(1, 1\) of its factors, got \(1, 2\)"),
    ({**PAIR, "m.base_layer.out_proj.lora_A.weight": [[1.0]], "m.base_layer.out_proj.lora_B.weight": [[1.0]]}, {},
     r"'m' \(nn.MultiheadAttention\) is not supported; merge it into the full model"),
]
# fmt: on


@pytest.mark.parametrize(("tensors", "options", "message"), TENSORS)
def test_refused_tensors(tensors: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, tensors, **{"r": 1, **options})
    refused(tmp_path, message)


def test_keys_without_the_prefix_of_peft_no_weights_and_a_config_that_is_too_long(tmp_path: Path) -> None:
    write(tmp_path, PAIR, r=1)
    rewrite(tmp_path, lambda tensors: {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()})
    refused(tmp_path, r"'m.lora_A.weight' must start with 'base_model.model.'; save the adapter")
    (tmp_path / "adapter_model.safetensors").unlink()
    refused(tmp_path, r"without adapter_model.safetensors or adapter_model.bin; fetch")
    (tmp_path / "adapter_config.json").write_text('{"r": "' + "x" * (1 << 20) + '"}')
    refused(tmp_path, "must have at most 1048576 bytes, got")


def test_adapters_that_peft_makes_and_we_refuse(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(4, 2)

    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned = get_peft_model(Attention(), LoraConfig(target_modules=["attn"], r=2))
        tuned.save_pretrained(str(tmp_path / "attention"))
        adapt(Small(), tmp_path / "dora", target_modules=["first"], use_dora=True)
        adapt(Small(), tmp_path / "pissa", target_modules=["first"], init_lora_weights="pissa", r=2)
    refused(tmp_path / "attention", "nn.MultiheadAttention")
    refused(tmp_path / "dora", "use_dora=True is not known to be harmless")
    refused(tmp_path / "pissa", "init_lora_weights='pissa' changes the base")
