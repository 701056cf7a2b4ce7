"""Every family as values: lazy, live, saved and loaded models have the same tensors, and stock classes load a task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.making import (
    BERT,
    TASKS,
    TEXT,
    batch_for,
    live_models,
    open_models,
    same_tensors,
    stock,
    tensors_of,
    write_models,
)

import orthomerge as om
from orthomerge.models.experts import reopen_experts
from orthomerge.models.families import FAMILIES, family
from orthomerge.models.heads import head_of
from orthomerge.models.saved import verify_folder
from orthomerge.models.skeleton import KNOWN, Skeleton, quiet

WITHOUT_STOCK_CLASS = {name for name, row in FAMILIES.items() if row.architecture is None}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(name)
    write_models(name, place)
    return place


@pytest.fixture(scope="module")
def merged(name: str, folder: Path) -> om.Model:
    return om.merge(open_models(name, folder), "average")


@pytest.fixture(scope="module")
def out(folder: Path, merged: om.Model) -> Path:
    merged.save(folder / "out")
    return folder / "out"


def same_heads(one: om.Model, other: om.Model) -> None:
    for task in TASKS:
        ours, theirs = head_of(one.heads[task]), head_of(other.heads[task])
        assert (ours.normalise, ours.activation) == (theirs.normalise, theirs.activation)
        assert ours.tensors().keys() == theirs.tensors().keys()
        assert all(torch.equal(tensor, theirs.tensors()[part]) for part, tensor in ours.tensors().items())


def test_a_merge_is_the_mean_of_its_experts(folder: Path, merged: om.Model) -> None:
    opened = reopen_experts(merged)
    base = tensors_of(opened.base)
    experts = [tensors_of(source) for source in opened.sources.values()]
    merged_keys = opened.parts.merged
    for key, tensor in tensors_of(merged).items():
        mean = sum(expert[key] for expert in experts) / 2 if key in merged_keys else base[key]
        torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)


def test_saved_and_loaded_it_is_the_same_model(name: str, merged: om.Model, out: Path) -> None:
    loaded = om.load(out)
    assert (loaded.family.name, loaded.tasks, loaded.labels) == (name, merged.tasks, merged.labels)
    assert same_tensors(loaded, merged)
    assert loaded.digest == merged.digest
    assert loaded.config == merged.config
    same_heads(loaded, merged)
    assert verify_folder(out) == []


def test_every_tensor_of_the_module_is_one_of_ours(merged: om.Model) -> None:
    """Names are a bijection onto the state dict, twins by `tied` apart; optional tensors may have no place."""
    skeleton = Skeleton.of(merged.family, merged.config, merged.weights)
    state, tensors = skeleton.module.state_dict(), tensors_of(merged)
    assert len(set(skeleton.names.values())) == len(skeleton.names)
    held = {state[name].data_ptr() for name in skeleton.names.values()}
    assert all(tensor.data_ptr() in held for tensor in state.values() if tensor.numel())
    assert all(merged.family.may_lack(key, "none") for key in tensors.keys() - skeleton.names.keys())
    for key, place in skeleton.names.items():
        assert torch.equal(state[place].reshape(-1), tensors[key]), key


def test_live_models_give_the_same_tensors(name: str, merged: om.Model) -> None:
    if name == "clip":
        pytest.skip("zero-shot heads need the base's tokenizer, which lies in a folder")
    models = live_models(name)
    live = om.merge(om.open({task: models[task] for task in TASKS}, base=models["base"]), "average")
    assert same_tensors(live, merged)
    assert live.digest == merged.digest
    same_heads(live, merged)


def test_the_module_gives_what_a_stock_model_with_these_weights_gives(name: str, merged: om.Model) -> None:
    if name in WITHOUT_STOCK_CLASS:
        pytest.skip("transformers has no classifier for this family")
    experts = live_models(name)
    batch = batch_for(family(name), experts["base"].config)
    logits = merged.module("cpu")(**batch)
    own = family(name).head.parts().values()  # type: ignore[union-attr]
    states = [experts[task].state_dict() for task in TASKS]
    mean = {key: ((value + states[1][key]) / 2).to(value.dtype) for key, value in states[0].items() if key not in own}
    for task in TASKS:
        twin = experts[task]
        twin.load_state_dict({**twin.state_dict(), **mean})
        with torch.no_grad():
            torch.testing.assert_close(logits[task], twin(**batch).logits, rtol=1e-4, atol=1e-4)


def test_a_task_is_a_stock_folder(name: str, out: Path, tmp_path: Path) -> None:
    """In a saved model as in an export."""
    assert not (out / "config.json").exists()  # the root is no model of transformers
    for task in TASKS:
        if name in WITHOUT_STOCK_CLASS:
            assert not (out / task / "config.json").exists()
            continue
        om.export(om.load(out), tmp_path / task, task=task)
        for place in (out / task, tmp_path / task):
            model = stock(place)
            assert type(model).__name__ == family(name).architecture
            batch = batch_for(family(name), model.config)
            with torch.no_grad():
                ours = om.load(out).module("cpu")(**batch)[task]
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
    more: dict[str, Any] = {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    model = DebertaV2ForSequenceClassification(DebertaV2Config(**BERT, **TEXT, **v3, **more)).eval()
    live = om.open({"one": model}, base=model, check_base=False)
    batch = {"input_ids": torch.randint(5, 50, (2, 20)), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    with torch.no_grad():
        torch.testing.assert_close(om.merge(live, "average").module("cpu")(**batch)["one"], model(**batch).logits)
    om.merge(live, "average").save(tmp_path / "out")
    config = json.loads((tmp_path / "out/one/config.json").read_text())
    assert {key: config[key] for key in v3} == v3
