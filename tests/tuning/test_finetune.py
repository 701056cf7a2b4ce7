"""Making experts: every mode learns, what is written is stock, and a seed decides everything."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.tuning.conftest import BASES, PROCESSORS, Killed, Reports, Tune

import orthomerge
from orthomerge.core.errors import (
    CheckpointError,
    IncompatibleError,
    NumericalError,
    OrthomergeError,
    OutputError,
    RecipeError,
)
from orthomerge.data.task import Examples, Task
from orthomerge.files.lora import read_adapter
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.families import family
from orthomerge.models.family import Family
from orthomerge.models.heads import Head, Linear
from orthomerge.models.networks import LinearisedEncoder, deltas_between
from orthomerge.models.skeleton import quiet
from orthomerge.tuning import finetune as module
from orthomerge.tuning.model import load_base, write_weights

# Per mode: what the quick settings lack.
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "head_first": {},
    "lora": {"lr": 2e-2},
    "linearised": {"lr": 1e-2},
    "tau_jp": {"lr": 1e-2, "penalty": 0.01},
}


def other(task: Task, seed: int = 5) -> Examples:
    """Inputs of another task of the same kind, without labels."""
    random = np.random.default_rng(seed)
    if task.modality == "text":
        return Examples([" ".join(map(str, random.integers(7, 40, 5))) for _ in range(24)], None, "train")
    return Examples(list(random.integers(0, 255, (24, 8, 8, 3)).astype(np.uint8)), None, "train")


STOCK = {"words": "BertForSequenceClassification", "levels": "ViTForImageClassification"}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stock(folder: Path, class_name: str, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of the stock class, every weight of which must come from the folder."""
    with quiet():
        import transformers

        model, info = getattr(transformers, class_name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**batch).logits
    return logits


def accuracy(logits: torch.Tensor, examples: Examples) -> float:
    return float((logits.argmax(1) == torch.as_tensor(examples.labels)).float().mean())


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns(task: Task, mode: str, tune: Tune, tmp_path: Path) -> None:
    pooling = "mean" if task.name == "words" else None
    metrics = tune(task, tmp_path / "out", mode=mode, pooling=pooling, more={"others": [other(task)]}, **MODES[mode])
    assert metrics["train_accuracy"] > 0.8
    assert metrics["val_accuracy"] > 0.85
    assert metrics["steps"] == 18
    assert ("penalty" in metrics) == (mode == "tau_jp")
    notes = json.loads((tmp_path / "out" / "config.json").read_text())["orthomerge"]
    assert (notes["mode"], notes["val_accuracy"], notes["task"]) == (mode, metrics["val_accuracy"], task.name)
    assert notes["tuning"]["batch"] == 16
    assert notes["pooling"] == (pooling or "cls")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # no state is left behind


