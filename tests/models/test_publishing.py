"""What the hub gets: a model card in its format, where names from outside are never markup, and the files of a push."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import yaml
from huggingface_hub import HfApi, ModelCard, constants
from tests.berts import contents, merge_berts, write_tables
from tests.calling import call, refused
from tests.files.test_hub import NAME, Hub, cache, hub
from tests.models.conftest import NAMES
from tests.models.making import stock

import orthomerge as om
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.evaluation.records import Record
from orthomerge.files.folders import LOCAL, MANIFEST
from orthomerge.files.opening import fetch
from orthomerge.models.card import model_card
from orthomerge.models.manifest import licence_of, read_manifest
from orthomerge.models.pushing import _additions, plan_upload
from orthomerge.models.saved import verify_folder
from orthomerge.models.writing import rewrite_card
from orthomerge.runs.steps import evaluation_of

__all__ = ["cache", "hub"]  # fixtures

MEASURED = {
    "metric": "accuracy",
    "split": "test",
    "access": "inductive",
    "tasks": {
        "two": {"value": 0.75, "low": 0.7, "high": 0.8, "examples": 1200, "expert": 0.9, "base": 0.5},
        "three": {"value": 0.65, "low": 0.6, "high": 0.7, "examples": 800, "expert": 0.7, "base": 0.4},
    },
}


def parts(card: str) -> tuple[dict[str, Any], str]:
    """Header and text."""
    _, header, text = card.split("---\n", 2)
    return yaml.safe_load(header), text


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    return parts((folder / "README.md").read_text())


def test_of_a_merge(merged: Path) -> None:
    header, text = card_of(merged)
    tags = ["merge", "orthomerge", "task_arithmetic"]
    assert header == {"library_name": "transformers", "pipeline_tag": "text-classification", "tags": tags}
    assert "None: only weights were merged." in text
    assert "| expert two | two | unknown |" in text
    assert "Accuracy\n" not in text
    assert "measure it on your own data before use" in text


def test_what_was_measured(out: Path) -> None:
    before, inodes = contents(out), {path: path.stat().st_ino for path in out.rglob("*.safetensors")}
    rewrite_card(out, MEASURED)
    header, text = card_of(out)
    assert "| two | 90.0 | 50.0 | 75.0 | 70.0 to 80.0 | 1,200 |" in text
    assert "| mean | 80.0 | 45.0 | 70.0 |  |  |" in text
    assert "on the test split; this model is inductive (the inputs used to make it are not those" in text
    assert header["model-index"][0]["results"][1] == {
        "task": {"type": "text-classification", "name": "three"},
        "dataset": {"name": "three", "type": "three", "split": "test"},
        "metrics": [{"type": "accuracy", "value": 0.65, "name": "accuracy (inductive)"}],
    }
    data: Any = ModelCard((out / "README.md").read_text()).data  # as the hub reads it
    assert {each.dataset_name: each.metric_value for each in data.eval_results} == {"two": 0.75, "three": 0.65}
    assert verify_folder(out) == []
    after = contents(out)
    assert {name for name in after if after[name] != before.get(name)} == {"README.md", MANIFEST}
    assert {path: path.stat().st_ino for path in out.rglob("*.safetensors")} == inodes
    rewrite_card(out, None)
    assert contents(out) == before


def test_what_is_not_ours_stays(out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    (out / "link").symlink_to("/etc/hostname")
    rewrite_card(out, MEASURED)
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "link").readlink() == Path("/etc/hostname")  # not what it leads to
    assert verify_folder(out) == [f"{name} was not written by the merge" for name in ("link", "notes.txt")]


def test_data_used(out: Path, tmp_path: Path) -> None:
    tables = write_tables(tmp_path)
    rewrite_card(out, MEASURED)
    aligned = om.align(out, {"two": tables / "two.csv"}, aligner="ridge", split="test", limit=20)
    aligned.save(tmp_path / "to")
    header, text = card_of(tmp_path / "to")
    assert re.search(r"\| heads \| two \| test \| 20 \| [0-9a-f]{16} \|", text)
    assert "aligned by `ridge`, which is transductive and adds no parameter" in text
    assert "model-index" not in header  # those numbers were of other heads
    assert "evaluation" not in read_manifest(tmp_path / "to")


LICENCES = {
    "---\nlicense: apache-2.0\ntags: [x]\n---\n# x": "apache-2.0",
    "---\r\nlicense: 'mit'\r\n---\r\n": "mit",
    "---\nlicense: [mit, apache-2.0]\n---\n": "mit, apache-2.0",
    "---\nlicense: other\nlicense_name: mine\n---\n": "other (mine)",
    '---\nwidget: a & b *\nlicense: "mit"\n---\n': "mit",
    "---\nlicense:\n- mit\n- apache-2.0\ntags: [x]\n---\n": "mit, apache-2.0",
}
NONE = [
    "---\nlicense: mit\n",
    "---\n- license\n---\n",
    "---\na: b: c\n---\n",
    "---\ntags: [x]\n---\n",
    "# license: mit\n",
    "",
]


def test_licences(tmp_path: Path) -> None:
    assert licence_of(tmp_path) is None
    assert licence_of(tmp_path, reference="org/name@v1", revision="0" * 40) is None  # offline
    for card, licence in {**dict.fromkeys(NONE), **LICENCES}.items():
        (tmp_path / "README.md").write_bytes(card.encode())
        assert licence_of(tmp_path) == licence, card
    (tmp_path / "in").mkdir()
    (tmp_path / "in/README.md").symlink_to("../README.md")
    (tmp_path / "in/x.pth").touch()
    assert licence_of(tmp_path / "in") is licence_of(tmp_path / "in/x.pth") is None


def test_the_card_of_a_model_of_the_hub(hub: Hub) -> None:
    hub.files["README.md"] = b"---\nlicense: mit\n---\n"
    folder, commit = fetch(NAME)
    assert not (folder / "README.md").exists()  # weights and what they need come alone
    assert licence_of(folder, reference=f"{NAME}@main", revision=commit) == "mit"
    hub.asked.clear()
    assert licence_of(folder, reference=NAME, revision=commit) == "mit"
    assert hub.asked == []


def test_a_model_of_the_hub_without_a_card(hub: Hub) -> None:
    folder, commit = fetch(NAME)
    hub.file_fault = (404, "EntryNotFound")
    assert licence_of(folder, reference=NAME, revision=commit) is None


def test_licences_of_the_parts(berts: Path, tmp_path: Path) -> None:
    shutil.copytree(berts, tmp_path, dirs_exist_ok=True)
    for name in ("base", "two", "three"):
        (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\n")
    header, text = card_of(merge_berts(tmp_path, tmp_path / "same", NAMES))
    assert header["license"] == "mit"
    assert "| base | base | mit |" in text
    (tmp_path / "two/README.md").write_text("---\nlicense: <b>cc|by\n---\n")
    header, text = card_of(merge_berts(tmp_path, tmp_path / "other", NAMES))
    assert "license" not in header
    assert "| expert two | two | &#60;b&#62;cc&#124;by |" in text


def test_names_are_not_markup(merged: Path) -> None:
    manifest = read_manifest(merged)
    evil = "<script>alert(1)</script>|`x`\n# [a](b) *c* ![](d) $e$ &lt; ---"
    manifest["inputs"]["base"]["name"] = evil
    manifest["inputs"]["experts"]["two"] |= {"name": evil, "license": evil, "revision": evil}
    manifest["heads"]["two"]["labels"] = [evil, "b"]
    manifest["method"] = {"name": evil, "parameters": {evil: evil}}
    manifest |= {"vector": evil, "notes": [evil], "evaluation": MEASURED, "orthomerge": evil}
    manifest["heads"]["two"]["pooling"] = evil
    header, text = parts(model_card(manifest))
    assert header["tags"][2] == evil
    for mark in ("<script", "`x`", "[a](b)", "*c*", "\n# [", "![]", "$e$", "&lt;"):
        assert mark not in text
    assert text.count("\n# ") == 1
    rows = [line for line in text.splitlines() if line.startswith("| expert two")]
    assert [row.count("|") for row in rows] == [4]


def test_a_class_of_its_own_has_no_pipeline_and_models_of_the_hub_are_named_as_parents(merged: Path) -> None:
    manifest = read_manifest(merged)
    header, _ = parts(model_card({**manifest, "family": "generic", "evaluation": MEASURED}))
    assert "pipeline_tag" not in header
    assert header["model-index"][0]["results"][0]["task"]["type"] == "other"
    for entry in (manifest["inputs"]["base"], *manifest["inputs"]["experts"].values()):
        entry |= {"name": "org/base@v1", "revision": "1" * 40}
    header, _ = parts(model_card(manifest))
    assert (header["base_model"], header["base_model_relation"]) == (["org/base"], "merge")


def test_what_counts_as_measured(merged: Path) -> None:
    numbers: dict[str, Any] = {"metric": "accuracy", "low": 0.1, "high": 0.9, "examples": 10, "access": "data-free"}

    def record(method: str, value: float, protocol: str = "current", **more: Any) -> Record:
        return Record("two", method, protocol=protocol, value=value, **numbers, **more)

    title = om.load(merged).title
    others = [record("task_arithmetic", 0.3, "knn"), record("task_arithmetic", 0.4, aligner="auto")]
    assert evaluation_of(title, others) is None
    found = evaluation_of(title, [*others, record("task_arithmetic", 0.5), record("expert", 0.8)])
    assert found is not None
    assert found["tasks"] == {"two": {"value": 0.5, "low": 0.1, "high": 0.9, "examples": 10, "expert": 0.8}}


def test_a_task_folder_has_the_labels(berts: Path, tmp_path: Path) -> None:
    names = ("günstig", "<b>teuer</b>", "weder | noch")
    experts = om.open({"three": berts / "three"}, base=berts / "base", labels={"three": names})
    om.merge(experts, "average").save(tmp_path / "out")
    config = stock(tmp_path / "out/three").config
    assert config.id2label == dict(enumerate(names))
    assert config.label2id == {label: number for number, label in enumerate(names)}


# `orthomerge push`, with a stand-in for the hub's API that has its signatures, and with servers that do not answer


def published(out: Path) -> dict[str, bytes]:
    """What is published of an output; links as what they lead to."""
    return {name: data for name, data in contents(out).items() if name != LOCAL}


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The API object; `api.files` is what a repository holds."""
    api = create_autospec(HfApi, instance=True)
    api.files = []
    api.list_repo_files.side_effect = lambda repo, **_: list(api.files)
    api.create_commit.return_value = SimpleNamespace(commit_url="https://hub/org/name/commit/2")
    monkeypatch.setattr(huggingface_hub, "HfApi", create_autospec(HfApi, return_value=api))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return api


