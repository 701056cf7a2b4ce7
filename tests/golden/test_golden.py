"""Commands give the committed values; `python -m tests.golden --write` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.golden.commands import COMMANDS
from tests.golden.compare import compare_exactly, compare_prints, fingerprint
from tests.golden.driver import Driver
from tests.golden.observe import Value, read_model
from tests.golden.outcomes import differences, play

SMALL = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8


def test_golden_values(child: Driver) -> None:
    changes = differences(play(child))
    lines = [f"{name}: {line}" for name, what in changes.items() for line in what]
    assert not lines, "\n".join([*lines, "see what changed: python -m tests.golden --against COMMIT"])


def test_names_of_commands_differ() -> None:
    names = [command.name for command in COMMANDS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("place", [(0, 0), (2, 3)])  # the first and the last entry are in every fingerprint
def test_a_change_of_one_entry_is_seen(place: tuple[int, int]) -> None:
    changed = SMALL.clone()
    changed[place] += 1e-5
    prints = {"weight": fingerprint(SMALL)}
    assert compare_prints(prints, {"weight": SMALL}, 1e-6) == []
    assert compare_prints(prints, {"weight": changed}, 1e-4) == []
    assert [name for name, _ in compare_prints(prints, {"weight": changed}, 1e-6)] == ["weight"]
    assert compare_prints(prints, {"weight": changed}, 1e-6, noise="wei") == []


@pytest.mark.parametrize(
    "changed",
    [SMALL.half(), SMALL.reshape(4, 3), SMALL.flip(0), SMALL * torch.nan, "012", 1.0],
    ids=["dtype", "shape", "order", "nan", "text", "number"],
)
def test_another_value_is_seen(changed: Value) -> None:
    assert len(compare_prints({"weight": fingerprint(SMALL)}, {"weight": changed}, 1e-6)) == 1
    assert len(compare_exactly({"weight": SMALL}, {"weight": changed}, 1e-6)) == 1


def test_lost_and_new_values_are_seen() -> None:
    lost = [("old", "is not there any more"), ("weight", "was not there before")]
    assert compare_prints({"old": 1.0}, {"weight": SMALL}, 1.0) == lost
    assert compare_exactly({"old": 1.0}, {"weight": SMALL}, 1.0) == lost


def test_exact_means_every_bit() -> None:
    one, other = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert compare_exactly({"weight": one}, {"weight": other}, 0.0)
    assert compare_exactly({"weight": one}, {"weight": other}, 1e-6) == []


def test_both_layouts_of_an_output_read_alike(tmp_path: Path) -> None:
    encoder, head = {"pooler.dense.weight": SMALL}, {"weight": SMALL + 1, "bias": torch.ones(3)}
    labels = ["no", "yes", "perhaps"]
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old / "encoder", old / "heads" / "tone", new / "tone"):
        folder.mkdir(parents=True)
    save_file(encoder, old / "encoder" / "model.safetensors")
    save_file(head, old / "heads" / "tone" / "head.safetensors")
    (old / "heads" / "tone" / "labels.json").write_text(json.dumps({"labels": labels, "activation": None}))
    save_file({f"bert.{key}": value for key, value in encoder.items()}, new / "encoder.safetensors")
    save_file({f"classifier.{key}": value for key, value in head.items()}, new / "tone" / "head.safetensors")
    (new / "tone" / "config.json").write_text(json.dumps({"id2label": dict(enumerate(labels))}))
    one = read_model(old)
    assert one.keys() == {"encoder/pooler.dense.weight", "head/tone/weight", "head/tone/bias", "labels/tone"}
    assert one["labels/tone"] == "no yes perhaps"
    assert compare_exactly(one, read_model(new), 0.0) == []
