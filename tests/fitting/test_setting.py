"""Inputs by row over all tasks, held-out inputs, the order of steps; and an encoder in one flat tensor."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.fitting.making import KINDS, shared_setting
from torch import nn

from orthomerge.core.errors import IncompatibleError, NumericalError
from orthomerge.data.task import Examples
from orthomerge.files.checkpoint import Spec
from orthomerge.fitting import setting as module
from orthomerge.fitting.layout import FlatEncoder, Layout
from orthomerge.fitting.loop import Order
from orthomerge.fitting.setting import Inputs, Targets, encoded, prepare
from orthomerge.models.prepared import Part
from orthomerge.models.processing import PixelProcessor, Processor
from orthomerge.models.tensors import MemoryTensors
from orthomerge.testing.settings import CLASSES, CPU, Kind, Words, make_setting

COUNTS = {"one": 5, "two": 3, "three": 7}


def texts(count: int, seed: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [" ".join(f"w{word}" for word in random.integers(0, 60, length)) for length in random.integers(1, 13, count)]


def pictures(count: int, seed: int) -> list[Any]:
    return [*np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)]


@dataclass(frozen=True)
class Made:
    """Prepared inputs, what they were made of, and their processor."""

    inputs: Inputs
    items: list[Any]
    processor: Processor
    draw: Callable[[int, int], list[Any]]


@pytest.fixture(params=[("bert", True), ("bert", False), ("vit", True), ("vit", False)], ids=str)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Texts or images, kept on the device or processed batch by batch."""
    kind, kept = request.param
    if not kept:
        monkeypatch.setattr(module, "_room", lambda device: 0)
    draw = texts if kind == "bert" else pictures
    items = {task: draw(count, seed) for seed, (task, count) in enumerate(COUNTS.items())}
    processor: Processor = Words() if kind == "bert" else PixelProcessor(16)
    examples = {task: Examples(some, None, "train") for task, some in items.items()}
    teacher = {task: torch.full((count, 4), float(count), dtype=torch.float64) for task, count in COUNTS.items()}
    inputs = prepare(examples, dict.fromkeys(COUNTS, processor), teacher, device=CPU)
    assert (inputs.pool.kept is not None) == kept
    return Made(inputs, [x for some in items.values() for x in some], processor, draw)


def test_a_batch_is_the_processors(made: Made) -> None:
    inputs = made.inputs
    rows_of = {task: targets.rows.tolist() for task, targets in inputs.targets.items()}
    assert rows_of == {"one": [*range(5)], "two": [5, 6, 7], "three": [*range(8, 15)]}
    for rows in ([3], [14, 0, 6], [1, 1, 13, 5, 2], list(range(15))):
        batch, expected = inputs.pool.batch(torch.tensor(rows)), made.processor([made.items[row] for row in rows])
        assert batch.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(batch[name], tensor), name
            assert batch[name].dtype == tensor.dtype
    for task, targets in inputs.targets.items():
        assert targets.features.tolist() == [[float(COUNTS[task])] * 4] * COUNTS[task]
        assert targets.features.dtype == torch.float32
        assert targets.weights.tolist() == [1.0] * COUNTS[task]


def test_some_of_the_inputs(made: Made) -> None:
    """Other tasks first, or not at all: rows are rows of the whole."""
    items = made.items
    some = made.inputs.at({"three": torch.tensor([1, 4, 0]), "one": torch.tensor([4])})
    assert all(a is b for a, b in zip(some.raw("three"), (items[9], items[12], items[8]), strict=True))
    assert some.raw("one")[0] is items[4]
    parts = list(some.batches("three", 2))
    assert [targets.rows.tolist() for targets, _ in parts] == [[9, 12], [8]]
    for targets, batch in parts:
        expected = made.processor([items[row] for row in targets.rows.tolist()])
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())