def operations(api: Any) -> tuple[dict[str, Any], set[str]]:
    """What the commit adds, and what it deletes."""
    each = api.create_commit.call_args.args[1]
    added = {item.path_in_repo: item for item in each if isinstance(item, huggingface_hub.CommitOperationAdd)}
    return added, {item.path_in_repo for item in each if item.path_in_repo not in added}


def test_a_whole_output(api: Any, merged: Path) -> None:
    text = call("push", merged, "org/name", "--private", "--yes").stdout
    assert text.splitlines()[-1] == "uploaded: https://hub/org/name/commit/2"
    api.create_repo.assert_called_once_with("org/name", private=True, repo_type="model", exist_ok=True)
    api.create_branch.assert_not_called()
    assert api.create_commit.call_args.kwargs["commit_message"] == "Upload a merge made by orthomerge"
    added, deleted = operations(api)
    assert set(added) == set(published(merged))
    for name, data in published(merged).items():
        assert added[name].upload_info.sha256 == hashlib.sha256(data).digest()
    assert not deleted


def test_a_branch_of_a_repository_that_is_there(api: Any, merged: Path) -> None:
    """Shards and tasks of an earlier output are deleted, and nothing else."""
    stale = {"encoder-00001-of-00002.safetensors", "old/head.safetensors", "old/config.json"}
    api.files = [*stale, "notes.txt", "docs/config.json", "docs/encoder.safetensors", "README.md"]
    document = json.loads(call("push", merged, "org/name", "--revision", "v2", "--yes", "--json").stdout)
    assert document["files"].keys() == published(merged).keys()
    api.create_branch.assert_called_once_with("org/name", branch="v2", exist_ok=True)
    assert api.create_commit.call_args.kwargs["revision"] == "v2"
    assert operations(api)[1] == stale


