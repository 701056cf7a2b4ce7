"""`orthomerge push`, with a stand-in for the hub's API that has its signatures, and with servers that do not answer."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from tests.berts import contents as all_contents
from tests.calling import call, refused

import orthomerge as om
from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.files.folders import LOCAL
from orthomerge.models.pushing import _additions, plan_upload


def contents(out: Path) -> dict[str, bytes]:
    """What is published of an output; links as what they lead to."""
    return {name: data for name, data in all_contents(out).items() if name != LOCAL}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The API object; `hub.files` is what a repository holds."""
    api = create_autospec(HfApi, instance=True)
    api.files = []
    api.list_repo_files.side_effect = lambda repo, **_: list(api.files)
    api.create_commit.return_value = SimpleNamespace(commit_url="https://hub/org/name/commit/2")
    monkeypatch.setattr(huggingface_hub, "HfApi", create_autospec(HfApi, return_value=api))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return api


def operations(hub: Any) -> tuple[dict[str, Any], set[str]]:
    """What the commit adds, and what it deletes."""
    each = hub.create_commit.call_args.args[1]
    added = {item.path_in_repo: item for item in each if isinstance(item, huggingface_hub.CommitOperationAdd)}
    return added, {item.path_in_repo for item in each if item.path_in_repo not in added}


def test_a_whole_output(hub: Any, merged: Path) -> None:
    text = call("push", merged, "org/name", "--private", "--yes").stdout
    assert text.splitlines()[-1] == "uploaded: https://hub/org/name/commit/2"
    hub.create_repo.assert_called_once_with("org/name", private=True, repo_type="model", exist_ok=True)
    hub.create_branch.assert_not_called()
    assert hub.create_commit.call_args.kwargs["commit_message"] == "Upload a merge made by orthomerge"
    added, deleted = operations(hub)
    assert set(added) == set(contents(merged))
    for name, data in contents(merged).items():
        assert added[name].upload_info.sha256 == hashlib.sha256(data).digest()
    assert not deleted


def test_a_branch_of_a_repository_that_is_there(hub: Any, merged: Path) -> None:
    """Shards and tasks of an earlier output are deleted, and nothing else."""
    stale = {"encoder-00001-of-00002.safetensors", "old/head.safetensors", "old/config.json"}
    hub.files = [*stale, "notes.txt", "docs/config.json", "docs/encoder.safetensors", "README.md"]
    document = json.loads(call("push", merged, "org/name", "--revision", "v2", "--yes", "--json").stdout)
    assert document["files"].keys() == contents(merged).keys()
    hub.create_branch.assert_called_once_with("org/name", branch="v2", exist_ok=True)
    assert hub.create_commit.call_args.kwargs["revision"] == "v2"
    assert operations(hub)[1] == stale


ANSWERS = {
    401: "log in with `hf auth login`, or set HF_TOKEN",
    403: "your token may not write to 'org/name': use one with write access to 'org'",
    500: "cannot upload to 'org/name' at https://huggingface.co (OSError: no",
}


def test_hubs_that_refuse(hub: Any, merged: Path) -> None:
    error: Any = OSError("no\nmore")
    hub.create_repo.side_effect = error
    for status, message in ANSWERS.items():
        error.response = SimpleNamespace(status_code=status)
        assert message in refused("push", merged, "org/name", "--yes", code=5)


def test_only_what_was_verified_is_sent(merged: Path, out: Path) -> None:
    """Neither what says where experts lay on this machine, nor what came into the folder after it was verified."""
    assert (out / LOCAL).is_file()
    upload = plan_upload(out, "org/name")
    (out / "notes.txt").write_text("mine")
    assert {each.path_in_repo for each in _additions(upload)} == set(upload.files) == set(contents(merged))
    (out / "README.md").write_text("x" * upload.files["README.md"])
    with pytest.raises(OutputError, match=r"README\.md has changed since it was verified; push again"):
        list(_additions(upload))


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
    assert files == {name: len(data) for name, data in contents(merged).items()}


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
