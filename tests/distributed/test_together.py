"""Two processes come to what one does: features and statistics to the last digits, fits along the same curve."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import torchrun
from tests.distributed.together import DRIVEN, SCENES, Found, play

from orthomerge.distributed.group import Group

FITS = [name for name in SCENES if any(word in name for word in ("moma", "realign", "adamerging", "concrete_am"))]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What two processes found, once for all tests and whoever else runs them."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if folder.name.startswith("popen-") else folder
    out = folder / "together.pt"
    with (folder / "together.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            done = torchrun("tests.distributed.together", out, cache=folder / "together-cache")
            assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Found] = torch.load(out, weights_only=False)
    return found


def alone(name: str) -> Found:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return DRIVEN[name](Group()) if name in DRIVEN else play(Group(), name)
    finally:
        torch.set_num_threads(threads)


def test_they_understand_each_other(both: dict[str, Found]) -> None:
    found = both["talk"]
    assert found["tied"]
    assert found["rows"] == [0, 2]
    assert found["mine"] == [0, 2, 4]
    assert found["refused"] == [(0, True, 0), (1, True, 0)]
    assert found["sum"].tolist() == [3.0]


def test_features_are_the_same_to_the_bit_and_none_is_lost(both: dict[str, Found]) -> None:
    one = alone("features")
    for task, values in both["features"].items():
        assert torch.equal(values, one[task]), task
    assert len(one["two"]) == 43


def test_features_inside_a_fit_are_the_same_to_the_bit(both: dict[str, Found]) -> None:
    one = alone("encoded")
    assert all(torch.equal(one[name], values) for name, values in both["encoded"].items())


def test_statistics(both: dict[str, Found]) -> None:
    one, two = alone("statistics"), both["statistics"]
    assert one["grams"].keys() == two["grams"].keys()
    for name, gram in one["grams"].items():
        torch.testing.assert_close(two["grams"][name], gram, rtol=1e-12, atol=1e-10, msg=name)
    torch.testing.assert_close(two["fisher"], one["fisher"], rtol=1e-5, atol=1e-10)


def test_the_gradient_of_a_batch_however_it_is_dealt_out(both: dict[str, Found]) -> None:
    one = alone("passed")
    for name, values in both["passed"].items():
        torch.testing.assert_close(values, one[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", FITS)
def test_fits(name: str, both: dict[str, Found]) -> None:
    one, two = alone(name), both[name]
    assert len(one["curve"]) == len(two["curve"])
    for ours, theirs in zip(one["curve"], two["curve"], strict=True):
        for measure in ours.keys() & {"loss", "held_out"}:
            assert theirs[measure] == pytest.approx(ours[measure], rel=1e-5, abs=1e-7), (name, measure, ours["step"])
    # The biases of keys have no effect and so a gradient of rounding errors alone, which Adam takes at full length.
    assert ((two["weights"] - one["weights"]).abs() > 1e-4).float().mean() < 0.01
    for found, expected in zip(two["heads"], one["heads"], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert one["facts"].get("kept") == two["facts"].get("kept")


def test_other_methods(both: dict[str, Found]) -> None:
    one, two = alone("lm_cocktail"), both["lm_cocktail"]
    assert torch.equal(one["weights"], two["weights"])


def test_a_shard_takes_its_share_of_memory(both: dict[str, Found]) -> None:
    """Weights, gradient, base, vector, logits and two moments are seven tensors; a shard has its weights twice."""
    one, two = alone("held"), both["held"]
    elements = two["elements"]
    assert one["bytes"] == pytest.approx(7 * 4 * elements, rel=0.05)
    assert two["bytes"] == pytest.approx(8 * 4 * elements / 2, rel=0.05)


def test_one_process_needs_no_torchrun(tmp_path: Path) -> None:
    group = Group()
    assert (group.rank, group.world, group.several, group.driving) == (0, 1, False, False)
    rows: Any = torch.ones(2, 3)
    assert group.sum_(rows) is rows
    assert group.broadcast(rows) is rows
    assert group.exchange(5) == [5]
    assert torch.equal(group.gather(rows)[0], rows)
    assert group.scatter([7]) == 7
    group.barrier()
    group.agree(rows, "rows")
    group.close()
