"""`orthomerge push` to a hub on this machine, which speaks what huggingface_hub asks of the real one."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from tests.aligning import contents as all_contents
from tests.aligning import merge_berts
from tests.calling import call, refused

from orthomerge.core.errors import OutputError, RecipeError
from orthomerge.files.ownership import LOCAL
from orthomerge.models.pushing import _additions, plan_upload, push

TOKEN = "hf_test"
LARGE = (".safetensors",)


def contents(out: Path) -> dict[str, bytes]:
    """What is published of an output; links as what they lead to."""
    return {name: data for name, data in all_contents(out).items() if name != LOCAL}


@dataclass
class Hub:
    """Repositories by name and branch: files by path. `uploads`: what LFS got, by its hash."""

    address: str = ""
    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refuse: int = 0


class Handler(BaseHTTPRequestHandler):
    """The few endpoints that an upload needs."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        pass

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        name, branch = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
        files = self.hub.repos.get(name, {}).get(branch)
        if parts[:2] != ["api", "models"] or files is None:
            return self.answer({"error": "not found"}, 404)
        if "tree" in parts:
            return self.answer(
                [{"type": "file", "path": file, "size": len(data), "oid": "0" * 40} for file, data in files.items()]
            )
        return self.answer({"id": name, "sha": "1" * 40, "siblings": [{"rfilename": file} for file in files]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.hub.refuse:
            return self.answer({"error": "You may not"}, self.hub.refuse)
        if parts == ["api", "repos", "create"]:
            return self.create(json.loads(data))
        if parts == ["api", "validate-yaml"]:
            return self.answer({"errors": [], "warnings": []})
        if parts[-3:] == ["lfs", "objects", "batch"]:
            return self.answer(
                {"transfer": "basic", "objects": [self.action(item) for item in json.loads(data)["objects"]]}
            )
        name, verb = "/".join(parts[2:4]), parts[4]
        if verb == "branch":
            self.hub.repos[name].setdefault(parts[5], {})
            return self.answer({})
        if verb == "preupload":
            return self.answer({"files": [self.mode(item["path"]) for item in json.loads(data)["files"]]})
        assert verb == "commit", self.path
        return self.commit(name, parts[5], [json.loads(line) for line in data.splitlines()])

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        assert hashlib.sha256(data).hexdigest() == self.path.removeprefix("/upload/")
        self.hub.uploads[self.path.removeprefix("/upload/")] = data
        self.answer({})

    def create(self, given: dict[str, Any]) -> None:
        name = f"{given['organization']}/{given['name']}"
        self.hub.created.append(given)
        if name in self.hub.repos:
            return self.answer({"error": "exists", "url": f"{self.hub.address}/{name}"}, 409)
        self.hub.repos[name] = {"main": {}}
        return self.answer({"url": f"{self.hub.address}/{name}", "name": name, "id": "1"})

    def action(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "actions": {"upload": {"href": f"{self.hub.address}/upload/{item['oid']}"}}}

    def mode(self, path: str) -> dict[str, Any]:
        return {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular", "shouldIgnore": False}

    def commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.repos[name][branch]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.answer(
            {"commitUrl": f"{self.hub.address}/{name}/commit/{'2' * 40}", "commitOid": "2" * 40, "success": True}
        )

    def answer(self, document: Any, code: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, hub))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02})
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def out(once: Callable[..., Path], berts: Path) -> Path:
    return once("pushed", lambda folder: merge_berts(berts, folder / "out", names=("two", "three"))) / "out"


