"""Merging from Python and from recipes: every method, by hand where a hand can, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.berts import contents, write_tables
from tests.models.making import same_tensors, stock, tensors_of

import orthomerge as om
from orthomerge.core.errors import IncompatibleError, OrthomergeError, RecipeError
from orthomerge.files.opening import open_checkpoint
from orthomerge.merging.merge import task_vectors
from orthomerge.merging.methods import METHODS
from orthomerge.merging.ties import Ties
from orthomerge.models.opening import HeadNames
from orthomerge.models.saved import verify_folder
from orthomerge.models.skeleton import Skeleton, quiet
from orthomerge.runs.models import write
from orthomerge.runs.recipe import Recipe

NAMES = ("two", "three", "five")
QUICK: dict[str, dict[str, Any]] = {"wudi": {"steps": 5}}


def recipe(berts: Path, *names: str, **more: Any) -> Recipe:
    return Recipe(experts={name: str(berts / name) for name in names or NAMES}, base=str(berts / "base"), **more)


def opened(berts: Path, *names: str) -> om.Experts:
    return om.open({name: berts / name for name in names or NAMES}, base=berts / "base")


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 99, (4, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_merges_heads_of_two_three_and_five_classes(method: str, berts: Path, tmp_path: Path) -> None:
    names = ("two", "five") if method == "slerp" else NAMES
    write(recipe(berts, *names, method=method, parameters=QUICK.get(method, {})), out=tmp_path / "out")
    model = om.load(tmp_path / "out")
    assert verify_folder(tmp_path / "out") == []
    for name, logits in model.module("cpu")(**batch()).items():
        with torch.no_grad():
            theirs = stock(tmp_path / "out" / name)(**batch()).logits
        torch.testing.assert_close(logits, theirs, rtol=0, atol=1e-5)
        assert logits.shape == (4, {"two": 2, "three": 3, "five": 5}[name])
    direct = om.merge(opened(berts, *names), method, **QUICK.get(method, {}))
    assert direct.digest == model.digest


def test_average_is_the_mean_of_the_experts(berts: Path) -> None:
    merged = tensors_of(om.merge(opened(berts), "average"))
    experts = [open_checkpoint(berts / name) for name in NAMES]
    for key, tensor in merged.items():
        mean = torch.stack([expert[f"bert.{key}"] for expert in experts]).mean(0)
        torch.testing.assert_close(tensor, mean.reshape(-1), rtol=1e-5, atol=1e-6)


def test_an_expert_is_a_model_that_reads_its_own_bytes(berts: Path) -> None:
    experts = opened(berts)
    for name, source in experts.sources.items():
        stored = open_checkpoint(berts / name)
        assert all(torch.equal(tensor, stored[f"bert.{key}"].reshape(-1)) for key, tensor in tensors_of(source).items())
        assert source.tasks == (name,)
        with torch.no_grad():
            assert torch.equal(source.module("cpu")(**batch())[name], stock(berts / name)(**batch()).logits)
    base = open_checkpoint(berts / "base")
    assert all(torch.equal(tensor, base[key].reshape(-1)) for key, tensor in tensors_of(experts.base).items())


def test_merging_is_lazy_and_costs_nothing_before_it_is_used(berts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a module was built")

    monkeypatch.setattr(Skeleton, "build", refuse)
    model = om.merge(opened(berts), "ties", density=0.3)
    assert model.labels["two"] == ("two-0", "two-1")
    assert repr(model) == "Model(bert, 3 tasks: two 2, three 3, five 5; ties)"
    first = next(iter(model.weights.blocks()))
    assert first[0] == next(iter(model.weights.specs))


def test_a_method_may_be_an_object(berts: Path) -> None:
    experts = opened(berts)
    one, other = om.merge(experts, Ties(density=0.3)), om.merge(experts, "ties", density=0.3)
    assert same_tensors(one, other)
    assert one.origin.facts["method"]["name"] == "ties"
    with pytest.raises(RecipeError, match="Ties has its options already; leave density out"):
        om.merge(experts, Ties(density=0.3), density=0.4)


def test_two_runs_write_the_same_bytes(berts: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(recipe(berts, method="dare_ties", max_shard_size="20KB"), out=tmp_path / name)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len([file for file in one if file.startswith("encoder-")]) > 4
    assert one == two


@pytest.mark.parametrize(("dtype", "short"), [("bfloat16", "BF16"), ("float16", "F16"), ("float64", "F64")])
def test_the_output_has_the_dtype_asked_for(dtype: Any, short: str, berts: Path, tmp_path: Path) -> None:
    model = om.merge(opened(berts), "average", dtype=dtype)
    assert {spec.dtype for spec in model.weights.specs.values()} == {short}
    model.save(tmp_path / "out")
    assert same_tensors(om.load(tmp_path / "out"), model)
    assert json.loads((tmp_path / "out/two/config.json").read_text())["dtype"] == dtype
    encoder = model.module("cpu").encoder
    assert {parameter.dtype for parameter in encoder.parameters()} == {getattr(torch, dtype)}


def test_an_analogy_is_one_line(berts: Path) -> None:
    experts = opened(berts)
    merged = tensors_of(om.merge(experts, "task_arithmetic", vector="three + (two - five)", scale=1.0))
    base = open_checkpoint(berts / "base")
    deltas = {name: {key: open_checkpoint(berts / name)[f"bert.{key}"] - base[key] for key in base} for name in NAMES}
    for key, tensor in merged.items():
        expected = base[key] + deltas["three"][key] + deltas["two"][key] - deltas["five"][key]
        torch.testing.assert_close(tensor, expected.reshape(-1), rtol=1e-5, atol=1e-6)
    vectors = task_vectors(experts).vectors
    analogy = vectors["three"] + (vectors["two"] - vectors["five"])
    key = "encoder.layer.0.output.dense.weight"
    torch.testing.assert_close((base[key] + analogy[key]).reshape(-1), merged[key], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((-0.5 * vectors["two"])[key], -0.5 * deltas["two"][key])
    total = sum(vectors.values())
    assert isinstance(total, om.TaskVector)
    assert torch.equal(total[key], (vectors["two"] + vectors["three"] + vectors["five"])[key])


def test_the_manifest_tells_everything(berts: Path, tmp_path: Path) -> None:
    write(recipe(berts, method="dare", seed=7), out=tmp_path / "out")
    manifest = json.loads((tmp_path / "out/orthomerge.json").read_text())
    assert manifest["method"] == {"name": "dare", "parameters": {"drop": 0.5, "scale": 0.3, "seed": 7}}
    assert set(manifest["inputs"]["experts"]) == set(NAMES)
    assert all(file["hash"].startswith("blake3:") for file in manifest["inputs"]["base"]["files"])
    assert (manifest["seed"], manifest["family"], manifest["heads"]["two"]["pooling"]) == (7, "bert", "pooler")


def test_a_state_dict_with_other_names_is_resolved_against_the_base(berts: Path, tmp_path: Path) -> None:
    expert = open_checkpoint(berts / "two")
    torch.save({"epoch": 3, "state_dict": {f"module.{key}": expert[key] for key in expert}}, tmp_path / "two.pth")
    one = om.merge([tmp_path / "two.pth"], "average", base=berts / "base")
    assert same_tensors(one, om.merge([berts / "two"], "average", base=berts / "base"))
    assert one.tasks == ("two",)


def test_a_module_of_ones_own_merges_by_its_prefix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    base = {f"backbone.{key}": value for key, value in encoder.state_dict().items()}
    torch.save(base, tmp_path / "base.pt")
    tuned = {}
    for name in ("x", "y"):
        tuned[name] = {key: value + 0.01 * torch.randn_like(value) for key, value in base.items()}
        torch.save(tuned[name] | {"fc.weight": torch.randn(2, 4), "fc.bias": torch.randn(2)}, tmp_path / f"{name}.pt")
    heads: Any = {name: HeadNames(layers=("fc",)) for name in tuned}
    experts = om.open([tmp_path / "x.pt", tmp_path / "y.pt"], base=tmp_path / "base.pt", prefix="backbone", heads=heads)
    model = om.merge(experts, "average")
    model.save(tmp_path / "out")
    loaded = om.load(tmp_path / "out")
    assert same_tensors(loaded, model)
    assert loaded.digest == model.digest
    for key, tensor in tensors_of(loaded).items():
        mean = (tuned["x"][f"backbone.{key}"] + tuned["y"][f"backbone.{key}"]) / 2
        torch.testing.assert_close(tensor, mean.reshape(-1))
    refused: dict[str, Callable[[], object]] = {
        "a module of your own cannot be built here": lambda: loaded.predict(["a"]),
        "is of a module of your own, which cannot be built here": lambda: om.align(loaded, {"x": "x"}),
        "no classifier for the family": lambda: om.export(loaded, tmp_path / "x", task="x"),
    }
    for message, action in refused.items():
        with pytest.raises(RecipeError, match=message):
            action()


def test_a_stranger_is_not_merged(berts: Path, tmp_path: Path) -> None:
    with quiet():
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(**json.loads((berts / "base/config.json").read_text()) | {"num_labels": 4})
        torch.manual_seed(99)
        BertForSequenceClassification(config).save_pretrained(tmp_path / "stranger")
    with pytest.raises(IncompatibleError, match=r"expert 's' .* was not fine-tuned from the base .* cosine"):
        om.merge({"s": tmp_path / "stranger"}, "average", base=berts / "base")


# Opening

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no experts": ({"experts": {}}, "'experts' is empty; name at least one"),
    "a number": ({"experts": {"two": 3}}, "the expert of 'two' must be a path, a hub id or a live model .* got int"),
    "a merged model as base": ({"base": 3.0}, "the base must be a path, a hub id or a live model .* got float"),
    "labels of nobody": ({"labels": {"tow": ["a"]}}, "'labels' names 'tow', which is no expert; did you mean 'two'"),
    "labels as text": ({"labels": {"two": "ab"}}, "expert 'two': 'labels' must be list of text or nothing, got 'ab'"),
    "heads of nobody": ({"heads": {"tow": {}}}, "'heads' names 'tow'"),
    "an odd head": ({"heads": {"two": {"layer": "x"}}}, "expert 'two': 'head': unknown option 'layer'; did you mean"),
    "twice one name": ({"experts": ["a/two", "b/two"]}, "two experts have folders of the same name"),
    "an odd name": ({"experts": {"a/b": "x"}}, "'a/b' cannot name an expert and its folder; use letters"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_opened(options: dict[str, Any], message: str, berts: Path) -> None:
    given: dict[str, Any] = {"experts": {"two": berts / "two"}, "base": berts / "base", **options}
    with pytest.raises(RecipeError, match=message):
        om.open(given.pop("experts"), **given)


def test_experts_by_their_paths_alone() -> None:
    opening = om.open(["models/topic", "tone.pth", Path("x/spam.v2"), "org/news@main"]).opening
    paths = {"topic": "models/topic", "tone": "tone.pth", "spam.v2": "./x/spam.v2", "news": "org/news@main"}
    assert {task: expert.path for task, expert in opening.experts.items()} == paths


def test_all_problems_at_once(berts: Path) -> None:
    experts = om.open({"two": berts / "two", "gone": berts / "gone", "x": berts / "nowhere"}, base=berts / "base")
    assert [problem.where for problem in experts.problems] == ["expert 'gone'", "expert 'x'"]
    assert repr(experts) == "Experts(3 of BERT base, 2 problems)"
    with pytest.raises(OrthomergeError, match=r"2 problems:\n  1\. expert 'gone': .*\n  2\. expert 'x': "):
        om.merge(experts, "average")


def test_refused(berts: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="these experts were already opened with a base"):
        om.merge(opened(berts), "average", base=berts / "base")
    with pytest.raises(RecipeError, match="is fitted to inputs"):
        om.merge(opened(berts), "moma")
    with pytest.raises(RecipeError, match="task_arithmetic needs the model that the experts were fine-tuned from"):
        om.merge({"two": berts / "two"}, "task_arithmetic")
    tables = write_tables(tmp_path)
    with pytest.raises(RecipeError, match="uses no inputs"):
        om.merge(opened(berts), "average", data={name: tables / f"{name}.csv" for name in NAMES})


# Memory

MEASURE = """
import sys
from pathlib import Path
import orthomerge as om

