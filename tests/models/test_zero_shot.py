"""The zero-shot head against CLIP's own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.making import HEADS, batch_for, build, nudged, open_models, save, write_clip, write_tokenizer

import orthomerge as om
from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.models.families import family
from orthomerge.models.skeleton import quiet
from orthomerge.models.zero_shot import zero_shot_head

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
REFUSED = [
    *((CLASSES, ["a {}", template], BLANKS) for template in ("a photo", "{} and {}", "{0}")),
    *(((), TEMPLATES, NOTHING), (CLASSES, (), NOTHING)),
]


@pytest.mark.parametrize(("classes", "templates", "message"), REFUSED)
def test_what_makes_no_head(classes: Any, templates: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        zero_shot_head(tmp_path, classes, templates)


def test_what_clip_cannot_read_is_refused(folder: Path, tmp_path: Path) -> None:
    """Prompts that are too long are not cut; a tokenizer may be broken or not there, and the text tower may lack."""
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
    om.merge(experts, "task_arithmetic", scale=0.0).save(tmp_path / "out")
    assert list(experts.parts.copied) == ["visual_projection.weight"]
    model = om.load(tmp_path / "out")
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
