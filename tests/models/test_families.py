"""Families against the stock models of transformers that they describe: encoders, poolings, and merges as values."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from tests.models.making import OPTIONS, average, batch_for, build, live_models, same_tensors, save, stock, tensors_of

import orthomerge as om
from orthomerge.core.errors import RecipeError
from orthomerge.files.opening import open_checkpoint
from orthomerge.models.experts import reopen_experts
from orthomerge.models.families import FAMILIES, family, family_for, generic
from orthomerge.models.heads import Head, head_of
from orthomerge.models.model_data import Encoder
from orthomerge.models.saved import verify_folder
from orthomerge.models.skeleton import KNOWN, Skeleton, encoder_config, quiet
from orthomerge.models.split import split_base
from orthomerge.models.tensors import FileTensors

# Stock models from which experts are made, or which people have lying around.
OTHERS = {
    "bert": ["BertModel", "BertForPreTraining", "BertForMaskedLM"],
    "roberta": ["RobertaModel", "RobertaForMaskedLM"],
    "xlm_roberta": ["XLMRobertaForMaskedLM"],
    "camembert": ["CamembertForMaskedLM"],
    "distilbert": ["DistilBertForMaskedLM"],
    "electra": ["ElectraForPreTraining", "ElectraForMaskedLM"],
    "deberta_v2": ["DebertaV2Model", "DebertaV2ForMaskedLM"],
    "t5": ["T5Model", "T5ForConditionalGeneration"],
    "t5_encoder": ["T5EncoderModel", "T5ForConditionalGeneration", "T5ForTokenClassification"],
    "vit": ["ViTModel", "ViTForMaskedImageModeling"],
    "deit": ["DeiTModel", "DeiTForImageClassificationWithTeacher", "DeiTForMaskedImageModeling"],
    "dinov2": ["Dinov2Model"],
    "clip": ["CLIPModel"],
    "clip_classifier": ["CLIPModel"],
}


def split_off(class_name: str, name: str, folder: Path) -> tuple[Encoder, dict[str, torch.Tensor]]:
    """The encoder of a stock model, and every other tensor."""
    checkpoint = open_checkpoint(save(build(class_name, "clip_vision" if "Vision" in class_name else name), folder))
    adapted = family(name).adapted(checkpoint)
    assert adapted.entries == checkpoint.entries or class_name.startswith("CLIPVision")  # stock names stay
    split = split_base(adapted.specs, family(name))
    assert split.unknown == ()
    tensors = FileTensors({key: (adapted, place) for key, place in split.names.items()})
    encoder = Encoder(family(name), encoder_config(checkpoint.config or {}, family(name)), tensors)
    return encoder, {place: adapted[place] for place in split.left_out}


@pytest.mark.parametrize(("name", "class_name"), [(name, cls) for name, classes in OTHERS.items() for cls in classes])
def test_other_stock_models_hold_the_same_encoder(name: str, class_name: str, tmp_path: Path) -> None:
    row = family(name)
    # Where there is no stock classifier, the encoder itself is the reference.
    whole, _ = split_off(row.architecture or row.encoder_class, name, tmp_path / "whole")
    other, _ = split_off(class_name, name, tmp_path / "other")
    assert other.tensors.specs
    for key in whole.tensors.specs.keys() ^ other.tensors.specs.keys():
        assert any(fnmatchcase(key, pattern) for pattern in row.optional), key


def test_t5_encoder_with_a_linear_head(tmp_path: Path) -> None:
    row, model = family("t5_encoder"), build("T5ForTokenClassification", "t5_encoder")
    batch = batch_for(row, model.config)
    encoder, tensors = split_off("T5ForTokenClassification", "t5_encoder", tmp_path)
    head = Head.of({part: tensors[f"classifier.{part}"] for part in ("weight", "bias")}, tuple("abcde"))
    with torch.no_grad():
        logits = head(row.features(encoder.module(), batch, "mean"))
        # The stock model classifies every token; a linear head and a mean can change places.
        per_token, mask = model(**batch).logits, batch["attention_mask"].unsqueeze(-1)
        torch.testing.assert_close(logits, (per_token * mask).sum(1) / mask.sum(1), atol=1e-5, rtol=1e-5)


TEXTS = [(name, 0) for name in FAMILIES if family(name).modality == "text" and name != "t5"]
IMAGES = [("vit", 1), ("deit", 2), ("dinov2", 1), ("clip_classifier", 1)]


@pytest.mark.parametrize(("name", "skipped"), [*TEXTS, *IMAGES])
def test_poolings_by_hand(name: str, skipped: int) -> None:
    """The first token, and the mean of words that are no padding or of patches."""
    row = family(name)
    encoder = build(row.encoder_class, "clip_vision" if name == "clip_classifier" else name)
    batch = batch_for(row, encoder.config)
    with torch.no_grad():
        hidden = encoder(**batch).last_hidden_state
        torch.testing.assert_close(row.features(encoder, batch, "cls"), hidden[:, 0])
        ends = batch["attention_mask"].sum(1) if row.modality == "text" else [skipped + 4] * 4  # four patches
        assert row.modality == "text" or hidden.shape[1] == skipped + 4
        expected = torch.stack([each[skipped:end].mean(0) for each, end in zip(hidden, ends, strict=True)])
        torch.testing.assert_close(row.features(encoder, batch, "mean"), expected)


def test_nothing_heavy_is_imported() -> None:
    names = ", ".join(f"orthomerge.models.{name}" for name in ("families", "experts", "saved", "writing"))
    heavy = "{'torch', 'transformers', 'sklearn', 'huggingface_hub'}"
    code = f"import sys, {names}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


VISION, DECODER = "vision_model.post_layernorm.bias", "decoder.final_layer_norm.weight"
CHOICES: list[tuple[str, str, list[str]]] = [
    *((name, name.replace("_", "-"), []) for name in ("bert", "xlm_roberta", "deberta_v2")),
    ("clip_classifier", "clip", [VISION, "classifier.weight"]),
    ("clip", "clip", [VISION, "text_projection.weight"]),
    ("clip", "clip_vision_model", [VISION]),
    ("t5", "t5", [f"transformer.{DECODER}", "classification_head.dense.weight"]),
    ("t5", "t5", ["shared.weight", DECODER, "lm_head.weight"]),
    ("t5_encoder", "t5", ["shared.weight", DECODER, "classifier.weight"]),
    ("t5_encoder", "t5", ["module.shared.weight", "module.classifier.weight"]),
    ("t5_encoder", "t5", ["shared.weight", "encoder.final_layer_norm.weight"]),
]


@pytest.mark.parametrize(("name", "model_type", "keys"), CHOICES)
def test_family_for(name: str, model_type: str, keys: list[str]) -> None:
    assert family_for(model_type, iter(keys)).name == name


def test_what_is_unknown_shows_the_way_out() -> None:
    with pytest.raises(RecipeError, match="unknown model family 'deberta-v2'; did you mean 'deberta_v2'"):
        family("deberta-v2")
    with pytest.raises(RecipeError, match="'generic' must be described; give `encoder_prefix`"):
        family("generic")
    with pytest.raises(RecipeError, match=r"'swin' \(known: bert, .*\); .* `family: generic` in the recipe"):
        family_for("swin", [])
    with pytest.raises(RecipeError, match=r"'xlm_roberta' \(did you mean 'xlm-roberta'\?\); for any other"):
        family_for("xlm_roberta", [])


def test_generic() -> None:
    assert [generic(prefix).prefix for prefix in ("net.", "net", "")] == ["net.", "net.", ""]
    features = torch.ones(2, 3)
    assert generic("").features(lambda x: x, {"x": features}, "output") is features
    with pytest.raises(RecipeError, match="must return one tensor, got dict"):
        generic("").features(dict, {}, "output")


# A base and two experts of every family: lazy, live, saved and loaded models have the same tensors

WITHOUT_STOCK_CLASS = {name for name, row in FAMILIES.items() if row.architecture is None}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def merged(name: str, tmp_path_factory: pytest.TempPathFactory) -> om.Model:
    return average(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def out(merged: om.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "out"
    merged.save(folder)
    return folder


def same_model(one: om.Model, other: om.Model) -> None:
    assert same_tensors(one, other)
    assert (one.digest, one.tasks) == (other.digest, other.tasks)
    for task in one.tasks:
        ours, theirs = head_of(one.heads[task]), head_of(other.heads[task])
        assert (ours.normalise, ours.activation) == (theirs.normalise, theirs.activation)
        assert ours.tensors().keys() == theirs.tensors().keys()
        assert all(torch.equal(tensor, theirs.tensors()[part]) for part, tensor in ours.tensors().items())


def test_a_merge_is_the_mean_of_its_experts(merged: om.Model) -> None:
    opened = reopen_experts(merged)
    base, one, two = (tensors_of(model) for model in (opened.base, *opened.sources.values()))
    for key, tensor in tensors_of(merged).items():
        mean = (one[key] + two[key]) / 2 if key in opened.parts.merged else base[key]
        torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_saved_and_loaded_it_is_the_same_model(name: str, merged: om.Model, out: Path) -> None:
    loaded = om.load(out)
    assert (loaded.family.name, loaded.labels, loaded.config) == (name, merged.labels, merged.config)
    same_model(loaded, merged)
    assert verify_folder(out) == []


def test_every_tensor_of_the_module_is_one_of_ours(merged: om.Model) -> None:
    """Names are a bijection onto the state dict, twins by `tied` apart; optional tensors may have no place."""
    skeleton = Skeleton.of(merged.family, merged.config, merged.weights)
    state, tensors = skeleton.module.state_dict(), tensors_of(merged)
    assert len(set(skeleton.names.values())) == len(skeleton.names)
    held = {state[name].data_ptr() for name in skeleton.names.values()}
    assert all(tensor.data_ptr() in held for tensor in state.values() if tensor.numel())
    assert all(state[twin].data_ptr() == state[kept].data_ptr() for twin, kept in merged.family.tied.items())
    assert all(merged.family.may_lack(key, "none") for key in tensors.keys() - skeleton.names.keys())
    for key, place in skeleton.names.items():
        assert torch.equal(state[place].reshape(-1), tensors[key]), key


def test_live_models_give_the_same_tensors(name: str, merged: om.Model) -> None:
    if name == "clip":
        pytest.skip("zero-shot heads need the base's tokenizer, which lies in a folder")
    experts = live_models(name)
    base = experts.pop("base")
    same_model(om.merge(experts, "average", base=base), merged)


def test_the_module_gives_what_a_stock_model_with_these_weights_gives(name: str, merged: om.Model) -> None:
    if name in WITHOUT_STOCK_CLASS:
        pytest.skip("transformers has no classifier for this family")
    experts = live_models(name)
    batch = batch_for(family(name), experts.pop("base").config)
    logits = merged.module("cpu")(**batch)
    own = family(name).head.parts().values()  # type: ignore[union-attr]
    one, two = (expert.state_dict() for expert in experts.values())
    mean = {key: ((value + two[key]) / 2).to(value.dtype) for key, value in one.items() if key not in own}
    for task, twin in experts.items():
        twin.load_state_dict({**twin.state_dict(), **mean})
        with torch.no_grad():
            torch.testing.assert_close(logits[task], twin(**batch).logits, rtol=1e-4, atol=1e-4)


def test_a_task_is_a_stock_folder(name: str, out: Path, tmp_path: Path) -> None:
    """In a saved model as in an export."""
    assert not (out / "config.json").exists()  # the root is no model of transformers
    loaded = om.load(out)
    for task in loaded.tasks:
        if name in WITHOUT_STOCK_CLASS:
            assert not (out / task / "config.json").exists()
            continue
        om.export(loaded, tmp_path / task, task=task)
        for place in (out / task, tmp_path / task):
            model = stock(place)
            assert type(model).__name__ == family(name).architecture
            batch = batch_for(family(name), model.config)
            with torch.no_grad():
                ours = loaded.module("cpu")(**batch)[task]
                torch.testing.assert_close(model(**batch).logits, ours, rtol=0, atol=1e-5)


def test_known_keys_are_those_of_transformers(name: str) -> None:
    """Whatever the encoder's class reads of a config is in the table; what says how to load a model is not."""
    with quiet():
        import transformers

        cls = getattr(transformers, family(name).encoder_class).config_class
        fields = set(cls().to_dict()) - set(transformers.PretrainedConfig().to_dict())
    assert fields - KNOWN == set()
    loading = {"auto_map", "attn_implementation", "quantization_config", "transformers_weights", "_name_or_path"}
    assert not KNOWN & (loading | {"dtype", "torch_dtype", "architectures", "return_dict", "output_attentions"})


def test_a_config_of_deberta_v3_is_built_as_such(tmp_path: Path) -> None:
    """Three keys that the config class does not list tell it from v2."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    v3 = {"relative_attention": True, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    more = {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0}
    model = DebertaV2ForSequenceClassification(DebertaV2Config(**OPTIONS["deberta_v2"] | v3 | more)).eval()
    live = om.open({"one": model}, base=model, check_base=False)
    batch = {"input_ids": torch.randint(5, 50, (2, 20)), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    with torch.no_grad():
        torch.testing.assert_close(om.merge(live, "average").module("cpu")(**batch)["one"], model(**batch).logits)
    om.merge(live, "average").save(tmp_path / "out")
    config = json.loads((tmp_path / "out/one/config.json").read_text())
    assert {key: config[key] for key in v3} == v3
