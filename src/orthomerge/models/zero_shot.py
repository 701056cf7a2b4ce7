"""Zero-shot head of CLIP from class names: templates are filled in, encoded by the text tower, and averaged.

Radford et al. 2021, arXiv 2103.00020, section 3.1.4. With u(x) = x / ||x||, text features t [C, T, d] of C
classes and T templates, and the logit scale s: w_c = u(mean_j u(t_cj)), W = exp(s) w [C, d], bias zero. The
head normalises its features, so that logits are exp(s) times cosines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.family import Family
from orthomerge.models.heads import Head, Linear
from orthomerge.models.processors import ProcessorSource
from orthomerge.models.skeleton import Skeleton, quiet, tower_config
from orthomerge.models.tensors import FileTensors

_BLANK = "{}"
_LONGEST = 1 << 20  # tokens: long prompts are refused, not cut
_TOWER = Family(
    name="clip_text",
    title="CLIP's text tower",
    model_types=("clip",),
    modality="text",
    encoder_class="CLIPTextModelWithProjection",
    prefix="",
    head=None,
    poolings={},
    optional=("*.position_ids",),
)


def zero_shot_head(folder: Path, classes: Sequence[str], templates: Sequence[str]) -> Head:
    """Make the head of class names and templates (`a photo of a {}.`) with the CLIP in `folder`."""
    if not classes or not templates:
        raise RecipeError("a zero-shot head needs at least one class name and one template")
    for template in templates:
        if template.count(_BLANK) != 1:
            raise RecipeError(f"a template must contain '{_BLANK}' exactly once, for the class name, got {template!r}")
    processor: Any = ProcessorSource.of([folder], "text", {"model_type": "clip"}).processor(_LONGEST)
    model, scale = _tower(folder)
    with torch.inference_mode():
        rows = []
        for name in classes:
            features = _encode(model, processor.tokenizer, [template.replace(_BLANK, name) for template in templates])
            rows.append(normalize(normalize(features, dim=-1).mean(0), dim=-1))
        weight = torch.stack(rows) * scale.exp()
    # A clone outside inference mode, so that it can be trained and saved.
    return Head(Linear(weight.clone(), torch.zeros(len(rows))), tuple(classes), normalise=True)


def _tower(folder: Path) -> tuple[Any, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    names = [name for name in checkpoint if name.startswith(("text_model.", "text_projection."))]
    if not names or "logit_scale" not in checkpoint:
        raise CheckpointError(
            f"{folder} must be a CLIP with a text tower, which makes heads from class names (it lacks "
            f"{'text_model.*' if not names else 'logit_scale'}); give the whole CLIP as base, or the heads' 'layers'"
        )
    tensors = FileTensors({name: (checkpoint, name) for name in names})
    tower = Skeleton.of(_TOWER, tower_config(checkpoint.config or {}, "text_config"), tensors)
    return tower.module.float(), checkpoint["logit_scale"].float()


def _encode(model: Any, tokenizer: Any, prompts: list[str]) -> torch.Tensor:
    with quiet():
        tokens = tokenizer(prompts, padding=True, return_tensors="pt")
    longest = model.config.max_position_embeddings
    for prompt, length in zip(prompts, tokens["attention_mask"].sum(1).tolist(), strict=True):
        if length > longest:
            raise RecipeError(f"prompts must have at most {longest} tokens, but {prompt!r} has {length}; shorten it")
    features: torch.Tensor = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).text_embeds
    return features