def test_stock_transformers_loads_it_and_gives_the_same_logits(
    task: Task, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    write = write_weights

    def spy(folder: Path, encoder: torch.nn.Module, names: dict[str, str], head: Head, family: Family) -> None:
        kept[:] = [encoder.eval(), head]
        write(folder, encoder, names, head, family)

    monkeypatch.setattr(module, "write_weights", spy)
    tune(task, tmp_path / "out", epochs=1.0)
    batch = PROCESSORS[task.modality](task["val"].inputs)
    own, class_name = family(BASES[task.name]), STOCK[task.name]
    with torch.no_grad():
        ours = kept[1](own.features(kept[0], batch, own.default_pooling))
    torch.testing.assert_close(stock(tmp_path / "out", class_name, batch), ours, atol=1e-5, rtol=0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [class_name]
    assert config["id2label"] == dict(zip("01", task.labels, strict=True))
    assert config["label2id"] == {label: number for number, label in enumerate(task.labels)}
    assert (tmp_path / "out" / "vocab.txt").exists() == (task.name == "words")


def test_an_adapter_merges_into_what_was_trained(task: Task, base: Path, tune: Tune, tmp_path: Path) -> None:
    pooling = "mean" if task.name == "words" else "cls"
    metrics = tune(task, tmp_path / "lora", mode="lora", pooling=pooling, **MODES["lora"])
    adapter = read_adapter(tmp_path / "lora")
    assert len(adapter.products) == 2 * 4
    assert set(adapter.replaced) == {"classifier.weight", "classifier.bias"}
    for factors in adapter.products.values():
        assert factors.a.spec.shape[0] == 16
        assert factors.delta(0, 32 * 32).abs().max() > 0
    # Without `check_base`: the random weights of this base are small beside what was learnt.
    experts = orthomerge.open({"x": tmp_path / "lora"}, base=base, check_base=False)
    assert experts.heads["x"].pooling == pooling  # as its config says
    for model in (orthomerge.merge(experts, scale=1.0), experts.teacher("x")):
        features = encode(model, task["val"], task="x", how=Encoding(None, "cpu", processor=PROCESSORS[task.modality]))
        assert accuracy(model.head("x")(features.values), task["val"]) == metrics["val_accuracy"]


def test_peft_puts_the_adapter_on_the_stock_classifier(bases: Path, levels: Task, tune: Tune, tmp_path: Path) -> None:
    metrics = tune(levels, tmp_path / "lora", mode="lora", **MODES["lora"])
    with quiet():
        from peft import PeftModel
        from transformers import ViTForImageClassification

        model = ViTForImageClassification.from_pretrained(bases / "vit", num_labels=2)
        adapted = PeftModel.from_pretrained(model, tmp_path / "lora").eval()
    with torch.no_grad():
        logits = adapted(**PROCESSORS["image"](levels["val"].inputs)).logits
    assert accuracy(logits, levels["val"]) == metrics["val_accuracy"]


def tangent(bases: Path, folder: Path) -> tuple[Any, Head]:
    found = family("bert")
    base, tuned = (load_base(place, found, "mean").module for place in (bases / "bert", folder))
    deltas = deltas_between(base, tuned)
    weights = load_file(folder / "model.safetensors")
    head = Head(Linear(weights["classifier.weight"], weights["classifier.bias"]), ("a", "b"))
    return LinearisedEncoder(found, "mean", base, deltas), head


def test_the_penalty_keeps_other_tasks_still(bases: Path, words: Task, tune: Tune, tmp_path: Path) -> None:
    inputs = other(words)
    batch = PROCESSORS["text"](inputs.inputs)
    norms = {}
    for mode, penalty in {"linearised": 0.1, "tau_jp": 0.1}.items():
        out = tmp_path / mode
        metrics = tune(words, out, mode=mode, penalty=penalty, pooling="mean", lr=1e-2, more={"others": [inputs]})
        assert metrics["train_accuracy"] > 0.8
        with torch.no_grad():
            norms[mode] = float(tangent(bases, out)[0].change(batch).norm(dim=1).mean())
    assert norms["tau_jp"] < 0.5 * norms["linearised"]


def test_a_seed_decides_and_the_callers_own_draws_are_not_disturbed(words: Task, tune: Tune, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    tune(words, tmp_path / "one", steps=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    tune(words, tmp_path / "two", steps=3, seed=1)
    assert files(tmp_path / "one")["model.safetensors"] != files(tmp_path / "two")["model.safetensors"]


@pytest.mark.parametrize(("mode", "kind"), [*((mode, "words") for mode in MODES), ("full", "levels")])
def test_a_killed_run_goes_on_to_the_same_result(
    mode: str, kind: str, tune: Tune, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of images with the same shifts."""
    task: Task = request.getfixturevalue(kind)
    settings: dict[str, Any] = {"mode": mode, "epochs": 3.0, "batch": 32, "lora_dropout": 0.1}
    settings["augment"] = "shift" if kind == "levels" else "none"
    others = [other(task, 1), other(task, 2)]
    expected = tune(task, tmp_path / "whole", **settings, more={"others": others})
    with pytest.raises(Killed):
        tune(task, tmp_path / "cut", **settings, more={"others": others, "progress": Reports(kill_at=9)})
    assert [path.name for path in tmp_path.iterdir() if "cut" in path.name] == [".cut.tuning"]
    reports = Reports()
    assert tune(task, tmp_path / "cut", **settings, more={"others": others, "progress": reports}) == expected
    assert reports.steps == [9]  # two epochs of three steps were not done again
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert not (tmp_path / ".cut.tuning").exists()


def test_shifted_images_train_another_model(levels: Task, tune: Tune, tmp_path: Path) -> None:
    assert tune(levels, tmp_path / "shifted", augment="shift", batch=32)["val_accuracy"] > 0.85
    tune(levels, tmp_path / "plain", batch=32)
    assert files(tmp_path / "plain")["model.safetensors"] != files(tmp_path / "shifted")["model.safetensors"]


def test_the_state_of_another_run_is_not_used_nor_kept_without_resume(words: Task, tune: Tune, tmp_path: Path) -> None:
    tune(words, tmp_path / "whole", epochs=2.0)
    with pytest.raises(Killed):
        tune(words, tmp_path / "cut", epochs=2.0, lr=1e-4, more={"progress": Reports(kill_at=10)})
    tune(words, tmp_path / "cut", epochs=2.0)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    with pytest.raises(Killed):
        tune(words, tmp_path / "none", more={"progress": Reports(kill_at=10), "resume": False})
    assert not any("none" in path.name for path in tmp_path.iterdir())


def test_a_frozen_head_is_left_as_it_is(task: Task, tune: Tune, tmp_path: Path) -> None:
    weight, bias = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([0.25, -0.5])
    # The rows are found by name.
    head = Head(Linear(weight.flip(0), bias.flip(0)), (task.labels[1], task.labels[0]))
    metrics = tune(task, tmp_path / "out", mode="frozen_head", lr=5e-3, more={"head": head})
    assert metrics["train_accuracy"] > 0.8
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["classifier.weight"], weight)
    assert torch.equal(saved["classifier.bias"], bias)


@pytest.mark.parametrize("mode", ["frozen_head", "linearised", "lora"])
def test_clip_with_a_head_from_text(mode: str, bases: Path, levels: Task, tune: Tune, tmp_path: Path) -> None:
    head = Head(Linear(20 * torch.eye(2, 8), torch.zeros(2)), levels.labels, normalise=True)
    more = {"base": bases / "clip", "head": head}
    metrics = tune(levels, tmp_path / "out", mode=mode, more=more, **MODES.get(mode, {}))
    assert metrics["val_accuracy"] > 0.85
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["orthomerge"]["labels"] == list(levels.labels)
    if mode == "lora":
        assert not read_adapter(tmp_path / "out").replaced
        return
    assert config["architectures"] == ["CLIPVisionModelWithProjection"]
    assert not any("classifier" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    encoder = load_base(tmp_path / "out", family("clip"), "projection").module
    if mode == "frozen_head":
        with torch.no_grad():
            logits = head(encoder(**PROCESSORS["image"](levels["val"].inputs)).image_embeds)
        assert accuracy(logits, levels["val"]) == metrics["val_accuracy"]


def test_clip_without_a_head_gets_a_linear_one(bases: Path, levels: Task, tune: Tune, tmp_path: Path) -> None:
    metrics = tune(levels, tmp_path / "out", more={"base": bases / "clip"})
    batch = PROCESSORS["image"](levels["val"].inputs)
    logits = stock(tmp_path / "out", "CLIPForImageClassification", batch)
    assert accuracy(logits, levels["val"]) == metrics["val_accuracy"]


def test_a_base_may_have_a_head_and_pretraining_leftovers(bases: Path, words: Task, tune: Tune, tmp_path: Path) -> None:
    with quiet():
        from transformers import BertConfig, BertForPreTraining, BertForSequenceClassification

        config = BertConfig.from_pretrained(bases / "bert")
        BertForPreTraining(config).save_pretrained(tmp_path / "pretrained")
        BertForSequenceClassification(config).save_pretrained(tmp_path / "classifier")
    for name in ("pretrained", "classifier"):
        tune(words, tmp_path / f"{name}-out", steps=2, more={"base": tmp_path / name})
        assert len(load_file(tmp_path / f"{name}-out" / "model.safetensors")["classifier.bias"]) == 2


def test_steps_fractions_of_epochs_and_runs_without_validation_data(words: Task, tune: Tune, tmp_path: Path) -> None:
    reports = Reports()
    assert tune(words, tmp_path / "a", epochs=1.5, more={"progress": reports})["steps"] == 9
    # Six steps an epoch; a look comes every ten steps and at the end of an epoch.
    starts = [line.partition(":")[0] for line in reports.lines]
    assert starts == ["words, epoch 1, step 6 of 9", "words, epoch 2, step 9 of 9"]
    figures = r"words, .*: loss [\d.]+, accuracy [01][\d.]*, val_accuracy [01][\d.]*"
    assert all(re.fullmatch(figures, line) for line in reports.lines)
    assert tune(words, tmp_path / "b", steps=4)["steps"] == 4
    task = Task("words", words.labels, "text", {"train": words["train"]})
    assert "val_accuracy" not in tune(task, tmp_path / "out", steps=2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["orthomerge"]["val_accuracy"] is None


class Broken:
    """Gives good pixels until call number `from_call`."""

    modality = "image"

    def __init__(self, good: Any, from_call: int, error: BaseException | None = None) -> None:
        self._good, self._left, self._error = good, from_call, error

    def __call__(self, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
        self._left -= 1
        batch: dict[str, torch.Tensor] = self._good(inputs)
        if self._left >= 0:
            return batch
        if self._error is not None:
            raise self._error
        return {name: tensor * float("nan") for name, tensor in batch.items()}

    def digest(self) -> str:
        return "broken"


def poison(optimiser: torch.optim.Optimizer) -> None:
    """A step after which nothing is a number."""
    with torch.no_grad():
        for parameter in optimiser.param_groups[0]["params"]:
            parameter.fill_(float("nan"))


def test_a_loss_that_is_no_number_names_task_and_step(
    levels: Task, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Broken(PROCESSORS["image"], 3, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OrthomergeError, match="the device ran out of memory with batches of 16; lower 'batch'"):
        tune(levels, tmp_path / "out", more={"processor": full})
    # One call finds the width, six and two are the first epoch, three are steps of the second.
    processor = Broken(PROCESSORS["image"], 1 + 6 + 2 + 3)
    with pytest.raises(NumericalError, match=r"task 'levels': the loss is nan at step 10 of 18; lower 'lr'"):
        tune(levels, tmp_path / "out", more={"processor": processor})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NumericalError, match=r"the loss is nan at step 1 of 6 of the head's own"):
        tune(levels, tmp_path / "out", mode="head_first", more={"processor": Broken(PROCESSORS["image"], 1)})
    monkeypatch.setattr(torch.optim.AdamW, "step", poison)
    with pytest.raises(NumericalError, match=r"weights are not finite after step 1 of 1; lower 'lr'"):
        tune(levels, tmp_path / "out", steps=1)


def head_of(rows: int, width: int, labels: tuple[str, ...], **more: Any) -> Head:
    return Head(Linear(torch.zeros(rows, width)), labels, **more)


LABELS = ("has-5", "has-6")  # of the task `words`
CLIP = {"base": "clip", "family": "clip"}
NORMALISING = head_of(2, 32, LABELS, normalise=True)
EMPTY = Task("none", ("a", "b"), "text", {"train": Examples([], np.zeros(0, dtype=np.int64), "train")})
UNLABELLED = Task("x", ("a", "b"), "text", {"train": Examples(["5", "6"], None, "train")})
REFUSED: list[tuple[str | Task, dict[str, Any], type[OrthomergeError], str]] = [
    (EMPTY, {}, RecipeError, "the train split of task 'none' is empty; it must have examples"),
    (UNLABELLED, {}, RecipeError, "the train split of task 'x' has no labels; give labelled examples"),
    ("words", {"device": "tpu"}, RecipeError, "unknown device 'tpu'"),
    ("words", {"pooling": "maen"}, RecipeError, "unknown pooling 'maen' for bert; did you mean 'mean'"),
    ("words", {"mode": "frozen_head"}, RecipeError, "mode 'frozen_head' needs a head; give it as `head`"),
    ("words", {"mode": "tau_jp"}, RecipeError, "mode 'tau_jp' needs inputs of other tasks"),
    ("words", {"augment": "shift"}, RecipeError, "'augment' must be none .* reads 'text', got 'shift': .*; leave"),
    ("levels", {"base": "bert"}, IncompatibleError, "task 'levels' has modality 'image', but family 'bert' reads"),
    ("words", {"family": "vit"}, RecipeError, "is of model type 'bert', family 'vit' reads 'vit'"),
    ("levels", CLIP, RecipeError, "'clip' has no head, which mode 'full' trains"),
    ("levels", {**CLIP, "mode": "linearised"}, RecipeError, "this family has no head; give one as `head`"),
    ("words", {"head": head_of(2, 7, LABELS)}, IncompatibleError, "the head reads 7 features, the encoder gives 32"),
    ("words", {"head": head_of(2, 32, ("a", "b"))}, IncompatibleError, "label sets differ: 'a', 'b', 'has-5' and 1"),
    (
        "words",
        {"head": NORMALISING},
        IncompatibleError,
        r"layers of the head differ from the family's own \(classifier\)",
    ),
]


@pytest.mark.parametrize(("task", "options", "error", "message"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_refusals(
    task: str | Task,
    options: dict[str, Any],
    error: type[OrthomergeError],
    message: str,
    bases: Path,
    tune: Tune,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    more = {name: value for name, value in options.items() if name in ("family", "head")}
    if "base" in options:
        more["base"] = bases / options["base"]
    settings = {name: value for name, value in options.items() if name not in ("base", *more)}
    chosen: Task = request.getfixturevalue(task) if isinstance(task, str) else task
    with pytest.raises(error, match=message):
        tune(chosen, tmp_path / "out", more=more, **settings)
    assert list(tmp_path.iterdir()) == []


def test_bases_outputs_and_a_missing_peft(
    bases: Path, words: Task, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"must have a config.json with a 'model_type'"):
        tune(words, tmp_path / "out", more={"base": bases / "bert" / "model.safetensors"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("dear diary")
    with pytest.raises(OutputError, match="exists already"):
        tune(words, tmp_path / "full")
    with pytest.raises(OutputError, match=r"was not written by orthomerge \(it has no orthomerge-expert.json\)"):
        tune(words, tmp_path / "full", more={"force": True})
    with pytest.raises(OutputError, match="overlaps the input"):
        tune(words, bases / "bert" / "expert")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(RecipeError, match="mode 'lora' needs peft: pip install peft"):
        tune(words, tmp_path / "out", mode="lora")
