"""The command under torchrun: one output, one message, one exit code, and a killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligning import HEADS, write_tables
from tests.distributed.running import QUICK, codes, told, torchrun, write_recipe

import orthomerge
from orthomerge.errors import RecipeError
from orthomerge.merged import load, verify
from orthomerge.recipe import Fit, read_recipe


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTHOMERGE_CACHE", str(tmp_path / "own-cache"))
    return tmp_path / "cache"


def weights(out: Path) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in load(out).encoder.state_dict().values()])


def curve(out: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((out / "orthomerge.json").read_text())["fit"]["curve"]
    return found


@pytest.mark.parametrize("sharded", [False, True])
def test_a_killed_process_and_all_go_on_to_the_same_end(
    sharded: bool, berts: Path, tmp_path: Path, cache: Path
) -> None:
    recipe = write_recipe(tmp_path, berts, "moma", QUICK, device="cpu", save_every=0, sharded=sharded)
    out = tmp_path / "out"
    done = torchrun("tests.distributed.broken", "merge", recipe, "--out", out, restarts=1, cache=cache, BREAK="kill 1")
    assert done.returncode == 0, done.stderr[-3000:]
    looks = [line.split(":")[0] for line in done.stderr.splitlines() if line.startswith("step")]
    assert looks == [f"step {step} of 6" for step in (0, 2, 4, 6)]  # none is done twice
    assert done.stdout.count("wrote") == 1
    plain = read_recipe(write_recipe(tmp_path, berts, "moma", QUICK, device="cpu"))
    one = orthomerge.merge(plain, out=tmp_path / "one").out
    torch.testing.assert_close(weights(out), weights(one), rtol=0, atol=1e-6)
    for ours, theirs in zip(curve(out), curve(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert not verify(out)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    about = json.loads((out / "orthomerge.json").read_text())["fit"]
    assert (about["processes"], about["sharded"]) == (2, sharded)


def test_an_error_in_one_process_is_the_error_of_all(berts: Path, tmp_path: Path, cache: Path) -> None:
    recipe = write_recipe(tmp_path, berts, "moma", QUICK, device="cpu", resume=False)
    out = tmp_path / "out"
    done = torchrun("tests.distributed.broken", "merge", recipe, "--out", out, cache=cache, BREAK="raise 1")
    assert told(done) == ["orthomerge: process 1: the moon is not finite"]
    assert codes(done) == [6, 6]
    assert not out.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_mistake_in_the_recipe_is_told_once(berts: Path, tmp_path: Path, cache: Path) -> None:
    recipe = write_recipe(tmp_path, berts, "adamerging", {"steps": 2}, device="cpu", sharded=True)
    done = torchrun("orthomerge", "merge", recipe, "--out", tmp_path / "out", cache=cache)
    (message,) = told(done)
    assert "'adamerging' with these options trains numbers that belong to many weights" in message
    assert codes(done) == [2, 2]


def test_aligning_a_merge(berts: Path, tmp_path: Path, cache: Path) -> None:
    tables, merged = tmp_path / "tables", tmp_path / "merged"
    tables.mkdir()
    write_tables(tables)
    experts = {task: str(berts / task) for task in HEADS}
    orthomerge.merge(orthomerge.Recipe(experts=experts, base=str(berts / "base")), out=merged)
    data = {task: str(tables / f"{task}.csv") for task in HEADS}
    given = [f"--expert={task}={path}" for task, path in experts.items()]
    given += [f"--data={task}={path}" for task, path in data.items()]
    options: dict[str, Any] = {"aligner": "ridge", "batch": 8, "device": "cpu"}
    done = torchrun(
        "orthomerge", "align", merged, *given, "--aligner=ridge", "--batch=8", "--device=cpu", "--out",
        tmp_path / "out", cache=cache,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    orthomerge.align(merged, data=data, experts=experts, to=tmp_path / "one", **options)
    for task in HEADS:
        ours, theirs = (load(tmp_path / name).head(task).tensors() for name in ("out", "one"))  # type: ignore[attr-defined]
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


def test_shards_need_torchrun(berts: Path, tmp_path: Path, cache: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path, berts, "moma", QUICK, device="cpu", sharded=True))
    with pytest.raises(RecipeError, match=r"'sharded' is for several processes; start them by torchrun"):
        orthomerge.merge(recipe, out=tmp_path / "out")


def test_seconds_between_states_are_seconds() -> None:
    with pytest.raises(RecipeError, match=r"'save_every' must be a number of seconds, got -1"):
        Fit({"two": "two.csv"}, save_every=-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sharded", [False, True])
def test_a_gpu(sharded: bool, berts: Path, tmp_path: Path, cache: Path) -> None:
    """One process that talks to itself through nccl comes to what one without torchrun does."""
    given: dict[str, Any] = {"device": "cuda", "precision": "float32"}
    recipe = write_recipe(tmp_path, berts, "moma", QUICK, **given, sharded=sharded)
    done = torchrun("orthomerge", "merge", recipe, "--out", tmp_path / "out", count=1, cache=cache)
    assert done.returncode == 0, done.stderr[-3000:]
    plain = read_recipe(write_recipe(tmp_path, berts, "moma", QUICK, **given))
    one = orthomerge.merge(plain, out=tmp_path / "one").out
    for ours, theirs in zip(curve(tmp_path / "out"), curve(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
