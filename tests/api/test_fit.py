"""Fits from opened experts, in memory: as large as any other merge, equal to what was fitted, continued when killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from tests.berts import HEADS
from tests.models.making import open_models, same_tensors, tensors_of, write_models

from orthomerge.alignment.align import align
from orthomerge.api.load import load
from orthomerge.api.merge import merge
from orthomerge.api.open import open as open_named
from orthomerge.core.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.data.task import Examples, Task
from orthomerge.files import safetensors
from orthomerge.fitting import loop
from orthomerge.fitting.fit import fit, setting_of
from orthomerge.fitting.realign import Realign
from orthomerge.fitting.setting import Fitted, Setting, encoded
from orthomerge.merging.merge import merge_opened
from orthomerge.merging.methods import FITTED
from orthomerge.models.encoding import Encoding
from orthomerge.models.experts import Experts
from orthomerge.models.heads import Head
from orthomerge.models.model import Model
from orthomerge.models.skeleton import Skeleton

QUICK: dict[str, dict[str, Any]] = {
    "realign": {"steps": 4, "look": 2, "batch": 4},
    "moma": {"steps": 4, "look": 2, "batch": 4},
    "adamerging": {"steps": 4, "look": 2, "batch": 4},
    "concrete_ta": {"steps": 4, "batch": 4},
    "concrete_am": {"steps": 2, "batch": 4, "adapt_steps": 2},
    "fisher": {"inputs": 8},
    "regmean": {"inputs": 16},
    "regmean_pp": {"inputs": 16},
    "lm_cocktail": {"inputs": 8},
    "model_tailor": {"inputs": 16},
}
FEW: dict[str, Any] = {**QUICK["realign"], "copies": 0}  # without the mixtures, which take most of the time
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tables: Path) -> dict[str, str]:
    return {task: str(tables / f"{task}.csv") for task in HEADS}


@pytest.fixture
def experts(berts: Path) -> Experts:
    return open_named({task: berts / task for task in HEADS}, base=berts / "base")


def same(one: Model, other: Model) -> bool:
    """Whether two models have the same bits: encoder and heads."""
    heads = [(one.heads[task].tensors(), other.heads[task].tensors()) for task in one.tasks]  # type: ignore[union-attr]
    return same_tensors(one, other) and all(
        ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
        for ours, theirs in heads
    )


@pytest.mark.parametrize("method", FITTED)
def test_a_fitted_merge_is_as_large_as_any_other(method: str, experts: Experts, data: dict[str, str]) -> None:
    plain = merge_opened(experts, "task_arithmetic", {})
    made = fit(experts, method, data, QUICK[method], device="cpu")
    assert dict(made.weights.specs) == dict(plain.weights.specs)
    for task, head in made.heads.items():
        assert isinstance(head, Head)
        old = experts.heads[task]
        assert (head.labels, head.kind, head.pooling) == (old.labels, old.kind, old.pooling)
    facts = made.origin.facts["fit"]
    assert facts["access"] == made.origin.access == "inductive"
    assert {task: about["inputs"] for task, about in facts["tasks"].items()} == dict.fromkeys(HEADS, 60)
    assert all(about["extra"]["parameters"] == 0 for about in facts["tasks"].values())
    assert made.origin.facts["method"]["name"] == made.title == method
    assert json.loads(json.dumps(facts)) == facts
    assert {task: len(seen) for task, seen in made.origin.inputs.items()} == dict.fromkeys(HEADS, 60)


def test_the_model_is_what_was_fitted(
    experts: Experts, data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Setting, Fitted]] = []
    original = Realign.fit

    def watching(self: Realign, setting: Setting) -> Fitted:
        kept.append((setting, original(self, setting)))
        return kept[-1][1]

    monkeypatch.setattr(Realign, "fit", watching)
    model = fit(experts, "realign", data, FEW, device="cpu")
    setting, found = kept[0]
    assert torch.equal(setting.encoder.flat(model.weights), found.weights)
    assert not torch.equal(found.weights, setting.base)
    batch = setting.inputs.pool.batch(setting.inputs.targets["five"].rows[:9])
    setting.encoder.load(found.weights)
    with torch.no_grad():
        expected = found.classifiers["five"](setting.encoder.features(batch))
        torch.testing.assert_close(model.module("cpu")(**batch)["five"], expected, rtol=1e-4, atol=1e-5)
    model.save(tmp_path / "out")
    again = load(tmp_path / "out")
    assert same(model, again)
    assert again.origin.facts["fit"] == model.origin.facts["fit"]
    assert again.origin.access == "inductive"


def test_a_fit_parses_each_header_once_and_builds_one_module_per_model(berts: Path, data: dict[str, str]) -> None:
    with (
        mock.patch.object(safetensors, "_header", wraps=safetensors._header) as parse,
        mock.patch.object(Skeleton, "build", wraps=Skeleton.build) as build,
    ):
        experts = open_named({task: berts / task for task in HEADS}, base=berts / "base")
        assert tensors_of(fit(experts, "realign", data, FEW, device="cpu", encoding=Encoding(None, "cpu")))
    headers = [call.args[0].path for call in parse.call_args_list]
    assert (len(headers), len(set(headers)), build.call_count) == (4, 4, 4)


def test_test_inputs_make_it_transductive(experts: Experts, data: dict[str, str]) -> None:
    made = fit(experts, "regmean", data, {"inputs": 8}, device="cpu", split="test", limit=12)
    assert made.origin.access == "transductive"
    assert made.origin.facts["fit"]["tasks"]["two"]["inputs"] == 12


def test_realign_is_what_inputs_without_a_method_mean(experts: Experts, data: dict[str, str]) -> None:
    model = merge(experts, data=data, device="cpu", **FEW)
    assert model.title == "realign"
    assert same(model, fit(experts, Realign(**FEW), data, device="cpu"))
    assert merge(experts).title == "task_arithmetic"


def test_heads_can_be_aligned_on_top(experts: Experts, data: dict[str, str]) -> None:
    made = fit(experts, "moma", data, QUICK["moma"], device="cpu")
    aligned = align(made, data, aligner="surgery", options={"steps": 5}, experts=experts)
    assert {"fit", "alignment"} <= set(aligned.origin.facts)
    assert aligned.title == "moma + surgery"
    assert aligned.origin.facts["alignment"]["tasks"]["two"]["extra"]["parameters"] > 0
    assert aligned.encoder is made.encoder


def test_other_dtypes(experts: Experts, data: dict[str, str]) -> None:
    made = fit(experts, "realign", data, FEW, device="cpu", dtype="bfloat16")
    whole = fit(experts, "realign", data, FEW, device="cpu")
    theirs = tensors_of(whole)
    for key, found in tensors_of(made).items():
        assert found.dtype == (torch.bfloat16 if theirs[key].is_floating_point() else theirs[key].dtype)
        assert torch.equal(found, theirs[key].to(found.dtype))


def test_weights_that_do_not_fit_into_the_output(
    experts: Experts, data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wild(self: Realign, setting: Setting) -> Fitted:
        return Fitted(setting.base + 1e6, setting.heads)

    monkeypatch.setattr(Realign, "fit", wild)
    with pytest.raises(NumericalError, match=r"does not fit into F16 after the fit .*; use --dtype float32"):
        fit(experts, "realign", data, FEW, device="cpu", dtype="float16")


def test_each_head_says_how_long_its_texts_are(berts: Path, tmp_path: Path) -> None:
    """The expert of `two` was trained on 4 tokens: teacher and student read as much."""
    shutil.copytree(berts / "two", tmp_path / "two")
    config = json.loads((berts / "two" / "config.json").read_text())
    config["orthomerge"] = {"tuning": {"max_length": 4}}
    (tmp_path / "two" / "config.json").write_text(json.dumps(config))
    experts = open_named({"two": tmp_path / "two", "three": berts / "three"}, base=berts / "base")
    texts = Examples(["it was a very good film", "bad film"], None, "train")
    setting = setting_of(experts, {"two": texts, "three": texts}, CPU, how=Encoding(device="cpu"))
    assert setting.inputs.pool.batch(torch.arange(4))["attention_mask"].sum(1).tolist() == [4, 4, 8, 4]
    for task in setting.tasks:
        setting.encoder.load(setting.tuned(task))
        found = encoded(setting.encoder, setting.inputs, task)
        torch.testing.assert_close(found, setting.inputs.targets[task].features, rtol=1e-4, atol=1e-5)


def test_other_families(tmp_path: Path) -> None:
    """Pictures, whose modules have other names in memory than on disk."""
    write_models("vit", tmp_path)
    experts = open_models("vit", tmp_path)
    images = [*np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), dtype=np.uint8)]
    data = {
        task: Task(task, head.labels, "image", {"train": Examples(images, None, "train")})
        for task, head in experts.heads.items()
    }
    made = fit(experts, "realign", data, {**QUICK["realign"], "copies": 60}, device="cpu")
    assert dict(made.weights.specs) == dict(experts.base.weights.specs)
    for task, logits in made.module("cpu")(pixel_values=torch.zeros(2, 3, 8, 8)).items():
        assert logits.shape == (2, len(experts.heads[task].labels))
    base = tensors_of(experts.base)
    assert any(not torch.equal(tensor, base[key]) for key, tensor in tensors_of(made).items())


class StoppedError(Exception):
    """What a test ends a fit with."""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, stop: int = -1) -> Iterator[list[int]]:
    """The steps that are looked at; the fit ends at the step `stop`."""
    seen, look = list[int](), loop._Run._look

    def watch(self: loop._Run, step: int, *rest: Any) -> None:
        if step == stop:
            raise StoppedError
        seen.append(step)
        look(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_look", watch)
        yield seen


@pytest.mark.parametrize("method", ["realign", "moma", "concrete_am"])
def test_a_killed_fit_goes_on(
    method: str, experts: Experts, data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle, the second run ends with the bits of one that was never stopped."""
    options = {**QUICK[method], "look": 2, **({"copies": 0} if method == "realign" else {})}
    given: dict[str, Any] = {"options": options, "device": "cpu"}
    whole = fit(experts, method, data, **given)
    with watched(monkeypatch, stop=4), pytest.raises(StoppedError):
        fit(experts, method, data, **given, state=tmp_path / "state", save_every=0.0)
    with watched(monkeypatch) as seen:
        assert same(fit(experts, method, data, **given, state=tmp_path / "state", save_every=0.0), whole)
        assert seen[0] == 4
        # Other inputs, options, seeds or precisions are other fits.
        for change in ({"seed": 1}, {"options": {**options, "batch": 3}}, {"limit": 50}, {"precision": "bfloat16"}):
            seen.clear()
            fit(experts, method, data, **{**given, **change}, state=tmp_path / "state")
            assert seen[0] == 0


