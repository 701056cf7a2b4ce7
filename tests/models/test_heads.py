"""Heads, their kinds, and the poolings that they read: by hand, against CLIP's own logits, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.models.making import (
    HEADS,
    batch_for,
    build,
    nudged,
    open_models,
    reloaded,
    save,
    write_clip,
    write_tokenizer,
)
from torch.nn.functional import pad

import orthomerge as om
from orthomerge.core.errors import CheckpointError, IncompatibleError, NumericalError, RecipeError
from orthomerge.models.families import FAMILIES, family
from orthomerge.models.family import eos, mean, pooler, shifted_decoder
from orthomerge.models.heads import KINDS, Head, Linear, head_kind
from orthomerge.models.skeleton import quiet
from orthomerge.models.zero_shot import zero_shot_head

W = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
B = torch.tensor([10.0, 20.0, 30.0])
X = torch.tensor([[3.0, 4.0]])
LABELS = ("a", "b", "c")


def test_a_linear_head() -> None:
    head = Head(Linear(W, B), LABELS)
    assert head(X).tolist() == [[13.0, 28.0, 37.0]]
    assert Head(Linear(W), LABELS)(X).tolist() == [[3.0, 8.0, 7.0]]
    assert (head.width, list(head.tensors())) == (2, ["weight", "bias"])
    assert list(Head(Linear(W), LABELS).tensors()) == ["weight"]
    head = Head(Linear(W), LABELS, normalise=True)
    assert torch.allclose(head(X), torch.tensor([[0.6, 1.6, 1.4]]))
    assert torch.equal(head(7 * X), head(X))
    # A head in half precision reads features in float32: they have more digits than bfloat16.
    weight = torch.tensor([[1.0, 2.0], [0.5, -1.0]]).bfloat16()
    head = Head(Linear(weight, torch.ones(2).bfloat16()), ("a", "b"))
    expected = torch.tensor([[8.0009765625, -1.49951171875]])
    torch.testing.assert_close(head(torch.tensor([[1.0009765625, 3.0]])), expected, rtol=0, atol=0)


def test_a_head_with_a_hidden_layer() -> None:
    hidden = Linear(torch.tensor([[1.0, 0.0, 0.0], [0.0, -1.0, 0.0]]), torch.tensor([0.5, 0.0]))
    head = Head(Linear(W, B), LABELS, hidden, "relu")
    # hidden: [2 + 0.5, -3] -> relu [2.5, 0]
    assert head(torch.tensor([[2.0, 3.0, 9.0]])).tolist() == [[12.5, 20.0, 32.5]]
    assert (head.width, list(head.tensors())) == (3, ["weight", "bias", "hidden.weight", "hidden.bias"])
    for activation in ("tanh", "gelu"):
        expected = getattr(torch, activation, torch.nn.functional.gelu)(hidden(torch.ones(1, 3))) @ W.T + B
        assert torch.allclose(Head(Linear(W, B), LABELS, hidden, activation)(torch.ones(1, 3)), expected)


def test_other_tensors_of_the_same_head() -> None:
    hidden = Linear(torch.ones(2, 3))
    head = Head(Linear(W, B), LABELS, hidden, "relu", normalise=True)
    twice = head.with_tensors({name: 2 * tensor for name, tensor in head.tensors().items()})
    assert (twice.labels, twice.activation, twice.normalise) == (LABELS, "relu", True)
    assert twice.hidden is not None
    assert (twice.output.weight.tolist(), twice.hidden.weight.tolist()) == ((2 * W).tolist(), [[2.0] * 3] * 2)
    assert twice.hidden.bias is None
    assert Head(Linear(W), LABELS).with_tensors({"weight": 3 * W}).output.bias is None


def test_rows_are_matched_by_name() -> None:
    head = Head(Linear(W, B), LABELS)
    turned = head.reordered(("c", "a", "b"))
    assert turned.labels == ("c", "a", "b")
    assert turned(X).tolist() == [[37.0, 13.0, 28.0]]
    assert turned.reordered(LABELS)(X).tolist() == head(X).tolist()
    assert Head(Linear(W), LABELS).reordered(("b", "c", "a")).output.bias is None
    hidden = Linear(torch.eye(2))
    both = Head(Linear(W), LABELS, hidden, "tanh", normalise=True).reordered(("b", "c", "a"))
    assert (both.hidden, both.activation, both.normalise) == (hidden, "tanh", True)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(IncompatibleError, match=r"3 rows but 2 labels \('a', 'b'\); give one label per row"):
        Head(Linear(W), ("a", "b"))
    for labels, others in ((("a", "b", "d"), "'c', 'd'"), (("a", "b"), "'c'")):
        with pytest.raises(IncompatibleError, match=f"label sets differ: {others}"):
            Head(Linear(W), LABELS).reordered(labels)
    more: Any
    for more in ({"hidden": Linear(torch.eye(2))}, {"activation": "tanh"}):
        with pytest.raises(IncompatibleError, match="hidden layer and its activation go together; give both or nei"):
            Head(Linear(W), LABELS, **more)


# Kinds


def test_single_label_by_hand() -> None:
    kind = head_kind("single-label")
    logits = torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    assert kind.choices(logits).tolist() == [1, 0]
    assert kind.right(kind.choices(logits), torch.tensor([1, 1])).tolist() == [True, False]
    assert kind.targets(logits).tolist() == [[-1.0, 1.0], [1.0, -1.0]]
    p, q = logits.softmax(1), logits.flip(1).softmax(1)
    torch.testing.assert_close(kind.divergence(logits.flip(1), logits), (p * (p / q).log()).sum(1))
    assert kind.divergence(logits + 7, logits).abs().max() < 1e-6  # what all labels share does not count
    (prediction, _) = kind.decode(logits, ["no", "yes"])
    assert prediction.label == "yes"
    assert prediction.score == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert kind.metric == "accuracy"


def test_kinds_that_are_unknown_and_logits_that_are_nan() -> None:
    assert list(KINDS) == ["single-label"]
    with pytest.raises(RecipeError, match="unknown kind of head 'singel-label'; did you mean 'single-label'"):
        head_kind("singel-label")
    with pytest.raises(NumericalError, match="1 of 2 rows of logits hold NaN"):
        head_kind("single-label").choices(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]))


# Poolings

IDS = torch.tensor([[7, 1, 0], [8, 9, 1]])


def test_mean_by_hand() -> None:
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [100.0, 100.0]], [[1.0, 1.0], [2.0, 2.0], [6.0, 0.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    features = mean(SimpleNamespace(last_hidden_state=hidden), {"attention_mask": mask}, None)
    assert features.tolist() == [[2.0, 3.0], [3.0, 1.0]]
    # A sum of half precision would overflow.
    hidden, mask = torch.full((1, 100, 1), 30_000.0, dtype=torch.float16), torch.ones(1, 100, dtype=torch.long)
    features = mean(SimpleNamespace(last_hidden_state=hidden), {"attention_mask": mask}, None)
    assert (features.dtype, features.item()) == (torch.float16, 30_000.0)


def test_what_poolings_refuse() -> None:
    with pytest.raises(RecipeError, match=r"needs an 'attention_mask' in every batch.*got input_ids"):
        mean(SimpleNamespace(last_hidden_state=torch.zeros(2, 3, 4)), {"input_ids": IDS}, None)
    with pytest.raises(RecipeError, match="this one has none; use 'cls' or 'mean'"):
        pooler(SimpleNamespace(pooler_output=None), {"input_ids": IDS}, None)
    with pytest.raises(RecipeError, match="end-of-sequence token 1, but some texts have none"):
        eos(SimpleNamespace(), {"input_ids": torch.tensor([[7, 1], [7, 8]])}, SimpleNamespace(eos_token_id=1))
    for encoder in (lambda **batch: batch, decoder(decoder_start_token_id=None)):
        with pytest.raises(RecipeError, match="need 'decoder_start_token_id': set it in the encoder's"):
            shifted_decoder(encoder, {"input_ids": IDS})
    for config in (None, SimpleNamespace(eos_token_id=None)):
        with pytest.raises(RecipeError, match="T5 features need 'eos_token_id'"):
            eos(SimpleNamespace(), {"input_ids": IDS}, config)


def decoder(**config: Any) -> Mock:
    """One that gives token number and position back as features, so that the test can see which one was read."""

    def run(input_ids: torch.Tensor, decoder_input_ids: torch.Tensor, **more: Any) -> SimpleNamespace:
        place = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return SimpleNamespace(last_hidden_state=torch.stack([decoder_input_ids, place], dim=-1).float())

    return Mock(side_effect=run, config=SimpleNamespace(**config))


def test_eos_reads_the_last_end_of_each_text_and_shifts_the_decoder() -> None:
    encoder = decoder(eos_token_id=1, decoder_start_token_id=0)
    ids = torch.tensor([[7, 1, 0, 0], [1, 9, 5, 1]])
    assert FAMILIES["t5"].features(encoder, {"input_ids": ids}, "eos").tolist() == [[7.0, 1.0], [5.0, 3.0]]
    assert encoder.call_args.kwargs["decoder_input_ids"].tolist() == [[0, 7, 1, 0], [0, 1, 9, 5]]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.modality == "text"])
def test_more_padding_changes_nothing(name: str) -> None:
    """Whatever texts are filled with, the mask leaves it out."""
    family = FAMILIES[name]
    encoder = build(family.encoder_class, name)
    batch = batch_for(family, encoder.config)
    padded = {name: pad(tensor, (0, 3)) for name, tensor in batch.items()}
    with torch.no_grad():
        for pooling in family.poolings:
            features, expected = family.features(encoder, padded, pooling), family.features(encoder, batch, pooling)
            torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)


# Zero-shot heads

CLASSES = ("cat", "dog", "bee")
TEMPLATES = ("a photo of a {}.", "art of the {}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_clip(tmp_path / "clip")


def tokens(folder: Path, prompts: list[str]) -> Any:
    with quiet():
        from transformers import CLIPTokenizer

        tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer(prompts, padding=True, return_tensors="pt")


def test_against_the_text_features_of_clip_by_hand(folder: Path) -> None:
    model = build("CLIPModel", "clip")
    head = zero_shot_head(folder, CLASSES, TEMPLATES)
    rows = []
    with torch.no_grad():
        for name in CLASSES:
            total = torch.zeros(8)
            for template in TEMPLATES:
                text = model.get_text_features(**tokens(folder, [template.format(name)])).pooler_output[0]
                total += text / text.norm()
            average = total / len(TEMPLATES)
            rows.append(average / average.norm() * model.logit_scale.exp())
    torch.testing.assert_close(head.output.weight, torch.stack(rows))
    assert head.output.bias is not None
    assert head.output.bias.tolist() == [0.0, 0.0, 0.0]
    assert head.labels == CLASSES
    assert head.normalise
    assert not head.output.weight.is_inference()
    assert zero_shot_head(folder, ["cat"], ["a {b} of {}"]).output.weight.shape == (1, 8)  # braces are only text


BLANKS, NOTHING = r"must contain '\{\}' exactly once", "at least one class name and one template"
REFUSED: list[Any] = [
    *((CLASSES, ["a {}", template], BLANKS) for template in ("a photo", "{} and {}", "{0}")),
    *(((), TEMPLATES, NOTHING), (CLASSES, (), NOTHING)),
]


def test_what_clip_cannot_read_is_refused(folder: Path, tmp_path: Path) -> None:
    """Prompts that are too long are not cut; a tokenizer may be broken or not there, and the text tower may lack."""
    for classes, templates, message in REFUSED:
        with pytest.raises(RecipeError, match=message):
            zero_shot_head(folder, classes, templates)
    with pytest.raises(RecipeError, match=r"prompts must have at most 16 tokens, but .* has 22; shorten it"):
        zero_shot_head(folder, ["cat", "b" * 20], ["{}"])
    save(build("CLIPForImageClassification", "clip_classifier"), tmp_path / "vision")
    write_tokenizer(tmp_path / "vision")
    with pytest.raises(CheckpointError, match=r"must be a CLIP with a text tower, .* \(it lacks text_model\.\*\)"):
        zero_shot_head(tmp_path / "vision", CLASSES, TEMPLATES)
    (folder / "vocab.json").write_text("{")
    with pytest.raises(CheckpointError, match="transformers cannot load the tokenizer of"):
        zero_shot_head(folder, CLASSES, TEMPLATES)
    (folder / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"has no vocabulary .*vocab.json and merges.txt\); copy"):
        zero_shot_head(folder, CLASSES, TEMPLATES)


def test_one_template_gives_the_logits_of_clip(folder: Path, tmp_path: Path) -> None:
    """In a merge whose experts are towers alone, of which nothing is taken."""
    base = build("CLIPModel", "clip")
    folder.rename(tmp_path / "base")
    for seed, task in enumerate(HEADS):
        with quiet():
            import transformers

            tower = transformers.CLIPVisionModel(base.config.vision_config)
            tower.load_state_dict(nudged(base, seed).vision_model.state_dict())
        save(tower, tmp_path / task)
    experts = open_models("clip", tmp_path)
    model = reloaded(om.merge(experts, "task_arithmetic", scale=0.0), tmp_path / "out")
    assert list(experts.parts.copied) == ["visual_projection.weight"]
    images = batch_for(family("clip"), base.config)
    logits = model.module("cpu")(**images)
    prompts = [f"the {name}" for name in HEADS["two"]["classes"]]
    with torch.no_grad():
        expected = base(**images, **tokens(tmp_path / "base", prompts)).logits_per_image
    torch.testing.assert_close(logits["two"], expected, rtol=1e-5, atol=1e-5)
    assert logits["one"].shape == (4, 2)
    assert not list((tmp_path / "out").rglob("config.json"))  # no stock class computes such a head
    with pytest.raises(RecipeError, match="no classifier for the family 'clip'"):
        om.export(model, tmp_path / "x", task="one")
