"""All that a fitted method works with, from opened experts and inputs; nothing is written.

One module is built. It computes the experts' features first, is filled with other weights each time, and is then what
is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from orthomerge.core.errors import RecipeError
from orthomerge.core.progress import SILENT, Progress
from orthomerge.fitting.inputs import prepare
from orthomerge.fitting.kinds import Setting
from orthomerge.fitting.layout import FlatEncoder
from orthomerge.merging.merge import chosen_method
from orthomerge.merging.merged import MergedTensors
from orthomerge.models.encoding import Encoding, encode
from orthomerge.models.modules import finished, unshared

if TYPE_CHECKING:
    import torch

    from orthomerge.data.task import Examples
    from orthomerge.models.experts import Experts
    from orthomerge.models.processing import Processor


def setting_of(
    experts: Experts,
    examples: Mapping[str, Examples],
    *,
    device: torch.device,
    seed: int = 0,
    half: bool = False,
    how: Encoding | None = None,
    progress: Progress = SILENT,
) -> Setting:
    """The setting of a fit in which every task has inputs of its own. `how`: experts encode them."""
    how, pooling = how or Encoding(device=str(device)), _pooling(experts)
    teacher = _teacher(experts, examples, how, progress)
    encoder = _encoder(experts, pooling, device)
    progress.stage("preparing the inputs", None)
    return Setting(
        encoder,
        encoder.flat(experts.base.weights),
        tuned=lambda task: encoder.flat(experts.teacher(task).weights),
        merged=lambda method, options: _merged(experts, encoder, method, options, seed=seed),
        heads=experts.heads,
        inputs=prepare(examples, _processors(experts, how), teacher, device=device),
        seed=seed,
        half=half,
        say=lambda text: progress.stage(text, None),
    )


def _pooling(experts: Experts) -> str:
    """The one way in which all heads read the encoder."""
    default = experts.family.default_pooling
    poolings = {task: head.pooling or default for task, head in experts.heads.items()}
    (first, pooling), *rest = poolings.items()
    for task, other in rest:
        if other != pooling:
            raise RecipeError(
                f"the heads of {first!r} and {task!r} read the encoder in two ways ({pooling} and {other}), and a fit "
                "needs one; give it for all as 'pooling', or leave out the experts that differ"
            )
    return pooling


def _teacher(
    experts: Experts, examples: Mapping[str, Examples], how: Encoding, progress: Progress
) -> dict[str, torch.Tensor]:
    """The features [n, d] that each task's expert makes of its own inputs."""
    teacher = {}
    for task, some in examples.items():
        progress.stage(f"encoding {task}", None)
        model = experts.teacher(task)
        teacher[task] = encode(model, some, task=task, how=how).values
        finished(model.encoder)
    return teacher


def _encoder(experts: Experts, pooling: str, device: torch.device) -> FlatEncoder:
    """A module of our own for everything that the fit computes, with any weights."""
    specs = {key: spec.cast("F32") for key, spec in experts.base.weights.specs.items()}
    skeleton = unshared(experts.family, experts.config, specs)
    return FlatEncoder.of(skeleton, partial(experts.family.features, pooling=pooling), device)


def _processors(experts: Experts, how: Encoding) -> dict[str, Processor]:
    """What reads the inputs of each task: its head says how long texts may be."""
    return {task: how.processor or experts.processor.processor(head.max_length) for task, head in experts.heads.items()}


def _merged(
    experts: Experts, encoder: FlatEncoder, method: str, options: Mapping[str, Any], *, seed: int
) -> torch.Tensor:
    """What a method without inputs makes, [P]."""
    name, chosen, _ = chosen_method(experts, method, options, seed=seed)
    if hasattr(chosen, "fit"):
        raise RecipeError(f"a fit starts from a merge without inputs, and {name!r} needs some; use task_arithmetic")
    return encoder.flat(MergedTensors(experts, chosen, "float32"))