def test_an_odd_state_is_ignored(experts: Experts, data: dict[str, str], tmp_path: Path) -> None:
    """No file of torch, no dict, a fingerprint of nobody, the right fingerprint and nothing else."""
    options = QUICK["adamerging"]
    whole = fit(experts, "adamerging", data, options, device="cpu", state=tmp_path, save_every=0.0)
    ours = torch.load(tmp_path / "state.pt", weights_only=True)["fingerprint"]
    odd = (b"", b"PK\x03\x04 cut short", torch.zeros(3), {"fingerprint": "else"}, {"fingerprint": ours, "step": 2})
    for content in odd:
        if isinstance(content, bytes):
            (tmp_path / "state.pt").write_bytes(content)
        else:
            torch.save(content, tmp_path / "state.pt")
        assert same(fit(experts, "adamerging", data, options, device="cpu", state=tmp_path), whole)


def test_refusals(experts: Experts, data: dict[str, str], berts: Path) -> None:
    def refused(kind: type[OrthomergeError], words: str, method: str = "realign", **given: Any) -> None:
        options = given.pop("options", FEW)
        with pytest.raises(kind, match=words):
            fit(given.pop("experts", experts), method, given.pop("data", data), options, device="cpu", **given)

    fewer = {task: path for task, path in data.items() if task != "five"}
    refused(RecipeError, "a fit needs inputs of every task, got none of 'five'; give --data five=PATH", data=fewer)
    refused(RecipeError, "data of 'fiv', but no task of that name", data={**data, "fiv": data["five"]})
    refused(IncompatibleError, "two", data={**data, "two": data["three"]})
    refused(RecipeError, "'ties' uses no inputs", "ties", options={})
    refused(RecipeError, "did you mean 'steps'", options={"step": 3})
    refused(RecipeError, "starts from a merge without inputs, and 'moma' needs some", options={**FEW, "start": "moma"})
    alone = open_named({task: berts / task for task in HEADS})
    refused(RecipeError, "needs the model that the experts were fine-tuned from", experts=alone)


def test_heads_must_read_the_encoder_in_one_way(berts: Path, data: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(berts / "two", tmp_path / "two")
    config = json.loads((berts / "two" / "config.json").read_text())
    (tmp_path / "two" / "config.json").write_text(json.dumps({**config, "orthomerge": {"pooling": "mean"}}))
    named = {**{task: berts / task for task in HEADS}, "two": tmp_path / "two"}
    with pytest.raises(
        RecipeError, match=r"'two' and 'three' read the encoder in two ways \(mean and pooler\).*'pooling'"
    ):
        fit(open_named(named, base=berts / "base"), "realign", data, FEW, device="cpu")
    one = open_named(named, base=berts / "base", pooling="mean")
    assert fit(one, "lm_cocktail", data, {"inputs": 4}, device="cpu").title == "lm_cocktail"
