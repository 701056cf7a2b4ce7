"""Every tensor of a checkpoint is placed: encoder, head, left out for a reason, or unknown; nothing is guessed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.making import build, nudged, save, tensors_of, write_clip, write_models

import orthomerge as om
from orthomerge.core.errors import CheckpointError, IncompatibleError
from orthomerge.files.checkpoint import Checkpoint, Spec
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.families import FAMILIES, family, generic
from orthomerge.models.family import Family, HeadLayout
from orthomerge.models.names import vision_names
from orthomerge.models.split import Split, split_base, split_expert

BERT, ROBERTA, T5 = FAMILIES["bert"], FAMILIES["roberta"], FAMILIES["t5"]

WORDS, QUERY = "embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight"
NORM, POOLER = "encoder.layer.0.output.LayerNorm.weight", "pooler.dense.weight"
SHAPES = {WORDS: (10, 4), QUERY: (4, 4), NORM: (4,), POOLER: (4, 4)}
ENCODER = {name: Spec(shape, "F32") for name, shape in SHAPES.items()}


def specs(*names: str) -> dict[str, Spec]:
    return dict.fromkeys(names, Spec((4, 4), "F32"))


def under(prefix: str, encoder: dict[str, Spec] = ENCODER) -> dict[str, Spec]:
    """A classifier of three classes with its encoder under a prefix."""
    outer = prefix.removesuffix("bert.")
    head = {f"{outer}classifier.weight": Spec((3, 4), "F32"), f"{outer}classifier.bias": Spec((3,), "F32")}
    return {prefix + name: spec for name, spec in encoder.items()} | head


def expert(tensors: dict[str, Spec], family: Family = BERT, **options: object) -> Split:
    return split_expert(tensors, family, ENCODER, **{"pooling": "pooler", **options})  # type: ignore[arg-type]


def accounted(split: Split, tensors: dict[str, Spec]) -> None:
    """Every name exactly once."""
    placed = [*split.names.values(), *split.head.values(), *split.left_out, *split.unknown]
    assert sorted(placed) == sorted(tensors)


# The base


@pytest.mark.parametrize("outer", ["", "model.", "_orig_mod.module.", "state_dict."])
@pytest.mark.parametrize("inner", ["", "bert."])
def test_a_base_is_unwrapped(outer: str, inner: str) -> None:
    tensors = {outer + inner + name: spec for name, spec in ENCODER.items()}
    split = split_base(tensors, BERT)
    assert split.names == {name: outer + inner + name for name in ENCODER}
    assert (split.left_out, split.unknown, split.prefixes) == ({}, (), (outer + inner,))
    accounted(split, tensors)


def test_a_base_with_heads_of_its_own() -> None:
    tensors = under("module.bert.") | specs("module.cls.predictions.bias", "module.strange.weight")
    split = split_base(tensors, BERT)
    assert split.names == {name: f"module.bert.{name}" for name in ENCODER}
    left_out = dict.fromkeys(("module.classifier.weight", "module.classifier.bias"), "the base's own head")
    assert split.left_out == {**left_out, "module.cls.predictions.bias": "not part of the encoder"}
    assert split.unknown == ("module.strange.weight",)
    accounted(split, tensors)
    for pattern in ("module.strange.*", "strange.*", "*strange*"):
        ignoring = split_base(tensors, BERT, ignore=(pattern,))
        assert (ignoring.left_out["module.strange.weight"], ignoring.unknown) == ("ignored as asked", ())


def test_a_base_with_a_given_prefix() -> None:
    tensors = specs("net.body.a", "net.body.b", "net.top.weight")
    split = split_base(tensors, generic("net.body"), prefix="net.body.")
    assert split.names == {"a": "net.body.a", "b": "net.body.b"}
    assert split.unknown == ("net.top.weight",)
    assert split_base(tensors, generic("nowhere"), prefix="nowhere.").names == {}
    assert split_base({}, BERT).names == {}


TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
SHARED = "shared.weight"
HELD = [(SHARED,), TWINS, TWINS[::-1], TWINS[:1], TWINS[1:], (SHARED, *TWINS), (*TWINS, SHARED)]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("prefix", ["", "module.transformer."])
def test_tied_weights_are_kept_once(held: tuple[str, ...], prefix: str) -> None:
    """In a base and in an expert: the shared tensor, or the first of its twins."""
    kept, block = SHARED if SHARED in held else held[0], "encoder.block.0.weight"
    base = specs(*(prefix + name for name in (*held, block)))
    tuned = base | specs(f"{prefix}lm_head.weight")
    splits = split_base(base, T5), split_expert(tuned, T5, specs(SHARED, block), pooling="eos")
    for tensors, split in zip((base, tuned), splits, strict=True):
        assert split.names == {SHARED: prefix + kept, block: prefix + block}
        tied = {name for name, why in split.left_out.items() if why == "tied to shared.weight"}
        assert tied == {prefix + name for name in held if name != kept}
        accounted(split, tensors)


# Experts


@pytest.mark.parametrize("prefix", ["", "bert.", "module.", "model.bert.", "module.model.bert.", "net.backbone."])
def test_the_prefix_of_an_expert_is_found(prefix: str) -> None:
    tensors = under(prefix)
    split = expert(tensors)
    assert split.names == {name: prefix + name for name in ENCODER}
    assert (split.prefixes, split.unknown, split.left_out) == ((prefix,), (), {})
    outer = prefix.removesuffix("bert.")
    assert split.head == {"weight": f"{outer}classifier.weight", "bias": f"{outer}classifier.bias"}
    accounted(split, tensors)


def test_weight_and_bias_of_a_head_come_from_one_place() -> None:
    head = specs("classifier.bias", "classifier.weight")
    outside = expert({f"backbone.{name}": spec for name, spec in ENCODER.items()} | head)
    assert outside.head == {"weight": "classifier.weight", "bias": "classifier.bias"}
    tensors = under("module.bert.") | head
    del tensors["module.classifier.bias"]
    split = expert(tensors)
    assert split.head == {"weight": "module.classifier.weight"}
    assert split.unknown == ("classifier.bias", "classifier.weight")


def test_two_encoders_in_one_checkpoint_are_not_told_apart_by_guessing() -> None:
    """The one is taken whose shapes fit, or that holds more; nothing else would stop the first from being taken."""
    tensors = under("student.bert.") | under("teacher.bert.")
    split = expert(tensors)
    assert sorted(split.prefixes) == ["student.bert.", "teacher.bert."]
    chosen = expert(tensors, prefix="teacher.bert.")
    assert chosen.prefixes == ("teacher.bert.",)
    assert chosen.names[WORDS] == f"teacher.bert.{WORDS}"
    assert chosen.head["weight"] == "teacher.classifier.weight"
    assert set(chosen.unknown) == set(under("student.bert."))
    assert expert(tensors, prefix="teacher.bert") == chosen  # the point is understood
    assert expert(under("") | under("bert.")).prefixes == ("bert.", "")
    tensors = under("student.bert.", ENCODER | {WORDS: Spec((10, 2), "F32")}) | under("teacher.bert.")
    assert expert(tensors).prefixes == ("teacher.bert.",)
    more = expert(under("bert.") | specs(f"ema.{WORDS}"))
    assert (more.prefixes, more.unknown) == (("bert.",), (f"ema.{WORDS}",))
    lacking = {name: spec for name, spec in ENCODER.items() if name != QUERY}
    both = expert(under("student.bert.", lacking) | under("teacher.bert.", lacking))
    assert sorted(both.prefixes) == ["student.bert.", "teacher.bert."]


def test_missing_tensors_and_wrong_shapes_are_for_others_to_refuse() -> None:
    split = expert(under("module.bert.", {WORDS: Spec((11, 4), "F32"), NORM: ENCODER[NORM]}))
    assert (set(split.names), split.prefixes) == ({WORDS, NORM}, ("module.bert.",))
    nothing = expert(specs("conv.weight", "fc.weight"))
    assert (nothing.names, nothing.unknown, nothing.prefixes) == ({}, ("conv.weight", "fc.weight"), ("bert.",))
    wrong = expert(under("bert."), prefix="nowhere.")
    assert (wrong.names, wrong.prefixes) == ({}, ("nowhere.",))


def test_what_an_expert_may_have_beside_its_encoder() -> None:
    more = ("bert.embeddings.position_ids", "cls.predictions.bias", "loss.weight", "optimizer.step")
    tensors = under("bert.") | specs(*more, "bert.extra.weight")
    split = expert(tensors, ignore=("optimizer.*",))
    assert split.left_out == {
        "bert.embeddings.position_ids": "optional, and not in the base",
        "cls.predictions.bias": "not part of the encoder",
        "optimizer.step": "ignored as asked",
    }
    assert split.unknown == ("bert.extra.weight", "loss.weight")
    accounted(split, tensors)


def test_the_pooler_is_needed_only_where_features_are_read_through_it() -> None:
    assert (BERT.may_lack(POOLER, "pooler"), BERT.may_lack(POOLER, "cls")) == (False, True)
    # A base without a pooler and experts with one.
    reference = {name: spec for name, spec in ENCODER.items() if name != POOLER}
    split = split_expert(under("bert."), BERT, reference, pooling="cls")
    assert split.left_out == {f"bert.{POOLER}": "optional, and not in the base"}
    split = split_expert(under("bert."), BERT, reference, pooling="pooler")
    assert split.unknown == (f"bert.{POOLER}",)
    # And a base of optional tensors only.
    split = split_expert(specs("bert.pooler.dense.weight"), BERT, {POOLER: ENCODER[POOLER]}, pooling="cls")
    assert (split.prefixes, split.names) == (("bert.",), {POOLER: f"bert.{POOLER}"})


def test_heads_of_two_layers_and_under_other_names() -> None:
    layout = ROBERTA.head
    assert layout is not None
    tensors = {f"roberta.{name}": spec for name, spec in ENCODER.items()} | specs(*layout.parts().values())
    split = split_expert(tensors, ROBERTA, ENCODER, pooling="cls")
    assert split.head == layout.parts()
    assert split.head["hidden.bias"] == "classifier.dense.bias"
    accounted(split, tensors)
    # Under another name.
    tensors = under("module.bert.") | specs("module.fc.weight", "top.weight", "top.bias")
    split = expert(tensors, layout=HeadLayout(("fc",)))
    assert split.head == {"weight": "module.fc.weight"}
    assert split.unknown == ("module.classifier.bias", "module.classifier.weight", "top.bias", "top.weight")
    assert expert(tensors, layout=HeadLayout(("top",))).head == {"weight": "top.weight", "bias": "top.bias"}
    assert expert(tensors, layout=HeadLayout(("nowhere",))).head == {}
    # A family without heads has those that are named.
    tensors = {f"body.{name}": spec for name, spec in ENCODER.items()} | specs("fc.weight", "fc.bias")
    split = split_expert(tensors, generic("body"), ENCODER, pooling="output")
    assert (split.head, split.unknown) == ({}, ("fc.bias", "fc.weight"))
    split = split_expert(tensors, generic("body"), ENCODER, pooling="output", layout=HeadLayout(("fc",)))
    assert (split.head, split.unknown) == ({"weight": "fc.weight", "bias": "fc.bias"}, ())


def test_tied_weights_must_be_equal(tmp_path: Path) -> None:
    """A T5 that stores its embedding twice is fine as long as both copies are the same."""
    write_models("t5", tmp_path)
    path = tmp_path / "one" / "model.safetensors"
    tensors, twin = load_file(path), "transformer.encoder.embed_tokens.weight"
    save_file(tensors | {twin: tensors["transformer.shared.weight"].clone()}, path, metadata={"format": "pt"})
    experts = om.open({"one": tmp_path / "one"}, base=tmp_path / "base")
    om.merge(experts, "average")
    assert experts.parts.sources["one"].split.left_out == {twin: "tied to shared.weight"}
    save_file(tensors | {twin: tensors["transformer.shared.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"'transformer.encoder.embed_tokens.weight' and .* must be one tensor"):
        om.merge({"one": tmp_path / "one"}, "average", base=tmp_path / "base")


# Names of older and other writers


def opened(folder: Path, *names: str) -> Checkpoint:
    path = folder / "names.safetensors"
    save_file({name: torch.full((2,), float(number)) for number, name in enumerate(names)}, path)
    return open_checkpoint(path)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra", "deberta_v2"])
def test_gamma_and_beta_become_weight_and_bias(name: str, tmp_path: Path) -> None:
    old = opened(tmp_path, "bert.embeddings.LayerNorm.gamma", "x.output.LayerNorm.beta", "LayerNorm.beta", "x.gamma")
    adapted = family(name).adapted(old)
    first = "bert.embeddings.LayerNorm.weight"
    assert set(adapted) == {first, "x.output.LayerNorm.bias", "LayerNorm.bias", "x.gamma"}
    assert (adapted[first].tolist(), adapted["LayerNorm.bias"].tolist()) == ([0.0, 0.0], [2.0, 2.0])


def test_aliases_are_renamed_too_and_two_names_become_one_in_no_checkpoint(tmp_path: Path) -> None:
    plain = opened(tmp_path, "a.LayerNorm.gamma")
    aliases = {"b.LayerNorm.gamma": "a.LayerNorm.gamma"}
    adapted = family("bert").adapted(Checkpoint(plain.path, plain.entries, aliases=aliases))
    assert adapted.aliases == {"b.LayerNorm.weight": "a.LayerNorm.weight"}
    assert torch.equal(adapted["b.LayerNorm.weight"], plain["a.LayerNorm.gamma"])
    with pytest.raises(CheckpointError, match=r"both 'LayerNorm\.\w+' and .* two names of 'LayerNorm.weight'"):
        family("bert").adapted(opened(tmp_path, "LayerNorm.gamma", "LayerNorm.weight"))


@pytest.mark.parametrize("name", ["clip", "clip_classifier"])
def test_bare_vision_model_of_transformers_5(name: str, tmp_path: Path) -> None:
    bare = ("embeddings.class_embedding", "encoder.layers.0.mlp.fc1.bias", "pre_layrnorm.bias")
    assert set(family(name).adapted(opened(tmp_path, *bare))) == {f"vision_model.{each}" for each in bare}


def test_deberta_with_another_activation_is_refused(tmp_path: Path) -> None:
    adapt = family("deberta_v2").adapted
    plain = opened(tmp_path, "deberta.x")
    assert set(adapt(Checkpoint(plain.path, plain.entries, {"pooler_hidden_act": "gelu"}))) == {"deberta.x"}
    with pytest.raises(IncompatibleError, match=r"'pooler_hidden_act' in a DeBERTa-v2 .* must be 'gelu', got 'tanh'"):
        adapt(Checkpoint(plain.path, plain.entries, {"pooler_hidden_act": "tanh"}))


# open_clip

# The text side of an image encoder as the papers publish it: the transformer deleted, the rest left.
TEXT = ("positional_embedding", "text_projection", "logit_scale", "token_embedding.weight", "ln_final.weight")
LAYER = {"attn.out_proj": "self_attn.out_proj", "ln_1": "layer_norm1", "ln_2": "layer_norm2"}
LAYER |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}


def open_clip_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other direction, written by hand: a CLIP of transformers under the names of open_clip."""
    vision = "vision_model."
    renamed = {
        "class_embedding": tensors[f"{vision}embeddings.class_embedding"],
        "positional_embedding": tensors[f"{vision}embeddings.position_embedding.weight"],
        "conv1.weight": tensors[f"{vision}embeddings.patch_embedding.weight"],
        "proj": tensors["visual_projection.weight"].T.contiguous(),
    }
    for part in ("weight", "bias"):
        renamed[f"ln_pre.{part}"] = tensors[f"{vision}pre_layrnorm.{part}"]
        renamed[f"ln_post.{part}"] = tensors[f"{vision}post_layernorm.{part}"]
        for layer in (0, 1):
            here, there = f"transformer.resblocks.{layer}.", f"{vision}encoder.layers.{layer}."
            fused = [tensors[f"{there}self_attn.{which}_proj.{part}"] for which in ("q", "k", "v")]
            renamed[f"{here}attn.in_proj_{part}"] = torch.cat(fused)
            renamed |= {f"{here}{ours}.{part}": tensors[f"{there}{theirs}.{part}"] for ours, theirs in LAYER.items()}
    return renamed


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(save(build("CLIPModel", "clip"), tmp_path / "clip") / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("vis")}


