"""The papers' suites on tiny files of the published formats, laid out as the hub's cache lays them out."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from tests.models.making import write_tokenizer

from orthomerge import Model, load
from orthomerge.core.errors import CheckpointError, RecipeError
from orthomerge.models.heads import head_of
from orthomerge.models.manifest import read_manifest
from orthomerge.models.opening import Expert, HeadNames
from orthomerge.models.saved import verify_folder
from orthomerge.models.skeleton import quiet
from orthomerge.models.zero_shot import zero_shot_head
from orthomerge.suites import published
from orthomerge.suites.published import TEMPLATES, HalvesProcessor, class_names, read_csv_task
from orthomerge.suites.suite import Suite
from orthomerge.suites.table import SUITES, build_suite

Tensors = dict[str, dict[str, torch.Tensor]]  # by expert and key
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLIP8, TEXT5 = SUITES["clip-vit-b32-8"].tasks, SUITES["bert-text5"].tasks
CLASSES = dict.fromkeys(CLIP8, ("red_barn", "blue_sea")) | dict.fromkeys(("svhn", "mnist"), ("0", "1"))
CLASSES["eurosat"] = ("AnnualCrop", "SeaLake")
WORDS = ("good", "bad", "film", "very", "not", "it")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
KONG = "kongfs/FT-Classifier-for-Model-Merging"


def perturbed(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: value + 0.02 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for key, value in state.items()
    }


def features_of(model: Model, batch: dict[str, torch.Tensor], task: str) -> torch.Tensor:
    """What the head of a task reads."""
    pooling = head_of(model.head(task)).pooling or model.family.default_pooling
    encoder, family = model.encoder.runner(pooling)
    with torch.no_grad():
        return family.features(encoder, batch, pooling)


def lay(cache: Path, repository: str, folder: Path, *, kind: str = "models") -> None:
    """A folder as huggingface_hub caches it: blobs, a snapshot of links, a reference."""
    home = cache / f"{kind}--{repository.replace('/', '--')}"
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        blob = home / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        link = home / "snapshots" / COMMIT / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def build(name: str, tmp_path: Path, *, data: Path | None = None, base: str | None = None) -> Suite:
    return build_suite(name, folder=tmp_path / "suite", data=data, base=base, device="cpu", say=lambda text: None)


def clip_model() -> Any:
    with quiet():
        from transformers import CLIPConfig, CLIPModel

        text = {**SIZES, "vocab_size": 60, "max_position_embeddings": 77, "bos_token_id": 58, "eos_token_id": 59}
        vision = {**SIZES, "image_size": 8, "patch_size": 4, "projection_dim": 8}
        torch.manual_seed(0)
        return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def write_clip(folder: Path) -> dict[str, torch.Tensor]:
    """A base as openai's; the tensors of its vision tower, as CLIPVisionModel called them before transformers 5."""
    model = clip_model()
    with quiet():
        model.save_pretrained(folder)
    write_tokenizer(folder)
    processor = {
        "crop_size": 8, "size": 8, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    tower = {key: value for key, value in model.state_dict().items() if key.startswith("vision_model.")}
    return {key: value.clone() for key, value in tower.items() if "position_ids" not in key}


def write_pictures(root: Path) -> Path:
    generator = np.random.default_rng(0)
    for task, (split, count) in product(CLIP8, (("train", 4), ("test", 2))):
        for name in CLASSES[task]:
            home = root / task.replace("-", "_") / split / name
            home.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (9, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(home / f"{number}.png")
    return root


def write_clip_experts(tmp_path: Path, cache: Path) -> Tensors:
    """Base and experts in the cache; what the experts hold."""
    model = "clip-vit-base-patch32"
    tower = write_clip(tmp_path / "base")
    lay(cache, f"openai/{model}", tmp_path / "base")
    config = {
        "architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4,
        "projection_dim": 8, "torch_dtype": "float32", "transformers_version": "4.40.1", **SIZES,
    }  # fmt: skip
    experts = {task: perturbed(tower, seed) for seed, task in enumerate(CLIP8, 1)}
    for task, state in experts.items():
        home = tmp_path / "experts" / task
        home.mkdir(parents=True)
        (home / "config.json").write_text(json.dumps(config))
        save_file(state, home / "model.safetensors", metadata={"format": "pt"})
        lay(cache, f"tanganke/{model}_{task}", home)
    return experts


def image_features(state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model = clip_model()
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        features: torch.Tensor = model.visual_projection(model.vision_model(**batch).pooler_output)
    return features


def test_clip_from_the_cache_merged_and_loaded(tmp_path: Path, cache: Path) -> None:
    experts = write_clip_experts(tmp_path, cache)
    suite = build("clip-vit-b32-8", tmp_path, data=write_pictures(tmp_path / "data"))
    assert tuple(suite.tasks) == tuple(suite.paths) == CLIP8
    assert suite.tasks["eurosat"].labels == ("annual crop land", "lake or sea")
    assert suite.tasks["dtd"].labels == ("blue sea", "red barn")  # folders are read in the order of their names
    assert {split: len(part) for split, part in suite.tasks["dtd"].splits.items()} == {"train": 7, "val": 1, "test": 4}

    out = tmp_path / "out"
    suite.merged("task_arithmetic", {"scale": 0.3}).save(out)
    merged = load(out)
    assert verify_folder(out) == []
    manifest = read_manifest(out)
    assert manifest["family"] == "clip"
    inputs = manifest["inputs"]["experts"]["stanford-cars"]
    assert (inputs["name"], inputs["revision"]) == (f"tanganke/clip-vit-base-patch32_stanford-cars@{COMMIT}", COMMIT)

    batch = suite.processor([suite.tasks["dtd"]["test"].inputs[place] for place in range(4)])
    assert batch["pixel_values"].shape == (4, 3, 8, 8)
    tower = {key: value for key, value in clip_model().state_dict().items() if key in experts["dtd"]}
    by_hand = {key: base + 0.3 * sum(state[key] - base for state in experts.values()) for key, base in tower.items()}
    features = features_of(merged, batch, "dtd")
    torch.testing.assert_close(features, image_features(by_hand, batch), atol=1e-5, rtol=1e-5)
    for task in CLIP8:
        expected = zero_shot_head(suite.base, suite.tasks[task].labels, TEMPLATES[task])
        torch.testing.assert_close(merged.head(task)(features), expected(features))

    assert isinstance(suite.paths["dtd"], Expert)
    alone = suite.experts.teacher("dtd")
    own = image_features(experts["dtd"], batch)
    torch.testing.assert_close(features_of(alone, batch, "dtd"), own, atol=1e-5, rtol=1e-5)
    assert list(alone.heads) == ["dtd"]


def test_local_experts_and_base_need_no_hub(tmp_path: Path, cache: Path) -> None:
    write_clip_experts(tmp_path, tmp_path / "elsewhere")
    (tmp_path / "suite").mkdir()
    (tmp_path / "experts").rename(tmp_path / "suite" / "experts")
    data = write_pictures(tmp_path / "data")
    suite = build("clip-vit-b32-8", tmp_path, data=data, base=str(tmp_path / "base"))
    assert suite.experts.opening.experts["dtd"].path == str(tmp_path / "suite" / "experts" / "dtd")
    kept = (suite.base / "config.json").stat().st_mtime_ns
    build("clip-vit-b32-8", tmp_path, data=data)  # the base is there already
    assert (suite.base / "config.json").stat().st_mtime_ns == kept


def test_clip_faults(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'openai/clip-vit-base-patch32' is not in the cache"):
        build("clip-vit-b32-8", tmp_path, data=tmp_path)
    write_clip(tmp_path / "base")
    with pytest.raises(CheckpointError, match="has no file or folder named after a task \\('sun397'"):
        build("clip-vit-b32-8", tmp_path, data=tmp_path, base=str(tmp_path / "base"))
    (tmp_path / "base" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"must be a folder with weights and a config.json"):
        build_suite("clip-vit-b32-8", folder=tmp_path / "other", base=str(tmp_path / "base"), say=lambda text: None)


def test_templates_have_one_blank_and_class_names_are_words() -> None:
    counts = {task: len(set(templates)) for task, templates in TEMPLATES.items()}
    assert tuple(counts.items()) == tuple(zip(CLIP8, (2, 8, 18, 3, 1, 3, 1, 8), strict=True))
    assert all(template.count("{}") == 1 for templates in TEMPLATES.values() for template in templates)
    assert class_names("resisc45", ["golf_course", "sea ice"]) == ("golf course", "sea ice")
    assert class_names("eurosat", ["Permanent_Crop", "pasture land"]) == ("permanent crop land", "pasture land")
    assert class_names("mnist", ["0", "7"]) == ("0", "7")
    with pytest.raises(RecipeError, match=r"classes of 'gtsrb' must be named in words, .*, got '00000', '00001'"):
        class_names("gtsrb", ["00000", "00001"])


def write_tables(root: Path, *, short: bool = True) -> Path:
    """Headerless tables: a label from 1 on, a title, the text."""
    generator = np.random.default_rng(0)
    for task in TEXT5:
        home = root / ("ag" if short and task == "ag_news" else task)
        home.mkdir(parents=True)
        for split, times in (("train", 5), ("test", 2)):
            classes = len(published.TEXT_LABELS[task])
            with (home / f"{split}.csv").open("w", newline="") as file:
                writer = csv.writer(file, quoting=csv.QUOTE_ALL)
                for number in range(times * classes):
                    text = " ".join(generator.choice(WORDS, 1 + number % 9))
                    writer.writerow([number % classes + 1, "a title", text])
    return root


def write_state_dicts(folder: Path, encoder: Any, width: int, prefix: str, head: str = "classifier.0") -> Tensors:
    folder.mkdir(parents=True, exist_ok=True)
    states = {}
    for seed, task in enumerate(TEXT5, 1):
        state = {f"{prefix}{key}": value for key, value in perturbed(encoder.state_dict(), seed).items()}
        if f"{prefix}shared.weight" in state:  # one tensor with two names, as in a model
            state[f"{prefix}encoder.embed_tokens.weight"] = state[f"{prefix}shared.weight"]
        classes = len(published.TEXT_LABELS[task])
        generator = torch.Generator().manual_seed(classes)
        state[f"{head}.weight"] = torch.randn(classes, width, generator=generator)
        state[f"{head}.bias"] = torch.randn(classes, generator=generator)
        torch.save(state, folder / f"{'ag' if task == 'ag_news' else task}.pth")
        states[task] = state
    return states


def bert(berts: Path) -> Any:
    with quiet():
        from transformers import BertModel

        return BertModel.from_pretrained(berts / "base").eval()


def write_bert_experts(berts: Path, folder: Path, head: str = "classifier.0") -> Tensors:
    """As transformers 4 saved them, with the buffer of positions."""
    encoder = bert(berts)
    encoder.embeddings.register_buffer("position_ids", torch.arange(40)[None], persistent=True)
    return write_state_dicts(folder, encoder, 32, "bert.", head)


def test_bert_from_the_cache_merged(tmp_path: Path, berts: Path, cache: Path) -> None:
    states = write_bert_experts(berts, tmp_path / "experts")
    write_state_dicts(tmp_path / "experts" / "t5-base", torch.nn.Linear(1, 1), 16, "t5.")  # of no concern here
    lay(cache, "google-bert/bert-base-uncased", berts / "base")
    lay(cache, KONG, tmp_path / "experts")
    lay(cache, KONG, write_tables(tmp_path / "tables"), kind="datasets")
    suite = build("bert-text5", tmp_path)
    assert [len(published.TEXT_LABELS[name]) for name in TEXT5] == [4, 5, 5, 10, 14]
    sizes = {split: len(part) for split, part in suite.tasks["yahoo"].splits.items()}
    assert sizes == {"train": 45, "val": 5, "test": 20}

    merged = suite.merged("task_arithmetic", {"scale": 0.2})
    assert (merged.family.name, head_of(merged.heads["yahoo"]).pooling) == ("bert", "mean")
    encoder = bert(berts)
    floats = {key: value for key, value in encoder.state_dict().items() if value.is_floating_point()}
    by_hand = {
        key: value + 0.2 * sum(state[f"bert.{key}"] - value for state in states.values())
        for key, value in floats.items()
    }
    encoder.load_state_dict(by_hand, strict=False)
    batch = suite.processor(suite.tasks["yahoo"]["test"].inputs[:7])
    with torch.no_grad():
        features = encoder(batch["input_ids"]).last_hidden_state.mean(1)  # no mask: padding counts
        weight, bias = states["yahoo"]["classifier.0.weight"], states["yahoo"]["classifier.0.bias"]
    logits = merged.head("yahoo")(features_of(merged, batch, "yahoo"))
    torch.testing.assert_close(logits, features @ weight.T + bias, atol=1e-5, rtol=1e-5)


def test_halves_by_hand(tmp_path: Path, berts: Path, cache: Path) -> None:
    write_bert_experts(berts, tmp_path / "suite" / "experts", head="classifier")
    suite = build("bert-text5", tmp_path, data=write_tables(tmp_path / "tables"), base=str(berts / "base"))
    assert isinstance(suite.processor, HalvesProcessor)
    batch = suite.processor(["a good film", "it " * 50, ""])
    # [PAD] 0, [CLS] 2, [SEP] 3, a 5, good 6, film 8, it 11; the model has 40 positions
    assert batch["input_ids"][0].tolist() == [2, 5, 3, 6, 8, 3, *[0] * 34]
    assert batch["input_ids"][1].tolist() == [2, *[11] * 18, 3, *[11] * 19, 3]
    assert batch["input_ids"][2].tolist() == [2, 3, 3, *[0] * 37]
    assert batch["attention_mask"].tolist() == [[1] * 40] * 3
    assert suite.processor.digest() == f"halves-{suite.processor.inner.digest()}"
    opening = suite.experts.opening
    assert opening.pooling == "mean"
    assert opening.experts["ag_news"].head == HeadNames(("classifier",))  # as it is in these files


def write_t5(folder: Path) -> Any:
    """A base as the hub's, decoder and all; its encoder."""
    with quiet():
        from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration, T5Tokenizer

        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
        model.save_pretrained(folder)
        vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in WORDS)]
        T5Tokenizer(vocab=vocabulary, extra_ids=0).save_pretrained(folder)
        return T5EncoderModel.from_pretrained(folder).eval()


@pytest.mark.parametrize(("size", "prefix"), [("base", "t5."), ("large", "")])
def test_t5_from_the_cache_merged_and_loaded(size: str, prefix: str, tmp_path: Path, cache: Path) -> None:
    encoder = write_t5(tmp_path / "base")
    states = write_state_dicts(tmp_path / "experts" / f"T5_{size}", encoder, 16, prefix)
    lay(cache, f"google-t5/t5-{size}", tmp_path / "base")
    lay(cache, KONG, tmp_path / "experts")
    suite = build(f"t5-{size}-text5", tmp_path, data=write_tables(tmp_path / "tables"))
    merged = suite.merged("average")
    assert (merged.family.name, head_of(merged.heads["dbpedia"]).pooling) == ("t5_encoder", "mean")
    stacks = {key: [state[f"{prefix}{key}"] for state in states.values()] for key in encoder.state_dict()}
    encoder.load_state_dict({key: torch.stack(parts).mean(0) for key, parts in stacks.items()})
    batch = suite.processor(suite.tasks["dbpedia"]["test"].inputs[:6])
    mask = batch["attention_mask"][..., None]
    assert int((mask == 0).sum()) > 0
    with torch.no_grad():
        hidden = encoder(**batch).last_hidden_state
        weight, bias = states["dbpedia"]["classifier.0.weight"], states["dbpedia"]["classifier.0.bias"]
        expected = (hidden * mask).sum(1) / mask.sum(1) @ weight.T + bias
    logits = merged.head("dbpedia")(features_of(merged, batch, "dbpedia"))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_files_that_cannot_be_found(tmp_path: Path, berts: Path, cache: Path) -> None:
    home, tables, base = tmp_path / "experts", tmp_path / "tables", str(berts / "base")

    def refused(message: str, name: str = "bert-text5", data: Path | None = tables) -> None:
        with pytest.raises(CheckpointError, match=message):
            build(name, tmp_path, data=data, base=base)

    write_tables(tables / "one", short=False)
    refused(rf"cannot fetch the model repository '{KONG}' .*put them into .*TASK.pth")
    refused(rf"cannot fetch the dataset repository '{KONG}' .*--data", data=None)
    write_bert_experts(berts, home / "one")
    (home / "one" / "yelp.pth").rename(tmp_path / "yelp.pth")
    lay(cache, KONG, home)
    refused("has no file of expert 'yelp', among 'one/ag.pth'")
    refused("has no file of expert 'ag_news', among .*; get the experts", name="t5-base-text5")
    shutil.copytree(home / "one", home / "two")
    shutil.rmtree(cache)
    lay(cache, KONG, home)
    refused("several files of expert 'ag_news', 'one/ag.pth', 'two/ag.pth'")
    (tmp_path / "yelp.pth").rename(home / "one" / "yelp.pth")
    (tmp_path / "suite" / "experts").symlink_to(home / "one")
    (tables / "one" / "yelp").rename(tables / "one" / "helped")
    refused("no folder called yelp with train.csv and test.csv.*--data")
    write_tables(tables / "two")
    refused("has several folders .*/one/ag.*/two/ag")


LABELS = ("no", "yes")


def write_csv(folder: Path, text: str) -> Path:
    (folder / "train.csv").write_bytes(text.encode("latin-1"))
    (folder / "test.csv").write_text('"1","t","x"\n')
    return folder


def test_a_csv_task(tmp_path: Path) -> None:
    text = '"2","t","said ""no"", then\nyes"\n1,t,second,more\n\n2,t,NA\n'
    task = read_csv_task(write_csv(tmp_path, text), name="small", labels=LABELS)
    assert task["train"].inputs == ['said "no", then\nyes', "second", "NA"]
    assert task["train"].labels is not None
    assert task["train"].labels.tolist() == [1, 0, 1]
    assert list(task.splits) == ["train", "test"]  # too few for a val
    (tmp_path / "test.csv").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*test.csv.gz: No such file"):
        read_csv_task(tmp_path, name="small", labels=LABELS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label,title,text\n1,t,x\n2,t,y\n", "train.csv has 1 bad row: line 1 must begin with 1 to 2, got 'label'"),
        ("0,t,x\n3,t,y\n1,t,z\n", r"2 bad rows: line 1 must begin with 1 to 2, got '0'; line 2 .* got '3'"),
        ("1,x\n2,t,\n1,t,x\n", "2 bad rows: line 1 has no text in its third column; line 2 has no text"),
        ("1,t,x\n1,t,y\n", r"train.csv must have examples of all 2 labels of 'small'"),
        ("\n", r"train.csv is empty"),
        ('1,t,"x"y\n', "is not valid: ',' expected after '\"'"),
        ("1,t,caf\xe9\n", "train.csv line 1 is not UTF-8"),
    ],
)
def test_bad_csv_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_csv_task(write_csv(tmp_path, text), name="small", labels=LABELS)
