"""Description of a model family: tensor names of encoder and head, and poolings. The table is in `families`.

Tensor names are those on disk, as stock transformers writes them; *canonical* names are the encoder's own
(`encoder.layer.0...`, without the `bert.` under which a classifier keeps it). A pooling computes features [B, d] from
the encoder's output, the batch, and the encoder's config (None if it has none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, Protocol

from orthomerge.core.errors import RecipeError
from orthomerge.files.checkpoint import Checkpoint
from orthomerge.models.heads import Activation, Extra, Head

if TYPE_CHECKING:
    import torch


Network = Callable[..., Any]  # a module, or a function of its parameters
Batch = Mapping[str, "torch.Tensor"]
Forward = Callable[[Network, Batch], Any]  # runs an encoder on a batch and returns its output


class Output(Protocol):
    """Output of a stock encoder; most have only one of the last two."""

    last_hidden_state: torch.Tensor
    pooler_output: torch.Tensor | None
    image_embeds: torch.Tensor


Pooling = Callable[[Any, Batch, Any], "torch.Tensor"]


def _plain(encoder: Network, batch: Batch) -> Any:
    return encoder(**batch)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the patterns, in which `*` stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class HeadLayout:
    """Names of a head's linear layers in a checkpoint, first to last (at most two), and the activation between."""

    layers: tuple[str, ...]
    activation: Activation | None = None

    def fits(self, head: Head) -> bool:
        """Whether a head has as many layers, and the same activation between two."""
        return not head.normalise and head.activation == self.activation

    def parts(self) -> dict[str, str]:
        """Map parts of a head (`weight`, `hidden.bias`, ...) to tensor names, first layer first."""
        layers = zip(("hidden.", "")[-len(self.layers) :], self.layers, strict=True)
        return {f"{part}{piece}": f"{layer}.{piece}" for part, layer in layers for piece in ("weight", "bias")}


@dataclass(frozen=True)
class Family:
    """One model family.

    `prefix`: where a classifier keeps the encoder (`"bert."`). `poolings`: by name, that of the stock classifier
    first; `forward`: runs the encoder for all of them. `optional`: patterns of encoder tensors that experts may lack
    (an unused pooler); they are copied from the base. `foreign`: patterns of tensors outside the encoder that are left
    out (pre-training heads). `tied`: name -> name of the tensor that it repeats. `architecture`: the stock class of
    encoder and head, None if there is none. `adapt`: translates tensor names of other formats and versions.
    """

    name: str
    title: str
    model_types: tuple[str, ...]
    modality: Literal["text", "image", "other"]
    encoder_class: str
    prefix: str
    head: HeadLayout | None
    poolings: Mapping[str, Pooling]
    forward: Forward = _plain
    architecture: str | None = None
    optional: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Checkpoint], Checkpoint] | None = None

    @property
    def default_pooling(self) -> str:
        return next(iter(self.poolings))

    def adapted(self, checkpoint: Checkpoint) -> Checkpoint:
        """Rename the tensors of a checkpoint to the names of stock transformers."""
        return self.adapt(checkpoint) if self.adapt else checkpoint

    def features(self, encoder: Network, batch: Batch, pooling: str) -> torch.Tensor:
        """Run the encoder once and pool its output to features [B, d]."""
        return self.poolings[pooling](self.forward(encoder, batch), batch, getattr(encoder, "config", None))

    def may_lack(self, name: str, pooling: str) -> bool:
        """Whether an expert may lack an encoder tensor: it is optional, and the pooling does not use it."""
        through_pooler = pooling == "pooler" and name.startswith("pooler.")
        return not through_pooler and matches(name, self.optional)


