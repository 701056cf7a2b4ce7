"""Every bad input that we could think of: the right exit code, a message that names the place, and nothing left behind.

Exit codes as documented in `orthomerge.cli.app`: 2 recipe or arguments, 3 checkpoint, 4 inputs do not fit together,
5 output, 6 NaN or overflow.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthomerge.core.errors import CheckpointError
from orthomerge.models.load import quiet
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

if TYPE_CHECKING:
    from tests.faults.conftest import Ended, Models

QUERY = "encoder.layer.0.attention.self.query.weight"
Refused = Callable[..., str]
Run = Callable[[list[str]], "Ended"]
Tensors = dict[str, torch.Tensor]


def test_what_is_sound_is_merged(models: Models, run: Run) -> None:
    ended = run(models.command())
    assert (ended.code, ended.err, models.left()) == (0, "", ["out"])
    assert "heads: two (2), three (3), five (5)" in ended.out
    assert run(["verify", str(models.out)]).code == 0


# Models that do not fit together


def _build(folder: Path, kind: str, **sizes: Any) -> None:
    with quiet():
        import transformers

        torch.manual_seed(99)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        name = f"{kind}Model" if folder.name == "base" else f"{kind}ForSequenceClassification"
        shutil.rmtree(folder)
        getattr(transformers, name)(config).save_pretrained(folder)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 40,
}


def test_the_wrong_base(models: Models, refused: Refused) -> None:
    _build(models.folder / "base", "Bert", **SIZES)
    message = refused(
        4,
        "expert 'two'",
        "was not fine-tuned from the base",
        "the cosine between their weights is",
        "check_base: false",
    )
    assert f"({models.folder / 'two'})" in message
    assert str(models.folder / "base") in message


def test_the_wrong_base_can_be_insisted_on(models: Models, run: Run) -> None:
    _build(models.folder / "base", "Bert", **SIZES)
    assert run(models.command("--set", "check_base=false")).code == 0


def test_an_expert_of_another_base(models: Models, refused: Refused) -> None:
    _build(models.folder / "three", "Bert", **SIZES, num_labels=3)
    refused(4, "expert 'three'", "the cosine between their weights is")


OTHERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "architecture": (
        "DistilBert",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 99},
        ["it is a 'distilbert' model but the base is a 'bert'"],
    ),
    "width": (
        "Bert",
        {**SIZES, "hidden_size": 48},
        [
            "is (32,) in the base but (48,) in the expert",
            "more tensors have other shapes than in the base",
            "reads 48 features, but the encoder makes 32",
        ],
    ),
    "vocabulary": (
        "Bert",
        {**SIZES, "vocab_size": 101},
        ["'embeddings.word_embeddings.weight' is (99, 32) in the base but (101, 32) in the expert"],
    ),
    "fewer layers": ("Bert", {**SIZES, "num_hidden_layers": 1}, ["'encoder.layer.1.", "and 13 more is in the base"]),
    "more layers": (
        "Bert",
        {**SIZES, "num_hidden_layers": 3},
        ["'bert.encoder.layer.2.", "is neither encoder nor head"],
    ),
}


@pytest.mark.parametrize(("kind", "sizes", "parts"), OTHERS.values(), ids=OTHERS.keys())
def test_another_architecture(
    models: Models, refused: Refused, kind: str, sizes: dict[str, Any], parts: list[str]
) -> None:
    _build(models.folder / "two", kind, **sizes, num_labels=2)
    refused(4, f"expert 'two' ({models.folder / 'two'})", *parts)


def test_a_missing_tensor(models: Models, refused: Refused, run: Run) -> None:
    models.change("five", lambda tensors: tensors.pop(f"bert.{QUERY}"))
    refused(4, "expert 'five'", f"'{QUERY}' is in the base but not in the expert", "set 'missing: base'")
    assert run(models.command("--set", "missing=base")).code == 0


def test_an_expert_of_something_else(models: Models, refused: Refused) -> None:
    save_file({"conv.weight": torch.ones(2)}, models.weights("two"))
    refused(
        4, "expert 'two'", "none of the base's 39 encoder tensors is in it (it holds 'conv.weight')", "its 'prefix'"
    )


def test_tensors_too_many(models: Models, refused: Refused, run: Run) -> None:
    models.change("five", lambda tensors: tensors.update({"adapter.weight": torch.ones(2)}))
    refused(4, "expert 'five'", "'adapter.weight' is neither encoder nor head", "list it under 'ignore'")
    assert run(models.command("--set", "ignore=[adapter.*]")).code == 0


def test_a_strange_tensor_in_the_base(models: Models, refused: Refused) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["strange"] = torch.ones(2)

    models.change("base", rename)
    refused(4, f"base ({models.folder / 'base'})", "'strange' is no part of the encoder")


def test_two_encoders_in_one_expert(models: Models, refused: Refused, run: Run) -> None:
    models.change("two", lambda tensors: tensors.update({f"ema.{name}": value + 0 for name, value in tensors.items()}))
    refused(4, "the encoder is found under 'bert.', 'ema.bert.' alike", "say which with 'prefix'")


def test_all_problems_are_told_at_once(models: Models, refused: Refused, run: Run) -> None:
    models.change("two", lambda tensors: tensors.pop(f"bert.{QUERY}"))
    models.change("three", lambda tensors: tensors.update({"x": torch.ones(2)}))
    os.truncate(models.weights("five"), 1000)
    words = models.command("--set", "scael=1")
    parts = ["'scael'", "expert 'five'", "expert 'two'", "expert 'three'", "4 problems:"]
    refused(2, *parts, words=words)
    planned = run(models.command("--set", "scael=1", "--json", command="plan"))
    assert planned.code == 2
    problems = json.loads(planned.out)["problems"]
    assert [problem["where"].split(" (")[0] for problem in problems] == [
        *("method", "expert 'five'", "expert 'two'", "expert 'three'")
    ]
    assert all(problem["what"] and problem["fix"] for problem in problems)


def test_quantised_weights_without_a_word(models: Models, refused: Refused) -> None:
    """As numbers they point the same way as the weights that they stand for, so nothing else would notice."""

    def quantise(tensors: Tensors) -> None:
        tensors[f"bert.{QUERY}"] = (tensors[f"bert.{QUERY}"] * 1000).round().to(torch.int8)

    models.change("two", quantise)
    refused(4, "expert 'two'", f"'{QUERY}' is F32 in the base but I8 in the expert", "converted to float first")


def test_integer_buffers_must_agree(models: Models, refused: Refused, run: Run) -> None:
    ids = torch.arange(40)[None]
    models.change("base", lambda tensors: tensors.update({"embeddings.position_ids": ids}))
    models.change("two", lambda tensors: tensors.update({"bert.embeddings.position_ids": ids}))
    assert run(models.command()).code == 0
    assert torch.equal(load_file(models.out / "encoder.safetensors")["bert.embeddings.position_ids"], ids)
    shutil.rmtree(models.out)
    models.change("two", lambda tensors: tensors.update({"bert.embeddings.position_ids": ids + 1}))
    refused(4, "the integer buffer 'embeddings.position_ids' differs", "expert 'two'", str(models.weights("two")))


def test_tensors_without_elements(models: Models, run: Run) -> None:
    models.change("base", lambda tensors: tensors.update({"embeddings.position_ids": torch.zeros(1, 0).long()}))
    assert run(models.command()).code == 0
    assert load_file(models.out / "encoder.safetensors")["bert.embeddings.position_ids"].shape == (1, 0)
    assert run(["export", str(models.out), "--task", "two", "--to", str(models.folder / "export")]).code == 0


def test_a_base_without_an_encoder(models: Models, refused: Refused) -> None:
    words = models.command("--set", "encoder_prefix=nowhere")
    refused(4, f"base ({models.folder / 'base'})", "no encoder was found in it", "name its prefix", words=words)


def test_an_adapter_of_another_model(models: Models, refused: Refused) -> None:
    folder = models.folder / "two"
    shutil.rmtree(folder)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.layers.0.q_proj"
    factors = {f"{name}.lora_A.weight": torch.ones(1, 32), f"{name}.lora_B.weight": torch.ones(32, 1)}
    save_file(factors, folder / "adapter_model.safetensors")
    refused(4, f"expert 'two' ({folder})", "none of the adapter's tensors is in the base")
    models.experts = ["three"]
    words = models.command("--base", str(folder))
    refused(3, "base: ", f"{folder} is a LoRA adapter, not a full model", words=words)


# Heads and labels


def test_a_family_without_heads(models: Models, refused: Refused) -> None:
    for name in models.experts:
        models.change(name, lambda tensors: [tensors.pop(f"classifier.{part}") for part in ("weight", "bias")])
    words = models.command("--set", "family=generic")
    refused(4, "expert 'five'", "this family keeps no head in its checkpoints", "or its layers", words=words)


def _head(**parts: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"classifier.{name}": value for name, value in parts.items()})


HEADS: dict[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "none": (
        lambda tensors: [tensors.pop(f"classifier.{part}") for part in ("weight", "bias")],
        ["its head 'classifier' is not in the checkpoint", "name the head's layers"],
    ),
    "no axes": (_head(weight=torch.tensor(1.0)), ["'classifier.weight' of the head is () F32, which does not fit"]),
    "one axis": (_head(weight=torch.ones(2)), ["'classifier.weight' of the head is (2,) F32, which does not fit"]),
    "three axes": (_head(weight=torch.ones(2, 32, 1)), ["'classifier.weight' of the head is (2, 32, 1) F32"]),
    "integers": (_head(weight=torch.ones(2, 32).to(torch.int8)), ["'classifier.weight' of the head is (2, 32) I8"]),
    "another bias": (_head(bias=torch.ones(7)), ["'classifier.bias' of the head is (7,) F32, which does not fit"]),
    "wider": (_head(weight=torch.ones(2, 64)), ["'classifier.weight' reads 64 features, but the encoder makes 32"]),
    "more rows": (
        _head(weight=torch.ones(4, 32), bias=torch.ones(4)),
        ["'classifier.weight' has 4 rows but there are 2 labels", "give 'labels'"],
    ),
}


@pytest.mark.parametrize(("edit", "parts"), HEADS.values(), ids=HEADS.keys())
def test_heads_that_are_none(
    models: Models, refused: Refused, edit: Callable[[Tensors], object], parts: list[str]
) -> None:
    models.change("two", edit)
    refused(4, f"expert 'two' ({models.folder / 'two'})", *parts)


LABELS: dict[str, tuple[Any, str]] = {
    "too many": ({"0": "a", "1": "b", "2": "c"}, "has 2 rows but there are 3 labels"),
    "the same": ({"0": "a", "1": "a"}, "two of its labels are the same ('a', 'a')"),
    "words for numbers": ({"a": "0", "b": "1"}, "'id2label' must number the classes from 0 on, it has 'a', 'b'"),
    "a gap": ({"0": "a", "5": "b"}, "'id2label' must number the classes from 0 on, it has '0', '5'"),
    "a list": (["a", "b"], "'id2label' must number the classes from 0 on"),
}


@pytest.mark.parametrize(("labels", "part"), LABELS.values(), ids=LABELS.keys())
def test_labels_that_do_not_fit(models: Models, refused: Refused, labels: Any, part: str) -> None:
    models.configure("two", id2label=labels)
    refused(4, f"expert 'two' ({models.folder / 'two'})", part, "'labels'")


def test_labels_in_any_writing(models: Models, run: Run) -> None:
    labels = {"0": "| <b>`schön`\n", "1": "half a pair: \ud83d"}
    models.configure("two", id2label=labels)
    assert run(models.command()).code == 0
    manifest = json.loads((models.out / "orthomerge.json").read_text())
    assert manifest["heads"]["two"]["labels"] == list(labels.values())
    assert run(["verify", str(models.out)]).code == 0


# Numbers


def _spoil(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(-1)[7].fill_(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv_m"])
def test_nan_in_an_expert(models: Models, refused: Refused, value: float, method: str) -> None:
    models.change("three", _spoil(f"bert.{QUERY}", value))
    message = refused(6, f"'{QUERY}' holds NaN or infinity in", words=models.command(method=method))
    assert f"expert 'three' ({models.weights('three')})" in message
    assert "1 of 1024 elements" in message


def test_nan_in_the_base(models: Models, refused: Refused) -> None:
    models.change("base", _spoil(QUERY, float("nan")))
    refused(6, f"'{QUERY}' holds NaN or infinity in the base ({models.weights('base')})", "find a sound checkpoint")


def test_nan_in_the_base_where_an_expert_has_nothing(models: Models, refused: Refused) -> None:
    models.change("base", _spoil(QUERY, float("nan")))
    models.change("two", lambda tensors: tensors.pop(f"bert.{QUERY}"))
    words = models.command("--set", "missing=base")
    refused(6, f"'{QUERY}' holds NaN or infinity in the base ({models.weights('base')})", words=words)


def test_nan_in_a_tensor_that_is_only_copied(models: Models, refused: Refused) -> None:
    for name in models.experts:
        models.change(name, lambda tensors: [tensors.pop(key) for key in list(tensors) if "pooler" in key])
    models.change("base", _spoil("pooler.dense.weight", float("nan")))
    words = models.command("--set", "pooling=cls")
    refused(6, f"'pooler.dense.weight' in the base ({models.weights('base')}) holds NaN", words=words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_nan_in_a_head(models: Models, refused: Refused, dtype: torch.dtype) -> None:
    weight = torch.ones(5, 32)
    weight[3, 3] = float("nan")
    models.change("five", _head(weight=weight.to(dtype)))
    refused(6, f"{models.weights('five')}: the head's 'classifier.weight' holds NaN or infinity")


def test_what_does_not_fit_into_the_dtype(models: Models, refused: Refused) -> None:
    for name in ("base", *models.experts):
        prefix = "" if name == "base" else "bert."
        models.change(name, lambda tensors, prefix=prefix: tensors[prefix + QUERY].mul_(1e6))  # type: ignore[misc]
    words = models.command("--dtype", "float16")
    refused(6, f"'{QUERY}' does not fit into F16 after the merge", "--dtype float32 or bfloat16", words=words)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_experts_in_any_float_dtype(models: Models, run: Run, dtype: torch.dtype) -> None:
    models.change("two", lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    assert run(models.command()).code == 0
    assert {value.dtype for value in load_file(models.out / "encoder.safetensors").values()} == {torch.float32}


# Files


def test_a_file_cut_short(models: Models, refused: Refused) -> None:
    path = models.weights("three")
    os.truncate(path, path.stat().st_size - 100)
    refused(3, "expert 'three'", f"{path} was cut short: 100 bytes of its last tensors are missing", "fetch it again")


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes, too few for a safetensors file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "is a Git LFS pointer"),
    "page": (b"<!DOCTYPE html><html>Sign in</html>", "is not a safetensors file"),
    "zeros": (bytes(1000), "is not valid JSON"),
}


@pytest.mark.parametrize(("data", "part"), FILES.values(), ids=FILES.keys())
@pytest.mark.parametrize("name", ["base", "two"])
def test_files_that_are_no_weights(models: Models, refused: Refused, name: str, data: bytes, part: str) -> None:
    models.weights(name).write_bytes(data)
    refused(3, str(models.weights(name)), part)


@pytest.mark.parametrize("shard", ["../three/model.safetensors", "/dev/zero", "model.bin"])
def test_an_index_that_points_outside(models: Models, refused: Refused, shard: str) -> None:
    names = dict.fromkeys(load_file(models.weights("two")), shard)
    models.weights("two").unlink()
    index = models.folder / "two" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    refused(3, str(index), shard, "do not trust this file")


def test_a_shard_that_is_a_link_out_of_the_folder(models: Models, refused: Refused) -> None:
    shard, names = "model-00001-of-00001.safetensors", load_file(models.weights("two"))
    models.weights("two").unlink()
    (models.folder / "two" / shard).symlink_to(models.weights("three"))
    index = {"weight_map": dict.fromkeys(names, shard)}
    (models.folder / "two" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(3, str(models.folder / "two" / shard), "is a link that leaves its folder")


class _Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("kind", ["bare", "zip", "legacy"])
def test_an_evil_pickle(models: Models, refused: Refused, kind: str, tmp_path: Path) -> None:
    evil = {**load_file(models.weights("two")), "evil": _Evil(tmp_path / "evil")}
    models.weights("two").unlink()
    path = models.folder / "two" / "pytorch_model.bin"
    if kind == "bare":
        path.write_bytes(pickle.dumps({"evil": _Evil(tmp_path / "evil")}))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=kind == "zip")
    refused(3, "expert 'two'", str(path))
    assert not (tmp_path / "evil").exists()


def test_references_that_lead_nowhere(models: Models, refused: Refused) -> None:
    shutil.rmtree(models.folder / "two")
    refused(3, "expert 'two'", f"'{models.folder / 'two'}' does not exist, and is not a hub id")
    (models.folder / "two").mkdir()
    refused(3, f"{models.folder / 'two'} holds no weights")
    words = models.command()
    words[words.index(f"two={models.folder / 'two'}")] = "two=some-org/not-in-the-cache"
    refused(3, "expert 'two'", "'some-org/not-in-the-cache'", "HF_HUB_OFFLINE", words=words)


def test_a_quantised_model(models: Models, refused: Refused) -> None:
    models.configure("two", quantization_config={"quant_method": "bitsandbytes"})
    refused(3, f"{models.folder / 'two'} is quantised (bitsandbytes)")


def test_a_config_that_is_broken(models: Models, refused: Refused) -> None:
    (models.folder / "two" / "config.json").write_text("{")
    refused(3, str(models.folder / "two" / "config.json"), "is not valid JSON")


class _Meddler:
    """Spoils an input while it is merged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stage(self, title: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None:
        os.utime(self.path, ns=(1, 1))


def test_an_input_that_changes_meanwhile(models: Models) -> None:
    recipe = Recipe({"two": str(models.folder / "two")}, base=str(models.folder / "base"))
    with pytest.raises(
        CheckpointError, match=r"two/model.safetensors changed while it was read; run the command again"
    ):
        write(recipe, out=models.out, progress=_Meddler(models.weights("two")))
    assert models.left() == []


# Outputs


def test_an_output_that_exists(models: Models, refused: Refused, run: Run) -> None:
    assert run(models.command()).code == 0
    before = (models.out / "orthomerge.json").read_bytes()
    refused(5, f"{models.out} exists already; give --force to replace it")
    assert (models.out / "orthomerge.json").read_bytes() == before
    assert run(models.command("--force", "--set", "scale=0.1")).code == 0
    assert (models.out / "orthomerge.json").read_bytes() != before
    assert (run(["verify", str(models.out)]).code, models.left()) == (0, ["out"])


def test_an_output_that_exists_is_found_before_any_work(models: Models, refused: Refused) -> None:
    models.out.mkdir(parents=True)
    models.change("two", _spoil(f"bert.{QUERY}", float("nan")))
    refused(5, "exists already")


def test_force_does_not_replace_the_work_of_others(models: Models, refused: Refused) -> None:
    models.out.mkdir(parents=True)
    (models.out / "thesis.tex").write_text("years of work")
    refused(5, "was not written by orthomerge", words=models.command("--force"))
    assert (models.out / "thesis.tex").exists()


@pytest.mark.parametrize("out", ["two", "two/out", "base/deep/out", "."])
def test_an_output_inside_an_input(models: Models, refused: Refused, out: str) -> None:
    before = sorted(models.folder.rglob("*"))
    words = models.command("--out", str(models.folder / out), "--force")
    refused(5, "overlaps the input", "choose another place", words=words)
    assert sorted(models.folder.rglob("*")) == before


def test_a_full_disk(models: Models, start: Callable[..., Any]) -> None:
    """A limit on the size of files is what a full disk is to a program, and it binds root as well."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    process = start(models.command(), preexec_fn=limit)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 5, error
    assert error == f"orthomerge: cannot write {models.out}: File too large; nothing was left behind\n"
    assert models.left() == []


def test_too_little_room(models: Models, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(models.folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    refused(5, "has 0.00 GB free, but the output needs 0.02 GB")


def test_outputs_that_no_folder_can_be(models: Models, refused: Refused) -> None:
    (models.folder / "file").write_text("")
    refused(5, "cannot write to", words=models.command("--out", str(models.folder / "file" / "out")))
    refused(5, "File name too long", words=models.command("--out", str(models.folder / ("x" * 300))))
    refused(5, "cannot write to ~nobody", words=models.command("--out", "~nobody-of-this-name/out"))


def test_an_output_with_an_odd_name(models: Models, run: Run) -> None:
    out = models.folder / "Ein Ordner für\n'alles' \U0001f600"
    assert run(models.command("--out", str(out))).code == 0
    assert run(["verify", str(out)]).code == 0


# Recipes and arguments

ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "method": (
        ["--method", "task_arithmatic"],
        ["unknown method 'task_arithmatic'", "did you mean 'task_arithmetic'?"],
    ),
    "option": (["--set", "scael=1"], ["unknown option 'scael'", "did you mean 'scale'?"]),
    "value": (["--set", "scale=much"], ["'scale' must be number or list of number, got 'much'"]),
    "not a number": (["--set", "scale=.nan"], ["'scale' must be a finite number, got nan"]),
    "numbers for other experts": (["--set", "scale=[1, 2]"], ["'scale' has 2 numbers for 3 experts"]),
    "half a setting": (["--set", "scale"], ["expected --set KEY=VALUE, got 'scale'"]),
    "no YAML": (["--set", "scale=[1"], ["cannot read the value '[1'"]),
    "no day": (["--set", "scale=2020-13-45"], ["cannot read the value '2020-13-45'"]),
    "dtype": (["--dtype", "float61"], ["'dtype' must be", "did you mean 'float64'?"]),
    "size": (["--max-shard-size", "5XB"], ["a size must look like 5GB"]),
    "half an expert": (["--expert", "two"], ["expected --expert NAME=PATH, got 'two'"]),
    "an expert twice": (["--expert", "two=elsewhere"], ["two experts have the same name"]),
    "an expert in other letters": (["--expert", "TWO=elsewhere"], ["differ in case only"]),
    "an expert that leads out": (["--expert", "../x=elsewhere"], ["'../x' cannot name an expert"]),
    "family": (["--set", "family=brt"], ["unknown model family 'brt'; did you mean 'bert'?"]),
    "pooling": (["--set", "pooling=max"], ["'max' is not known for bert; use one of pooler, cls, mean"]),
    "vector": (["--set", "vector=two + nine"], ["'nine', which is no expert"]),
}


@pytest.mark.parametrize(("words", "parts"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_that_make_no_sense(models: Models, refused: Refused, words: list[str], parts: list[str]) -> None:
    refused(2, *parts, words=models.command(*words))


def test_numbers_as_people_write_them(models: Models, run: Run) -> None:
    assert run(models.command("--set", "scale=3e-1")).code == 0
    manifest = json.loads((models.out / "orthomerge.json").read_text())
    assert manifest["method"]["parameters"]["scale"] == 0.3


def test_recipes_that_make_no_sense(models: Models, refused: Refused) -> None:
    recipe = models.folder / "recipe.yaml"
    cases = {
        "experts: {two: two}\nmetod: x": "unknown option 'metod'; did you mean 'method'?",
        "experts: [two]": "'experts' must be mapping",
        "base: base": "nothing to merge",
        "a: [": "is not valid YAML",
        "experts: {two: two}\nbase: base": "where to? Give 'out' in the recipe, or --out",
        "experts: {two: two}\nout: results/out": "needs the model that the experts were fine-tuned from; give it",
    }
    for text, part in cases.items():
        recipe.write_text(text)
        refused(2, part, words=["merge", str(recipe)])
    refused(2, "cannot read the recipe", words=["merge", str(models.folder / "nowhere.yaml")])
    recipe.write_text("experts: {two: two}\nbase: base\nparameters: [1]\nout: results/out")
    refused(2, "'parameters' must be a mapping", words=["merge", str(recipe), "--set", "scale=1"])


def test_a_recipe_is_read_from_anywhere(models: Models, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    recipe = models.folder / "recipe.yaml"
    recipe.write_text("experts: {two: two}\nbase: ./base\nparameters:\nout: results/out")
    assert run(["merge", str(recipe), "--set", "scale=1"]).code == 0
    assert models.left() == ["out"]


def test_unknown_options_of_the_command_itself(models: Models, run: Run) -> None:
    ended = run(models.command("--nonsense"))
    assert ended.code == 2
    assert "--nonsense" in ended.err
    assert "Traceback" not in ended.err


# What was written


def test_an_output_that_was_changed(models: Models, run: Run) -> None:
    assert run(models.command()).code == 0
    (models.out / "two" / "extra.txt").write_text("?")
    (models.out / "README.md").unlink()
    with (models.out / "encoder.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    (models.out / "two" / "config.json").write_text("{}")
    ended = run(["verify", str(models.out)])
    assert ended.code == 5
    for part in (
        "two/extra.txt was not",
        "README.md is missing",
        "encoder.safetensors has changed",
        "two/config.json has 2",
    ):
        assert part in ended.err


def test_what_is_no_output(models: Models, run: Run) -> None:
    for command in (["verify"], ["export", "--task", "two", "--to", str(models.folder / "x")]):
        ended = run([*command, str(models.folder / "base")])
        assert ended.code == 3
        assert "is not an orthomerge output: it has no orthomerge.json" in ended.err


def test_exports_that_cannot_be(models: Models, run: Run) -> None:
    assert run(models.command()).code == 0
    to = models.folder / "export"
    ended = run(["export", str(models.out), "--task", "too", "--to", str(to)])
    assert (ended.code, "is no task 'too'; did you mean 'two'?" in ended.err) == (2, True)
    ended = run(["export", str(models.out), "--task", "two", "--to", str(models.out / "two")])
    assert (ended.code, "overlaps the input" in ended.err) == (5, True)
    to.mkdir()
    ended = run(["export", str(models.out), "--task", "two", "--to", str(to)])
    assert (ended.code, "exists already" in ended.err) == (5, True)
    assert run(["verify", str(models.out)]).code == 0


def test_a_few_in_a_process_of_their_own(models: Models, start: Callable[..., Any]) -> None:
    """The same as above, from outside: exit code, one line of message, no traceback."""
    save_file({"a": torch.ones(2)}, models.weights("two"))
    cases = [
        (3, ["inspect", str(models.folder / "nowhere")], "does not exist"),
        (4, models.command(), "none of the base's 39 encoder tensors"),
    ]
    running = [(code, part, start(words)) for code, words, part in cases]
    for code, part, process in running:
        _, error = process.communicate(timeout=60)
        assert process.returncode == code, error
        assert error.startswith("orthomerge: ")
        assert part in error
        assert "Traceback" not in error
    assert models.left() == []