def pushed(hub: Hub, home: Path, *arguments: object, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own: huggingface_hub reads its environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    ours = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-m", "orthomerge.cli.app", "push", *map(str, arguments)]
    env = {**kept, **ours, **({"HF_TOKEN": token} if token else {})}
    return subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def test_a_whole_output(hub: Hub, out: Path, tmp_path: Path) -> None:
    done = pushed(hub, tmp_path, out, "org/name", "--private", "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded: {hub.address}/org/name/commit/{'2' * 40}"
    assert hub.repos["org/name"]["main"] == contents(out)
    assert hub.created[0]["visibility"] == "private"
    assert [hashlib.sha256(data).hexdigest() for data in hub.uploads.values()] == list(hub.uploads)
    assert hub.messages == ["Upload a merge made by orthomerge"]


def test_a_branch_of_a_repository_that_is_there(hub: Hub, out: Path, tmp_path: Path) -> None:
    stale = {
        "encoder-00001-of-00002.safetensors": b"old",
        "old/head.safetensors": b"old",
        "old/config.json": b"old",
        "notes.txt": b"theirs",
        "docs/config.json": b"theirs",
    }
    hub.repos["org/name"] = {"main": {"README.md": b"x"}, "v2": dict(stale)}
    done = pushed(hub, tmp_path, out, "org/name", "--revision", "v2", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["files"].keys() == contents(out).keys()
    assert hub.repos["org/name"]["main"] == {"README.md": b"x"}
    assert hub.repos["org/name"]["v2"] == {
        "notes.txt": b"theirs",
        "docs/config.json": b"theirs",
        **contents(out),
    }  # shards and tasks of an earlier output are gone


def test_nobody_is_asked_without_a_terminal(hub: Hub, out: Path, tmp_path: Path) -> None:
    done = pushed(hub, tmp_path, out, "org/name")
    assert (done.returncode, hub.repos) == (2, {})
    assert "give --yes" in done.stderr


@pytest.mark.parametrize(
    ("token", "code", "message"),
    [
        ("", 0, "log in with `hf auth login`, or set HF_TOKEN"),
        (TOKEN, 403, "your token may not write to 'org/name': use one with write access to 'org'"),
        (TOKEN, -1, "cannot upload to 'org/name' at http://127.0.0.1:9"),
    ],
)
def test_hubs_that_refuse(token: str, code: int, message: str, hub: Hub, out: Path, tmp_path: Path) -> None:
    hub.refuse = code
    there = hub if code >= 0 else Hub(address="http://127.0.0.1:9")
    done = pushed(there, tmp_path, out, "org/name", "--yes", token=token)
    assert done.returncode == 5
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_only_what_was_verified_is_sent(hub: Hub, out: Path, tmp_path: Path) -> None:
    """Neither what says where experts lay on this machine, nor what came into the folder after it was verified."""
    copy = Path(shutil.copytree(out, tmp_path / "out", symlinks=True))
    assert (copy / LOCAL).is_file()
    upload = plan_upload(copy, "org/name")
    (copy / "notes.txt").write_text("mine")
    assert set(upload.files) == set(contents(out))
    operations = {each.path_in_repo: each for each in _additions(upload)}
    assert set(operations) == set(contents(out))
    for name, data in contents(out).items():
        assert operations[name].upload_info.sha256 == hashlib.sha256(data).digest()
    (copy / "README.md").write_text("x" * upload.files["README.md"])
    with pytest.raises(OutputError, match=r"README\.md has changed since it was verified; push again"):
        list(_additions(upload))


def test_a_hub_that_never_answers(out: Path, tmp_path: Path) -> None:
    """A server that takes the call and stays silent ends in an error."""
    code = "from orthomerge.models import pushing; pushing._PATIENCE = 0.3; from orthomerge.cli.app import main; main()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}", "HF_HOME": str(tmp_path), "HF_TOKEN": "x"}
        command = [sys.executable, "-c", code, "push", str(out), "org/name", "--yes"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 5, done.stderr
    assert "cannot upload to 'org/name'" in done.stderr
    assert "Timeout" in done.stderr


def test_a_dry_run(out: Path) -> None:
    text = call("push", out, "org/name", "--revision", "v1", "--dry-run").stdout
    assert "  encoder.safetensors\n" in text
    assert text.endswith("MB, verified; to org/name, branch v1\n")
    files = json.loads(call("push", out, "org/name", "--dry-run", "--json").stdout)["files"]
    assert files == {name: len(data) for name, data in contents(out).items()}


def test_refused(berts: Path, out: Path, tmp_path: Path) -> None:
    broken = merge_berts(berts, tmp_path / "broken", names=("two", "three"))
    with (broken / "README.md").open("a") as file:
        file.write("more")
    with pytest.raises(OutputError, match=r"is not what was written, so it is not uploaded: 'README\.md has"):
        plan_upload(broken, "org/name")
    for name in ("name", "org/name@main", "../x", "org/na me"):
        assert "must name a repository of the hub as org/name" in refused("push", out, name, "--dry-run", code=2)
    with pytest.raises(RecipeError, match="--revision must be the name of a branch, got 'a b'"):
        plan_upload(out, "org/name", revision="a b")
    with pytest.raises(OutputError, match="HF_HUB_OFFLINE forbids uploading"):
        push(out, "org/name")