ANSWERS = {
    401: "log in with `hf auth login`, or set HF_TOKEN",
    403: "your token may not write to 'org/name': use one with write access to 'org'",
    500: "cannot upload to 'org/name' at https://huggingface.co (OSError: no",
}


def test_hubs_that_refuse(api: Any, merged: Path) -> None:
    error: Any = OSError("no\nmore")
    api.create_repo.side_effect = error
    for status, message in ANSWERS.items():
        error.response = SimpleNamespace(status_code=status)
        assert message in refused("push", merged, "org/name", "--yes", code=5)


def test_only_what_was_verified_is_sent(merged: Path, out: Path) -> None:
    """Neither what says where experts lay on this machine, nor what came into the folder after it was verified."""
    assert (out / LOCAL).is_file()
    files = plan_upload(out, "org/name")
    (out / "notes.txt").write_text("mine")
    assert {each.path_in_repo for each in _additions(out, files)} == set(files) == set(published(merged))
    (out / "README.md").write_text("x" * files["README.md"]["size"])
    with pytest.raises(OutputError, match=r"README\.md has changed since it was verified; push again"):
        list(_additions(out, files))


@pytest.mark.parametrize("answers", [True, False])
def test_servers_that_do_not_answer(answers: bool, merged: Path, tmp_path: Path) -> None:
    """One that takes the call and stays silent, and none at all, end in an error."""
    code = "from orthomerge.models import pushing; pushing._TIMEOUT = 0.3; from orthomerge.cli.app import main; main()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if answers else 9
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "HF_TOKEN": "x"}
        command = [sys.executable, "-c", code, "push", str(merged), "org/name", "--yes"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 5, done.stderr
    assert f"cannot upload to 'org/name' at http://127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run(merged: Path) -> None:
    text = call("push", merged, "org/name", "--revision", "v1", "--dry-run").stdout
    assert "  encoder.safetensors\n" in text
    assert text.endswith("MB, verified; to org/name, branch v1\n")
    files = json.loads(call("push", merged, "org/name", "--dry-run", "--json").stdout)["files"]
    assert files == {name: len(data) for name, data in published(merged).items()}


def test_refused(merged: Path, out: Path) -> None:
    with (out / "README.md").open("a") as file:
        file.write("more")
    with pytest.raises(OutputError, match=r"differs from its manifest, so it is not uploaded: 'README\.md has"):
        plan_upload(out, "org/name")
    for name in ("name", "org/name@main", "../x", "org/na me"):
        assert "must name a repository of the hub as org/name" in refused("push", merged, name, "--dry-run", code=2)
    with pytest.raises(RecipeError, match="--revision must be the name of a branch, got 'a b'"):
        plan_upload(merged, "org/name", revision="a b")
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE forbids uploading"):
        om.push(merged, "org/name")
    assert "give --yes" in refused("push", merged, "org/name", code=2)