@pytest.mark.parametrize("outer", [None, "", "model.", "module.model.", "image_encoder.model."])
def test_values_come_back_under_stock_names(
    outer: str | None, tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """Of a tower alone, and of one beside what is left of the text side."""
    prefix = "" if outer is None else f"{outer}visual."
    tensors = {prefix + name: tensor for name, tensor in open_clip_names(expected).items()}
    if outer is not None:
        tensors |= {outer + name: torch.ones(3) for name in TEXT}
        tensors |= {f"{outer}transformer.resblocks.0.attn.in_proj_weight": torch.ones(3)}
    save_file(tensors, tmp_path / "tower.safetensors")
    adapted = vision_names(open_checkpoint(tmp_path / "tower.safetensors"))
    assert set(adapted) == set(expected)
    for name, tensor in expected.items():
        assert adapted.spec(name).shape == tensor.shape
        assert torch.equal(adapted[name], tensor), name


def test_other_towers(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """They are refused; what is neither vision nor text keeps its name, for others to refuse."""
    assert {family(name).adapt for name in ("clip", "clip_classifier")} == {vision_names}
    tensors = {f"visual.{name}": tensor for name, tensor in open_clip_names(expected).items()}
    two = tensors | {f"teacher.{name}": tensor.clone() for name, tensor in tensors.items()}
    unknown = tensors | {"visual.transformer.resblocks.0.ls_1.gamma": torch.ones(3)}
    for other, match in ((unknown, "no place for 'visual.transformer.resblocks.0.ls_1.gamma'"), (two, "got several: ")):
        save_file(other, tmp_path / "t.safetensors")
        with pytest.raises(CheckpointError, match=re.escape(match)):
            vision_names(open_checkpoint(tmp_path / "t.safetensors"))
    save_file(tensors | {"classification_head.weight": torch.ones(3)}, tmp_path / "t.safetensors")
    adapted = vision_names(open_checkpoint(tmp_path / "t.safetensors"))
    assert set(adapted) - set(expected) == {"classification_head.weight"}


def test_a_pickled_whole_open_clip_model_is_an_expert(tmp_path: Path) -> None:
    """The format in which the papers' CLIP experts are published, on a base in Hugging Face format."""
    write_clip(tmp_path / "base")
    expected = nudged(build("CLIPModel", "clip"), 3).state_dict()
    module = torch.nn.Module()
    for key, tensor in open_clip_names(dict(expected)).items():
        holder = module
        *path, last = key.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, torch.nn.Module())
            holder = getattr(holder, part)
        holder.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    torch.save(module, tmp_path / "pets.pt")
    experts = om.open([tmp_path / "pets.pt"], base=tmp_path / "base", heads={"pets": {"classes": ("cat", "dog")}})
    for key, tensor in tensors_of(om.merge(experts, "average")).items():
        torch.testing.assert_close(tensor, expected[key].reshape(-1), rtol=1e-5, atol=1e-6)
