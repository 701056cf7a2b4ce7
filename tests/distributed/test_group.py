"""What a group refuses, and what can be sent to others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orthomerge.data.inputs import Lazy
from orthomerge.data.task import Examples
from orthomerge.distributed.group import Group, current_group, open_group
from orthomerge.distributed.launch import under_torchrun
from orthomerge.distributed.packing import pack, unpack
from orthomerge.errors import IncompatibleError, NumericalError, OrthomergeError, RecipeError
from orthomerge.features.extract import device_of
from orthomerge.features.parts import sendable, shareable, shares_of
from orthomerge.fitting.sharded import ShardedEncoder
from orthomerge.models.families import family


class Two(Group):
    """The first of two that hears from the other what it is told to."""

    def __init__(self, other: Any = None) -> None:
        super().__init__(0, 2)
        self._other = other

    def exchange(self, value: Any) -> list[Any]:
        return [value, self._other]


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not under_torchrun()
    assert not current_group().open
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert under_torchrun()
    assert not current_group().open  # until somebody opens it


def test_variables_must_be_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(
        RecipeError, match=r"RANK must be a whole number, got 'first'; start the processes with torchrun"
    ):
        open_group()
    monkeypatch.setenv("ORTHOMERGE_TIMEOUT", "soon")
    with pytest.raises(RecipeError, match=r"ORTHOMERGE_TIMEOUT must be a number of seconds, got 'soon'"):
        Group().wait_for(tmp_path)


def test_waiting_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTHOMERGE_TIMEOUT", "1")
    Group().wait_for(tmp_path)
    with pytest.raises(OrthomergeError, match=r"never did not appear within 1 s; all machines must share the folder"):
        Group().wait_for(tmp_path / "never")


def test_numbers_that_drift_apart() -> None:
    Two([3.0, 3.0**0.5]).agree(torch.ones(3), "weights")
    with pytest.raises(NumericalError, match=r"weights of process 1 are not those of process 0 any more"):
        Two([3.0, 1.0]).agree(torch.ones(3), "weights")


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("orthomerge.features.extract.current_group", Two)
    with pytest.raises(RecipeError, match=r"every process has an accelerator of its own, got 'cuda:0'; use 'cuda' or"):
        device_of("cuda:0")


def test_single_numbers_cannot_be_sharded() -> None:
    module = nn.Linear(2, 2)
    module.register_parameter("scale", nn.Parameter(torch.ones(())))
    with pytest.raises(IncompatibleError, match=r"'scale' are single numbers, which cannot be sharded"):
        ShardedEncoder(module, lambda encoder, batch: batch["x"], torch.device("cpu"), Group())


def test_packed_models_are_whole_again() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    packed = pack({"model": model, "words": ["a"]})
    assert len(packed.tensors) == 3
    assert len(packed.data) < 5000
    found = unpack(packed)
    assert found["words"] == ["a"]
    assert found["model"][0].weight is found["model"][1].weight
    assert [each.requires_grad for each in found["model"].parameters()] == [True, False, True]
    x = torch.ones(2, 3)
    assert torch.equal(found["model"](x), model(x))


def test_what_can_be_sent() -> None:
    bert = family("bert")
    assert shareable(nn.Linear(2, 2), bert)
    assert not shareable(nn.Linear(2, 2), replace(bert, title="mine"))
    assert not shareable(lambda: None)


def test_inputs_that_only_one_process_can_open_are_opened() -> None:
    lazy = Examples(Lazy(range(5), lambda key: f"text {key}"), None, "train")
    assert list(sendable(lazy).inputs) == [f"text {key}" for key in range(5)]
    shares = shares_of(Two(), [4, 3, 2, 1, 0], lazy, batch=2)
    assert [share.places for share in shares] == [[4, 3, 0], [2, 1]]
    assert [list(share.examples.inputs) for share in shares] == [["text 4", "text 3", "text 0"], ["text 2", "text 1"]]
    assert isinstance(shares[1].examples.inputs, list)


def test_a_job_is_called_by_the_first_process_only() -> None:
    group = Group(rank=1, world=2)
    with pytest.raises(AssertionError, match="only the first process calls"):
        group.call(lambda group, given: None, None, None)