def peak():  # of this program alone; getrusage would count the process that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

folder = Path(sys.argv[1])
experts = om.open({name: folder / f"{name}.safetensors" for name in ("a", "b")}, base=folder / "base.safetensors",
                  prefix="", check_base=False, heads={name: {"layers": ["fc"]} for name in ("a", "b")})
model = om.merge(experts, "average")
model.weights.specs
before = peak()
model.save(folder / "out")
print(peak() - before)
"""


def test_saving_a_lazy_merge_does_not_hold_the_encoder(tmp_path: Path) -> None:
    """Of 150 MB of weights, at most a fraction is in memory beside the interpreter and torch."""
    from safetensors.torch import save_file

    count, size = 18, 1 << 21  # 18 matrices of 8 MB
    random = torch.Generator().manual_seed(0)
    weights = {f"layer{place}.weight": torch.randn(1 << 10, size >> 10, generator=random) for place in range(count)}
    save_file(weights, tmp_path / "base.safetensors")
    for shift, name in enumerate(("a", "b"), 1):
        head = {"fc.weight": torch.ones(2, 4), "fc.bias": torch.zeros(2)}
        save_file(
            {key: tensor + 0.01 * shift for key, tensor in weights.items()} | head, tmp_path / f"{name}.safetensors"
        )
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    growth = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (tmp_path / "out/encoder.safetensors").stat().st_size > 150_000_000
    assert growth < 110_000_000