def classifier_config(config: Mapping[str, Any], family: Family, labels: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """Make the config of the stock classifier from that of an encoder."""
    if config.get("model_type") == "clip_vision_model":  # the stock classifier needs the config of a whole CLIP
        config = {"model_type": "clip", "vision_config": dict(config)}
    return {
        **config,
        "dtype": dtype,
        "architectures": [family.architecture],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def why_not_stock(family: Family, classifier: Head | Extra) -> str | None:
    """Reason why no stock class can hold a classifier, or None if one can."""
    if not isinstance(classifier, Head):
        return (
            f"its classifier has a {classifier.kind!r} module before the head, which transformers cannot store; "
            "align the merge with an aligner that returns a head, such as auto"
        )
    if family.architecture is None or family.head is None:
        return f"transformers has no classifier for the family {family.name!r}"
    pooling = classifier.pooling or family.default_pooling
    if pooling != family.default_pooling:
        return f"{family.architecture} uses the pooling {family.default_pooling!r}, this head {pooling!r}"
    if not family.head.fits(classifier):
        return f"the layers of the head differ from those of {family.architecture}"
    return None


def head_names(family: Family, head: Head) -> dict[str, str]:
    """Map parts of a head to names on disk: those of the stock classifier if it has as many layers."""
    parts = head.tensors()
    if family.head is None or (family.head.activation is None) != (head.activation is None):
        return {part: part for part in parts}
    return {part: name for part, name in family.head.parts().items() if part in parts}


def named_tensors(family: Family, head: Head) -> dict[str, torch.Tensor]:
    tensors = head.tensors()
    return {name: tensors[part] for part, name in head_names(family, head).items()}


def cls(output: Output, batch: Batch, config: Any) -> torch.Tensor:
    """Last hidden state at the first token."""
    return output.last_hidden_state[:, 0]


def mean(output: Output, batch: Batch, config: Any) -> torch.Tensor:
    """Mean of the last hidden states over the attention mask, so that padding does not count."""
    if "attention_mask" not in batch:
        raise RecipeError(
            "pooling 'mean' needs an 'attention_mask' in every batch, or it would average over padding; "
            f"got {', '.join(sorted(batch)) or 'nothing'}: let the tokenizer return the mask"
        )
    hidden, mask = output.last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    # Summed in float32: half precision overflows or rounds on long texts.
    return ((hidden.float() * mask).sum(1) / mask.sum(1)).to(hidden.dtype)


def pooler(output: Output, batch: Batch, config: Any) -> torch.Tensor:
    """Pooled output of the encoder: a dense layer and tanh over the first token."""
    if output.pooler_output is None:
        raise RecipeError("pooling 'pooler' needs an encoder with a pooler, and this one has none; use 'cls' or 'mean'")
    return output.pooler_output


def projection(output: Output, batch: Batch, config: Any) -> torch.Tensor:
    return output.image_embeds


def patches(first: int) -> Pooling:
    """Mean of an image's patch tokens, which start at position `first` after [CLS] and other special tokens."""

    def patch_mean(output: Output, batch: Batch, config: Any) -> torch.Tensor:
        return output.last_hidden_state[:, first:].mean(1)

    return patch_mean


def cls_mean(output: Output, batch: Batch, config: Any) -> torch.Tensor:
    """Features of DINOv2 [B, 2d]: the first token, and the mean of the patch tokens."""
    import torch

    return torch.cat([cls(output, batch, config), patches(1)(output, batch, config)], dim=1)


def eos(output: Output, batch: Batch, config: Any) -> torch.Tensor:
    """Last hidden state of T5's decoder at the last end-of-sequence token of each text."""
    import torch

    token = _special_token(config, "eos_token_id")
    ids = batch["input_ids"]
    ends = ids == token
    if not bool(ends.any(1).all()):
        raise RecipeError(
            f"T5 features are read at the end-of-sequence token {token}, but some texts "
            "have none; let T5's own tokenizer add it"
        )
    last = (ends * torch.arange(ids.shape[1], device=ids.device)).argmax(1)
    return output.last_hidden_state[torch.arange(len(ids), device=ids.device), last]


def shifted_decoder(encoder: Network, batch: Batch) -> Any:
    """Run T5 with the input itself, shifted by one, as the decoder's input."""
    import torch

    start, ids = _special_token(getattr(encoder, "config", None), "decoder_start_token_id"), batch["input_ids"]
    shifted = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
    return encoder(**{"decoder_input_ids": shifted, "use_cache": False, **batch})


def _special_token(config: Any, name: str) -> int:
    token: int | None = getattr(config, name, None)
    if token is None:
        raise RecipeError(
            f"T5 features need {name!r}: set it in the encoder's config; if the encoder is a function, give it that "
            "config as attribute `config`"
        )
    return token
