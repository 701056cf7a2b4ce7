"""Hub ids: a cache laid out by hand, and a small hub on this machine; no test needs a network."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import constants

from orthomerge.core.errors import CheckpointError
from orthomerge.files.opening import fetch, is_hub_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
NAME = "some-org/some.model"


HUB_IDS = ("google/vit-base-patch16-224", "a/b", "Org_1/x.y_z", "org/name@main", f"org/name@{COMMIT}", "a/b@refs/pr/3")
OTHERS = (
    *("", "name", "a/b/c", "/org/name", "./org/name", "../name", "~/name", "org/", "org//name"),
    *("org/-name", "org/name.", "org/na--me", "org/na..me", "org/na me", "org/näme", "org/name\n", "org/" + "x" * 97),
    *("org/name@", "org/name@../x", "org/name@a//b", "org/name@-x", "org/name@x/", "org/name@a@b", "C:\\org"),
    *("org/model.safetensors", "org/weights.BIN", "org/x.pt@main", "org/x.git", "https://huggingface.co/a/b"),
)


@pytest.mark.parametrize("text", [*HUB_IDS, *OTHERS])
def test_hub_ids(text: str) -> None:
    assert is_hub_id(text) == (text in HUB_IDS)


def refused(reference: str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        fetch(reference)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    return folder


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def lay(cache: Path, files: dict[str, bytes], *, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """A repository as huggingface_hub lays it out: blobs, a snapshot of links, a reference."""
    home = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    for folder in (home / "blobs", home / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        (home / "blobs" / digest).write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    if ref is not None:
        (home / "refs" / ref).write_text(commit)
    return snapshot


def list_tree(cache: Path, names: list[str]) -> None:
    """The hub's listing of the commit, as huggingface_hub keeps it."""
    home = cache / f"models--{NAME.replace('/', '--')}" / "trees"
    home.mkdir()
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
    (home / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))


MODEL = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", f"@{COMMIT}"])
def test_the_cache_serves_when_offline(revision: str, offline: Path) -> None:
    snapshots = {COMMIT: lay(offline, MODEL), OTHER: lay(offline, MODEL, commit=OTHER, ref="v1.0")}
    folder, commit = fetch(f"{NAME}{revision}")
    assert commit == (OTHER if revision == "@v1.0" else COMMIT)
    assert folder.resolve() == snapshots[commit].resolve()
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_files_that_we_never_fetch_may_be_missing_offline(offline: Path) -> None:
    lay(offline, MODEL)
    list_tree(offline, [*MODEL, "tf_model.h5", "pytorch_model.bin", "onnx/model.onnx", "README.md"])
    assert fetch(NAME)[1] == COMMIT


def test_offline_and_not_or_not_all_in_the_cache(offline: Path) -> None:
    refused(NAME, r"'some-org/some.model' is not in the cache .*HF_HUB_OFFLINE.*`hf download")
    lay(offline, MODEL)
    refused(f"{NAME}@v2", r"'some-org/some.model@v2' is not in the cache")
    list_tree(offline, [*MODEL, "tokenizer.json"])
    refused(NAME, "or not all of it, and HF_HUB_OFFLINE forbids fetching it")


# A hub of our own.


class Hub:
    """What a hub holds, how it answers, and what was asked of it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = dict(MODEL)
        self.head = COMMIT
        self.later = ""  # if given, the branch moves to it after the first question
        self.fault: tuple[int, str] | None = None
        self.file_fault: tuple[int, str] | None = None
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append(path)
        resolve = f"/{NAME}/resolve/"
        fault = hub.file_fault if path.startswith(resolve) else hub.fault
        if fault is not None:
            self.send(fault[0], b"", X_Error_Code=fault[1], X_Error_Message="no")
        elif path.startswith(f"/api/models/{NAME}/revision/"):
            info = {"id": NAME, "sha": hub.head, "siblings": [{"rfilename": name} for name in hub.files]}
            hub.head = hub.later or hub.head
            self.send(200, json.dumps(info).encode(), Content_Type="application/json")
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self.send(200, json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith(resolve):
            data = hub.files[path.removeprefix(resolve).partition("/")[2]]
            self.send(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)
        else:
            self.send(404, b"")

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Answer, hub)) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("wanted", "unwanted"),
    [
        (["model.safetensors"], ["pytorch_model.bin", "tf_model.h5", "model.onnx", "sub/model.safetensors"]),
        (["model-00001-of-00001.safetensors", "model.safetensors.index.json"], ["consolidated.safetensors", "x.pt"]),
        (["adapter_model.safetensors", "adapter_config.json"], ["adapter_model.bin", "README.md"]),
        (["odd.safetensors"], ["pytorch_model.bin"]),
        (["pytorch_model.bin"], ["training_args.bin", "optimizer.pt", "rng_state_0.pth", "other.pt"]),
        (["encoder.pt"], ["scheduler.pt", "logs/events.bin"]),
    ],
)
def test_what_is_fetched(wanted: list[str], unwanted: list[str], hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["config.json", "tokenizer_config.json", "vocab.txt", "spiece.model", "preprocessor_config.json"]
    hub.files = {name: name.encode() for name in (*documents, *wanted, *unwanted)}
    folder, commit = fetch(NAME)
    assert commit == COMMIT
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {*documents, *wanted}
    assert (folder / wanted[0]).read_bytes() == wanted[0].encode()
    hub.asked.clear()
    assert fetch(NAME) == (folder, COMMIT)
    assert not [path for path in hub.asked if "/resolve/" in path]  # what the cache holds is not fetched again
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert fetch(NAME) == (folder, COMMIT)
    assert hub.asked == []


def test_when_the_hub_fails_a_commit_is_taken_from_the_cache_and_a_branch_is_not(hub: Hub) -> None:
    folder, _ = fetch(NAME)
    hub.fault = (503, "")
    assert fetch(f"{NAME}@{COMMIT}") == (folder, COMMIT)
    refused(f"{NAME}@{OTHER}", r"cannot fetch 'some-org/some.model@f+' .*check the network")
    refused(NAME, r"cannot fetch .*503.*set HF_HUB_OFFLINE=1 to use what is in the cache")


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    refused(NAME, r"cannot fetch 'some-org/some.model' from http://127.0.0.1:9 \(ConnectError")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((404, "RepoNotFound"), r"some.model' is not a path that exists, and .* does not exist or is private"),
        ((401, ""), r"does not exist or is private: check the spelling, or log in with `hf auth login`"),
        ((403, "GatedRepo"), r"'some-org/some.model' is gated: accept its terms at http.*/some-org/some.model, then"),
        ((404, "RevisionNotFound"), r"'some-org/some.model' has no revision 'v9': http.*/tree/main lists"),
        ((500, ""), r"cannot fetch 'some-org/some.model@v9' .*500"),
    ],
)
def test_answers_of_the_hub(fault: tuple[int, str], message: str, hub: Hub) -> None:
    hub.fault = fault
    refused(f"{NAME}@v9", message)


def test_gated_files_and_no_weights(hub: Hub) -> None:
    hub.file_fault = (403, "GatedRepo")
    refused(NAME, "is gated: accept its terms")
    hub.files = {"README.md": b"", "tf_model.h5": b"", "a/model.safetensors": b"", "optimizer.pt": b""}
    refused(NAME, r"has no supported weights.* it has 'README.md', .* and 1 more")
    hub.files = {}
    refused(NAME, "it has no files")


def test_a_branch_that_moves_while_it_is_fetched(hub: Hub) -> None:
    hub.later = OTHER
    refused(NAME, r"some.model@main changed while it was fetched; run the command again")
