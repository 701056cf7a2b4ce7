"""Every tensor of a checkpoint is placed: encoder, head, left out for a reason, or unknown; nothing is guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.models.making import build, nudged, save

import orthomerge as om
from orthomerge.core.errors import IncompatibleError
from orthomerge.files.checkpoint import Spec
from orthomerge.models.families import FAMILIES, generic
from orthomerge.models.family import Family, HeadLayout
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
    tensors = specs(*(prefix + name for name in (*held, block)))
    for split in (split_base(tensors, T5), split_expert(tensors, T5, specs(SHARED, block), pooling="eos")):
        assert split.names == {SHARED: prefix + kept, block: prefix + block}
        assert split.left_out == {prefix + name: "tied to shared.weight" for name in held if name != kept}
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


def test_which_of_two_encoders_is_taken() -> None:
    """The one whose shapes fit, or that holds more; nothing else would stop the first from being taken."""
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


def test_heads_of_two_layers() -> None:
    layout = ROBERTA.head
    assert layout is not None
    tensors = {f"roberta.{name}": spec for name, spec in ENCODER.items()} | specs(*layout.parts().values())
    split = split_expert(tensors, ROBERTA, ENCODER, pooling="cls")
    assert split.head == layout.parts()
    assert split.head["hidden.bias"] == "classifier.dense.bias"
    accounted(split, tensors)


def test_a_head_under_another_name() -> None:
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
    base = build("T5ForSequenceClassification", "t5")
    save(base, tmp_path / "base")
    save(nudged(base, 1), tmp_path / "one")
    path = tmp_path / "one" / "model.safetensors"
    tensors = load_file(path)
    twin = "transformer.encoder.embed_tokens.weight"
    save_file(tensors | {twin: tensors["transformer.shared.weight"].clone()}, path, metadata={"format": "pt"})
    experts = om.open({"one": tmp_path / "one"}, base=tmp_path / "base")
    om.merge(experts, "average")
    assert experts.parts.sources["one"].split.left_out == {twin: "tied to shared.weight"}
    save_file(tensors | {twin: tensors["transformer.shared.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"'transformer.encoder.embed_tokens.weight' and .* must be one tensor"):
        om.merge({"one": tmp_path / "one"}, "average", base=tmp_path / "base")