def test_a_pool_that_grew_is_one_that_was_made_at_once(made: Made) -> None:
    more = made.draw(4, 9)
    grown = made.inputs.extended([Part(Examples(more, None, "train"), made.processor)])
    assert len(grown.pool) == 19
    assert grown.targets == made.inputs.targets
    rows = torch.tensor([17, 3, 15, 18, 12])
    batch, expected = grown.pool.batch(rows), made.processor([[*made.items, *more][row] for row in rows])
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor), name
    shared = grown.with_targets({"new": Targets(torch.tensor([3, 18]), torch.zeros(2, 4), torch.ones(2))})
    assert all(a is b for a, b in zip(shared.raw("new"), (made.items[3], more[3]), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_features_do_not_depend_on_the_size_of_batches(kind: Kind) -> None:
    setting = make_setting(kind, inputs=9)
    for task in CLASSES:
        setting.encoder.load(setting.tuned(task))
        for size in (1, 4, 256):
            found = encoded(setting.encoder, setting.inputs, task, size=size)
            torch.testing.assert_close(found, setting.inputs.targets[task].features, rtol=1e-4, atol=1e-5)
            assert not found.requires_grad
    close = encoded(setting.encoder, setting.inputs, "five", half=True)
    assert close.dtype == torch.float32
    assert not torch.equal(close, found)
    assert float((close - found).norm() / found.norm()) < 0.05


def test_groups_hold_every_row_once_and_are_of_similar_length() -> None:
    pool = make_setting("bert", inputs=64).inputs.pool
    lengths = (pool.batch(torch.arange(192))["attention_mask"] != 0).sum(1)
    for seed in range(30):
        rows = torch.randperm(192, generator=torch.Generator().manual_seed(seed))[:48]
        groups = pool.groups(rows)
        assert torch.cat(groups).sort().values.tolist() == list(range(48))
        own = [lengths[rows[places]] for places in groups]
        assert all(short.max() <= long.min() for short, long in pairwise(own))


def rows_of(inputs: Inputs) -> torch.Tensor:
    return torch.cat([targets.rows for targets in inputs.targets.values()])


def lengths(inputs: Inputs | None) -> list[int]:
    return [] if inputs is None else [len(targets) for targets in inputs.targets.values()]


def test_every_input_once_an_epoch_and_at_the_same_steps_in_all_its_tasks() -> None:
    sizes = {"two": 10, "three": 7, "five": 3}
    inputs = make_setting("bert", inputs=10).inputs
    inputs = inputs.at({task: slice(size) for task, size in sizes.items()})
    order = Order(inputs, 4, 0)
    steps = [order.at(step) for step in range(35)]
    assert all(len(part) == 4 for step in steps for part in step.values())
    for task, size in sizes.items():
        seen = torch.cat([step[task] for step in steps])
        epochs = torch.split(seen[: len(seen) // size * size], size)
        assert all(epoch.sort().values.tolist() == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1
    # By seed and step alone, not by which steps were asked for before.
    late = Order(inputs, 4, 0).at(30)
    assert all(torch.equal(late[task], steps[30][task]) for task in sizes)
    assert not torch.equal(Order(inputs, 4, 1).at(0)["two"], steps[0]["two"])
    common = shared_setting(inputs=3).inputs
    order = Order(common.at({"two": slice(None), "three": slice(3), "five": slice(None)}), 4, 0)
    assert all(torch.equal(order.at(step)["two"], order.at(step)["five"]) for step in range(9))


def test_held_out_inputs() -> None:
    inputs = make_setting("bert", inputs=30).inputs
    fitted, held = inputs.divided(0.1, seed=0)
    assert held is not None
    assert lengths(held) == [3, 3, 3]
    for task, targets in inputs.targets.items():
        rest, apart = fitted.targets[task].rows.tolist(), held.targets[task].rows.tolist()
        assert sorted([*rest, *apart]) == targets.rows.tolist()
        assert apart == sorted(apart)
    again, other = inputs.divided(0.1, seed=0)[1], inputs.divided(0.1, seed=1)[1]
    assert again is not None
    assert other is not None
    assert torch.equal(rows_of(again), rows_of(held))
    assert not torch.equal(rows_of(other), rows_of(held))
    assert inputs.divided(0.0, seed=0) == (inputs, None)
    whole = dict.fromkeys(inputs.targets, slice(None))
    few = inputs.at({**whole, "two": slice(9)})
    kept, small = few.divided(0.1, seed=0)
    assert (lengths(kept), lengths(small)) == ([9, 27, 27], [0, 3, 3])
    assert few.divided(0.1, seed=0, fewest=31) == (few, None)
    assert lengths(inputs.at(dict.fromkeys(whole, slice(10))).divided(0.1, seed=0)[1]) == [2, 2, 2]


def test_an_input_is_held_out_of_all_its_tasks_or_of_none() -> None:
    inputs = shared_setting(inputs=10).inputs
    fitted, held = inputs.divided(0.2, seed=0)
    assert held is not None
    assert lengths(held) == [6, 6, 6]
    assert not {*rows_of(held).tolist()} & {*rows_of(fitted).tolist()}
    # Of two tasks that share some inputs, the second has what the first held out, and fewer or more of its own.
    own = {"two": torch.arange(20), "three": torch.arange(10, 30)}
    some = inputs.with_targets({task: inputs.targets[task].at(rows) for task, rows in own.items()})
    fitted, held = some.divided(0.2, seed=0)
    assert held is not None
    assert not {*rows_of(held).tolist()} & {*rows_of(fitted).tolist()}
    assert lengths(held) == [4, 4]
    for task, rows in own.items():
        both = [*fitted.targets[task].rows.tolist(), *held.targets[task].rows.tolist()]
        assert sorted(both) == rows.tolist()


class Tied(nn.Module):
    """A table whose weight is read a second time, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.dropout = nn.Dropout(0.9)
        self.register_buffer("shift", torch.ones(7))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(self.out(self.table(ids))) * self.scale + self.shift
        return found


class Halves(MemoryTensors):
    """Every tensor in two blocks."""

    def blocks(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, block in super().blocks():
            for part in torch.chunk(block, 2):
                yield key, part


def pool(encoder: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = encoder(batch["ids"])
    return found


def test_tensors_lie_apart_and_aligned() -> None:
    layout = Layout({"a": (3, 5), "b": (), "c": (64,), "d": (0, 2), "e": (65,)})
    places = [(place.start, place.stop) for place in layout.places.values()]
    assert places == [(0, 15), (64, 65), (128, 192), (192, 192), (192, 257)]
    assert (layout.size, layout.elements) == (320, 15 + 1 + 64 + 65)
    assert Layout({}).size == 0
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in layout.shapes.items()}
    flat = layout.flat({**tensors, "other": torch.ones(3)})
    assert flat.dtype == torch.float32
    for name, view in layout.views(flat):
        assert torch.equal(view, tensors[name].float())
        view.zero_()
    assert torch.equal(flat, torch.zeros(320))
    stacked = dict(layout.views(torch.arange(640.0).view(2, 320)))
    assert stacked["a"].shape == (2, 3, 5)
    assert stacked["b"].tolist() == [64, 320 + 64]
    del tensors["c"]
    with pytest.raises(IncompatibleError, match=r"weights of 'c' are missing; all experts must have the same arch"):
        layout.flat(tensors)


def test_tied_parameters_scalars_and_gradients() -> None:
    torch.manual_seed(0)
    plain = Tied()
    encoder = FlatEncoder(deepcopy(plain), pool, CPU)
    assert sorted(encoder.layout.shapes) == ["scale", "table.weight"]
    batch = {"ids": torch.tensor([0, 3, 3])}
    plain.eval()
    assert torch.equal(encoder.features(batch), pool(plain, batch))
    for _ in range(2):
        encoder.features(batch).square().sum().backward()  # type: ignore[no-untyped-call]
        pool(plain, batch).square().sum().backward()  # type: ignore[no-untyped-call]
    expected = encoder.layout.flat({name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    torch.testing.assert_close(encoder.gradient, expected)
    assert expected.count_nonzero() > 8
    encoder.load(torch.zeros(encoder.layout.size))
    assert torch.equal(encoder.features(batch), torch.ones(3, 7))
    module = encoder.module
    assert isinstance(module, Tied)
    assert module.out.weight is module.table.weight
    with torch.no_grad():
        module.scale.fill_(5)
    assert encoder.weights[encoder.layout.places["scale"]].tolist() == [5.0]


def test_from_canonical_names_and_back() -> None:
    """Blocks of a stream under other names; what is no parameter is left out, and each goes into its own dtype."""
    plain = Tied()
    names = {"words": "table.weight", "factor": "scale", "offset": "shift"}
    encoder = FlatEncoder(plain, pool, CPU, names)
    assert encoder.names == {"words": "table.weight", "factor": "scale"}
    words = torch.arange(35.0, dtype=torch.float64).view(7, 5)
    tensors = {"words": words, "factor": torch.tensor(3.0).half(), "offset": torch.ones(7), "other": torch.ones(2)}

    flat = encoder.flat(Halves(tensors))
    assert flat[encoder.layout.places["table.weight"]].tolist() == list(range(35))
    assert flat[encoder.layout.places["scale"]].tolist() == [3.0]
    specs = {"words": Spec((7, 5), "BF16"), "factor": Spec((), "F32"), "offset": Spec((7,), "F32")}
    found = encoder.tensors(flat, specs)
    assert found.keys() == {"words", "factor"}
    assert torch.equal(found["words"], words.bfloat16())
    assert found["factor"].dtype == torch.float32
    with pytest.raises(NumericalError, match=r"'words' does not fit into F16 after the fit .*magnitude 1e\+06\)"):
        encoder.tensors(torch.full_like(flat, 1e6), {"words": Spec((7, 5), "F16")})
    with pytest.raises(IncompatibleError, match="weights of 'scale' are missing"):
        encoder.flat(MemoryTensors({"words": words}))
    with pytest.raises(IncompatibleError, match=r"weights of 'table\.weight' are missing"):
        encoder.flat(MemoryTensors({"words": words[:3], "factor": torch.tensor(1.0)}))
