"""The loop: every input once an epoch, a killed run that ends as if it had not been, the best kept, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fitting.making import first_targets, shared_setting

from orthomerge.core.errors import NumericalError, OrthomergeError, RecipeError
from orthomerge.files.run_state import RunState
from orthomerge.fitting.gates import Free, Gates, Mask
from orthomerge.fitting.inputs import Inputs, Order, Targets
from orthomerge.fitting.loop import Course, Loop, backward, check_loop, held_out_loss
from orthomerge.fitting.moma import FeatureDistance, Moma
from orthomerge.fitting.objective import Divergence, Entropy, Objective
from orthomerge.fitting.setting import Setting
from orthomerge.models.heads import Head, Linear
from orthomerge.testing.settings import CPU, WIDTH, Kind, make_setting

Pair = Callable[[Setting], tuple[Gates, Objective]]


def distilled(setting: Setting, *, lr: float = 1e-3, head_lr: float = 0.0) -> tuple[Gates, Objective]:
    merged = setting.merged("task_arithmetic", {})
    return Free(merged, lr=lr), Divergence(setting.heads, setting.heads, CPU, lr=head_lr)


def masked(setting: Setting) -> tuple[Gates, Objective]:
    delta = setting.merged("task_arithmetic", {}) - setting.base
    objective = FeatureDistance(setting.heads, setting.inputs, Moma(transform="similarity"))
    return Mask(setting.base, delta, penalty=1e-4), objective


def rows_of(inputs: Inputs) -> torch.Tensor:
    return torch.cat([targets.rows for targets in inputs.targets.values()])


class KilledError(Exception):
    """What a test ends a run with."""


def run(loop: Loop, setting: Setting, pair: Pair) -> tuple[torch.Tensor, list[torch.Tensor], Course]:
    inputs, held = setting.inputs.divided(0.2, seed=setting.seed)
    gates, objective = pair(replace(setting, inputs=inputs))
    course = loop.run(setting, gates, objective, inputs, held)
    return setting.encoder.weights.clone(), [p.detach().clone() for p in objective.parameters], course


def test_every_input_once_an_epoch() -> None:
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


def test_rates() -> None:
    assert [Loop(steps=4, batch=1, warmup=0.5).share(step) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]
    assert {Loop(steps=9, batch=1, cosine=False).share(step) for step in range(9)} == {1.0}


def test_held_out_inputs() -> None:
    inputs = make_setting("bert", inputs=30).inputs
    fitted, held = inputs.divided(0.1, seed=0)
    assert held is not None
    for task, targets in inputs.targets.items():
        rest, apart = fitted.targets[task].rows.tolist(), held.targets[task].rows.tolist()
        assert len(apart) == 3
        assert sorted([*rest, *apart]) == targets.rows.tolist()
        assert apart == sorted(apart)
    again, other = inputs.divided(0.1, seed=0)[1], inputs.divided(0.1, seed=1)[1]
    assert again is not None
    assert other is not None
    assert torch.equal(again.targets["five"].rows, held.targets["five"].rows)
    assert not torch.equal(rows_of(other), rows_of(held))
    assert inputs.divided(0.0, seed=0) == (inputs, None)
    whole = dict.fromkeys(inputs.targets, slice(None))
    few = inputs.at({**whole, "two": slice(9)})
    kept, small = few.divided(0.1, seed=0)
    assert small is not None
    assert [len(targets) for targets in small.targets.values()] == [0, 3, 3]
    assert len(kept.targets["two"]) == 9
    assert few.divided(0.1, seed=0, fewest=31) == (few, None)
    least = inputs.at(dict.fromkeys(whole, slice(10))).divided(0.1, seed=0)[1]
    assert least is not None
    assert [len(targets) for targets in least.targets.values()] == [2, 2, 2]


def test_an_input_is_held_out_of_all_its_tasks_or_of_none() -> None:
    inputs = shared_setting(inputs=10).inputs
    fitted, held = inputs.divided(0.2, seed=0)
    assert held is not None
    assert [len(targets) for targets in held.targets.values()] == [6, 6, 6]
    assert not {*rows_of(held).tolist()} & {*rows_of(fitted).tolist()}
    # Of two tasks that share some inputs, the second has what the first held out, and fewer or more of its own.
    own = {"two": torch.arange(20), "three": torch.arange(10, 30)}
    some = inputs.with_targets({task: inputs.targets[task].at(rows) for task, rows in own.items()})
    fitted, held = some.divided(0.2, seed=0)
    assert held is not None
    assert not {*rows_of(held).tolist()} & {*rows_of(fitted).tolist()}
    assert [len(targets) for targets in held.targets.values()] == [4, 4]
    for task, rows in own.items():
        both = [*fitted.targets[task].rows.tolist(), *held.targets[task].rows.tolist()]
        assert sorted(both) == rows.tolist()


def test_tasks_with_the_same_inputs_see_them_at_the_same_steps() -> None:
    inputs = shared_setting(inputs=3).inputs
    order = Order(inputs.at({"two": slice(None), "three": slice(3), "five": slice(None)}), 4, 0)
    assert all(torch.equal(order.at(step)["two"], order.at(step)["five"]) for step in range(9))


def test_a_held_out_loss_by_hand() -> None:
    """Entropies of heads that know nothing: log 4 with weights 1 and 0.5, log 2 with 0.3."""
    setting = make_setting("bert", inputs=2)
    blank = torch.zeros(2, WIDTH)
    heads = {f"{n}": Head(Linear(torch.zeros(n, WIDTH)), tuple(map(str, range(n)))) for n in (4, 2)}
    targets = {
        "4": Targets(torch.tensor([0, 1]), blank, torch.tensor([1.0, 0.5])),
        "2": Targets(torch.tensor([1, 0]), blank, torch.tensor([0.3, 0.3])),
    }
    inputs = setting.inputs.with_targets(targets)
    loss = held_out_loss(replace(setting, heads=heads, inputs=inputs), Entropy(heads, CPU), inputs)
    assert loss == pytest.approx((0.75 * math.log(4) + 0.3 * math.log(2)) / 2)


def test_the_loss_falls_and_the_course_is_told() -> None:
    setting = make_setting("bert")
    said: list[str] = []
    weights, _, course = run(Loop(steps=40, batch=8, look=15), replace(setting, say=said.append), distilled)
    assert [row["step"] for row in course.rows] == [0, 15, 30, 40]
    assert course.rows[-1]["held_out"] < 0.7 * course.rows[0]["held_out"]
    assert "loss" not in course.rows[0]
    assert course.rows[-1]["loss"] < course.rows[1]["loss"]
    assert "moved" in course.rows[-1]
    assert len(said) == 4
    assert said[-1].startswith("step 40 of 40: loss ")
    _, held = setting.inputs.divided(0.2, seed=0)
    assert held is not None
    objective = distilled(setting)[1]
    setting.encoder.load(weights)
    assert held_out_loss(setting, objective, held) == pytest.approx(course.rows[-1]["held_out"])
    again, _, _ = run(Loop(steps=40, batch=8, look=15), make_setting("bert"), distilled)
    assert torch.equal(again, weights)
    other, _, _ = run(Loop(steps=40, batch=8, look=15), replace(make_setting("bert"), seed=1), distilled)
    assert not torch.equal(other, weights)


def test_half_precision_is_near() -> None:
    loop = Loop(steps=20, batch=8, look=20)
    whole, half = (run(loop, replace(make_setting("bert"), half=each), distilled)[2] for each in (False, True))
    assert half.rows[-1]["held_out"] < 0.8 * half.rows[0]["held_out"]
    assert half.rows[-1]["held_out"] == pytest.approx(whole.rows[-1]["held_out"], rel=0.1)
    assert half.rows[-1]["held_out"] != whole.rows[-1]["held_out"]


def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path) -> None:
    loop = Loop(steps=9, batch=12, look=3, best=True)
    whole = run(loop, make_setting("bert"), masked)
    state = RunState(tmp_path / "state", "this run")

    def kill(text: str) -> None:
        if text.startswith("step 6"):
            raise KilledError

    with pytest.raises(KilledError):
        run(loop, replace(make_setting("bert"), state=state, say=kill), masked)
    kept = state.read()
    assert kept is not None
    assert kept["step"] == 3
    said: list[str] = []
    resumed = run(loop, replace(make_setting("bert"), state=state, say=said.append), masked)
    assert len(said) == 2
    assert torch.equal(resumed[0], whole[0])
    assert all(torch.equal(a, b) for a, b in zip(resumed[1], whole[1], strict=True))
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in each[2].rows] for each in (resumed, whole)]
    assert rows[0] == rows[1]
    # The state of a run that ended is one, too: nothing is left to do.
    over = run(loop, replace(make_setting("bert"), state=state), masked)
    assert torch.equal(over[0], whole[0])


def test_the_best_is_kept() -> None:
    """Of what was trained. The start, which is better at such a rate, is for the caller to judge."""
    setting = make_setting("bert")
    start = setting.merged("task_arithmetic", {})

    def wild(setting: Setting) -> tuple[Gates, Objective]:
        return distilled(setting, lr=3.0, head_lr=3.0)

    loop = Loop(steps=6, batch=4, look=1, cosine=False)
    weights, parameters, course = run(replace(loop, best=True), setting, wild)
    losses = [row["held_out"] for row in course.rows]
    assert losses[0] < min(losses[1:])
    assert losses[course.best_step] == min(losses[1:])
    assert course.best_step == 6 - course.waited < 6
    then, heads, _ = run(replace(loop, steps=course.best_step), setting, wild)
    assert torch.equal(weights, then)
    assert all(map(torch.equal, parameters, heads))
    last, _, course = run(loop, setting, wild)
    assert not torch.equal(last, then)
    assert not torch.equal(weights, start)
    _, _, course = run(replace(loop, patience=1), setting, wild)
    assert [row["step"] for row in course.rows] == [0, 1, 2]


def test_a_loss_that_is_no_number() -> None:
    setting = make_setting("bert")
    setting.inputs.targets["two"].features[3] = math.nan
    with pytest.raises(NumericalError, match=r"the loss is nan at step 4 of 8; lower 'lr'"):
        run(Loop(steps=8, batch=26, look=4), setting, distilled)


def dropping(setting: Setting) -> Setting:
    """With dropout wherever transformers looks for it, in eval mode."""
    for part in setting.encoder.module.modules():
        for name in ("p", "dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.5)
    return setting


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_checkpointing_changes_memory_only(kind: Kind) -> None:
    plain, _, _ = run(Loop(steps=3, batch=4, look=3), make_setting(kind), distilled)
    setting = dropping(make_setting(kind))
    calls = []
    layer = next(
        part for name, part in setting.encoder.module.named_modules() if name.endswith(("layer.0", "layers.0"))
    )
    handle = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    found, _, _ = run(Loop(steps=3, batch=4, look=3, checkpointing=True), setting, distilled)
    handle.remove()
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=2e-4)
    looks = 2 * len(setting.tasks)
    assert len(calls) == looks + 2 * 3
    assert not any(part.training for part in setting.encoder.module.modules())
    assert not any(getattr(part, "gradient_checkpointing", False) for part in setting.encoder.module.modules())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    good: dict[str, Any] = {"steps": 1, "batch": 1, "lr": 0.1, "hold_out": 0.1}
    check_loop(**good)
    for name, words in (("steps", "at least 1"), ("batch", "at least 1"), ("lr", "positive")):
        with pytest.raises(RecipeError, match=f"'{name}' must be {words}, got 0"):
            check_loop(**{**good, name: 0})
    with pytest.raises(RecipeError, match=r"'hold_out' must be from 0 to 0\.5, got 0\.6"):
        check_loop(**{**good, "hold_out": 0.6})
    setting = make_setting("bert")

    def full(batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    class Bare(torch.nn.Module):
        """No encoder of transformers."""

    with monkeypatch.context() as patch:
        patch.setattr(setting.encoder, "module", Bare())
        with pytest.raises(RecipeError, match=r"no gradient checkpointing; set 'checkpointing' to false"):
            Loop(steps=1, batch=1, checkpointing=True).run(setting, *distilled(setting), setting.inputs, None)
    monkeypatch.setattr(setting.encoder, "features", full)
    with pytest.raises(OrthomergeError, match=r"with batches of 7 per task; lower 'batch', or set"):
        Loop(steps=1, batch=7).run(setting, *distilled(setting), setting.inputs, None)


OBJECTIVES = ["distance", "divergence", "entropy"]


def objective_of(setting: Setting, name: str) -> Objective:
    if name == "distance":
        return masked(setting)[1]
    if name == "divergence":
        return Divergence(setting.heads, setting.heads, CPU, lr=1e-2)
    return Entropy(setting.heads, CPU)


def one_by_one(
    setting: Setting, objective: Objective, targets: dict[str, Targets]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the gradient of the encoder, every input in a pass of its own."""
    encoder, pool = setting.encoder, setting.inputs.pool
    encoder.gradient.zero_()
    features = {
        task: torch.cat([encoder.features(pool.batch(row[None])) for row in some.rows])
        for task, some in targets.items()
    }
    loss, penalty = objective.loss(features, targets), objective.penalty()
    (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), encoder.gradient.clone()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_loss_and_gradient_are_those_of_one_input_after_the_other(kind: Kind, name: str) -> None:
    setting = make_setting(kind)
    objective, targets = objective_of(setting, name), first_targets(setting, 8, start=3)
    for _ in range(2):  # nothing is left over from the last one
        loss = backward(setting, objective, setting.inputs, targets)
    gradient = setting.encoder.gradient.clone()
    own = [torch.as_tensor(parameter.grad).clone() for parameter in objective.parameters]
    for parameter in objective.parameters:
        parameter.grad = None
    expected, of_weights = one_by_one(setting, objective, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, of_weights, atol=1e-5, rtol=1e-4)
    for one, other in zip(own, objective.parameters, strict=True):
        torch.testing.assert_close(one, torch.as_tensor(other.grad), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_an_input_of_several_tasks_is_encoded_once(kind: Kind, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = shared_setting(kind)
    objective, targets = objective_of(setting, name), first_targets(setting, 5, start=2)
    # The second task looks at two inputs that the others do not.
    targets["three"] = setting.inputs.targets["three"].at(slice(4, 9))
    sizes: list[int] = []
    features = setting.encoder.features

    def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(next(iter(batch.values()))))
        return features(batch)

    with monkeypatch.context() as patch:
        patch.setattr(setting.encoder, "features", counted)
        loss = backward(setting, objective, setting.inputs, targets)
    assert sum(sizes) == 7
    gradient = setting.encoder.gradient.clone()
    expected, of_weights = one_by_one(setting, objective, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, of_weights, atol=1e-5, rtol=1e-4)
