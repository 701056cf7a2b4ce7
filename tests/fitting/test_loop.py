"""The loop and its objectives: exact gradients, a killed run that ends as if it were not, the best kept, refusals."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fitting.making import KINDS, features_of, first_targets, hidden, normal, shared_setting
from torch.nn.functional import kl_div, log_softmax

from orthomerge.core.errors import NumericalError, OrthomergeError, RecipeError
from orthomerge.files.run_state import RunState
from orthomerge.fitting.gates import Free, Gates, Mask
from orthomerge.fitting.loop import Course, Loop, backward, held_out_loss
from orthomerge.fitting.moma import FeatureDistance, Moma
from orthomerge.fitting.objective import Divergence, Entropy, Objective
from orthomerge.fitting.setting import Setting, Targets
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


class KilledError(Exception):
    """What a test ends a run with."""


def run(loop: Loop, setting: Setting, pair: Pair) -> tuple[torch.Tensor, list[torch.Tensor], Course]:
    inputs, held = setting.inputs.divided(0.2, seed=setting.seed)
    gates, objective = pair(replace(setting, inputs=inputs))
    course = loop.run(setting, gates, objective, inputs, held)
    return setting.encoder.weights.clone(), [p.detach().clone() for p in objective.parameters], course


def test_rates() -> None:
    assert [Loop(steps=4, batch=1, warmup=0.5).share(step) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]
    assert {Loop(steps=9, batch=1, cosine=False).share(step) for step in range(9)} == {1.0}


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


@pytest.mark.parametrize("kind", KINDS)
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


def test_a_full_device_and_an_encoder_without_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = make_setting("bert")

    def full(batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(setting.encoder, "module", torch.nn.Identity())
        with pytest.raises(RecipeError, match=r"no gradient checkpointing; set 'checkpointing' to false"):
            Loop(steps=1, batch=1, checkpointing=True).run(setting, *distilled(setting), setting.inputs, None)
    monkeypatch.setattr(setting.encoder, "features", full)
    with pytest.raises(OrthomergeError, match=r"with batches of 7 per task; lower 'batch', or set"):
        Loop(steps=1, batch=7).run(setting, *distilled(setting), setting.inputs, None)


def objective_of(setting: Setting, name: str) -> Objective:
    if name == "distance":
        return masked(setting)[1]
    if name == "divergence":
        return Divergence(setting.heads, setting.heads, CPU, lr=1e-2)
    return Entropy(setting.heads, CPU)


def gradients(objective: Objective) -> list[torch.Tensor]:
    return [torch.as_tensor(parameter.grad).clone() for parameter in objective.parameters]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["distance", "divergence", "entropy"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_one_input_after_the_other(
    kind: Kind, name: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input of several tasks is encoded once."""
    setting = shared_setting(kind) if shared else make_setting(kind)
    encoder, pool = setting.encoder, setting.inputs.pool
    objective, targets = objective_of(setting, name), first_targets(setting, 5, start=2)
    # The second task has two inputs that the others do not have.
    targets["three"] = setting.inputs.targets["three"].at(slice(4, 9))
    sizes: list[int] = []
    features = encoder.features

    def counted(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(next(iter(batch.values()))))
        return features(batch)

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "features", counted)
        encoder.gradient.fill_(1.0)  # nothing is left over from the last step
        loss = backward(setting, objective, setting.inputs, targets)
    assert sum(sizes) == (7 if shared else 15)
    gradient, own = encoder.gradient.clone(), gradients(objective)

    encoder.gradient.zero_()
    for parameter in objective.parameters:
        parameter.grad = None
    single = {task: torch.cat([features(pool.batch(row[None])) for row in t.rows]) for task, t in targets.items()}
    expected, penalty = objective.loss(single, targets), objective.penalty()
    (expected if penalty is None else expected + penalty).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, encoder.gradient, atol=1e-5, rtol=1e-4)
    for one, other in zip(own, gradients(objective), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def variant(setting: Setting, name: str) -> dict[str, Head]:
    heads = dict(setting.heads)
    if name == "hidden":
        heads["three"] = hidden(heads["three"])
    elif name == "normalise":
        heads["two"] = normal(heads["two"])
    elif name == "no bias":
        heads = {task: replace(head, output=Linear(head.output.weight)) for task, head in heads.items()}
    return heads


def in_half(heads: dict[str, Head]) -> dict[str, Head]:
    return {t: h.with_tensors({n: x.bfloat16() for n, x in h.tensors().items()}) for t, h in heads.items()}


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise", "no bias"])
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_divergence_is_torchs(name: str, lr: float) -> None:
    setting = make_setting("bert", inputs=6)
    heads, targets, features = variant(setting, name), first_targets(setting, 5), features_of(setting)
    objective = Divergence(heads, setting.heads, CPU, lr=lr)
    expected = 0.0
    for task, head in heads.items():
        target = log_softmax(setting.heads[task](targets[task].features), 1)
        own = log_softmax(head(features[task]), 1)
        terms = kl_div(own, target, reduction="none", log_target=True).sum(1)
        torch.testing.assert_close(objective.terms(features[task], targets[task], task).detach(), terms)
        expected += float(terms.mean())
    assert objective.loss(features, targets).item() == pytest.approx(expected, rel=1e-5)
    assert objective.penalty() is None
    assert objective.measures() == {}


def test_nothing_between_an_expert_and_itself() -> None:
    setting = make_setting("vit", inputs=6)
    objective, targets = Divergence(setting.heads, setting.heads, CPU), setting.inputs.targets
    features = {task: some.features.clone().requires_grad_(True) for task, some in targets.items()}
    loss = objective.loss(features, targets)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None and float(each.grad.abs().max()) < 1e-6 for each in features.values())


def test_heads_that_stay_are_returned_themselves() -> None:
    half = in_half(dict(make_setting("bert", inputs=6).heads))
    for objective in (Divergence(half, half, CPU), Entropy(half, CPU)):
        assert objective.parameters == []
        assert all(objective.classifiers()[task] is head for task, head in half.items())


@pytest.mark.parametrize("name", ["plain", "hidden", "normalise"])
def test_trained_heads_move_in_their_own_dtype_and_the_originals_do_not(name: str) -> None:
    setting = make_setting("bert", inputs=6)
    heads = in_half(variant(setting, name))
    before = {task: {n: x.clone() for n, x in head.tensors().items()} for task, head in heads.items()}
    objective = Divergence(heads, heads, CPU, lr=0.1)
    assert len(objective.parameters) == sum(len(head.tensors()) for head in heads.values())
    features, targets = features_of(setting), first_targets(setting, 5)
    optimiser = torch.optim.Adam(objective.parameters, lr=0.1)
    first = objective.loss(features, targets).item()
    for _ in range(5):
        optimiser.zero_grad()
        loss = objective.loss(features, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert objective.loss(features, targets).item() < first
    for task, head in objective.classifiers().items():
        for key, tensor in head.tensors().items():
            assert tensor.dtype == torch.bfloat16
            assert not tensor.requires_grad
            assert not torch.equal(tensor, before[task][key])
            assert torch.equal(heads[task].tensors()[key], before[task][key])


def test_an_input_of_two_tasks_counts_in_both_by_its_weights() -> None:
    """Two heads of one feature, one input: logits and weights by hand."""
    row = torch.tensor([0])
    targets = {
        "a": Targets(row, torch.tensor([[math.log(3.0)]]), torch.tensor([1.0])),
        "b": Targets(row, torch.tensor([[0.0]]), torch.tensor([0.3])),
    }
    heads = {
        "a": Head(Linear(torch.tensor([[1.0], [0.0]])), ("yes", "no")),
        "b": Head(Linear(torch.tensor([[0.0], [2.0], [0.0]])), ("x", "y", "z")),
    }
    objective = Divergence(heads, heads, CPU)
    # Expert a: 3/4, 1/4. Expert b: thirds. The student's feature is log 2: 2/3, 1/3 under a; 1/6, 4/6, 1/6 under b.
    features = {task: torch.full((1, 1), math.log(2.0)) for task in heads}
    a = 0.75 * math.log(0.75 / (2 / 3)) + 0.25 * math.log(0.25 / (1 / 3))
    b = (2 * math.log((1 / 3) / (1 / 6)) + math.log((1 / 3) / (4 / 6))) / 3
    assert objective.loss(features, targets).item() == pytest.approx(1.0 * a + 0.3 * b, rel=1e-5)
    assert objective.terms(features["b"], targets["b"], "b").tolist() == pytest.approx([b], rel=1e-5)
    swapped = {task: replace(t, weights=torch.tensor([2.0 if task == "b" else 0.0])) for task, t in targets.items()}
    assert objective.loss(features, swapped).item() == pytest.approx(2.0 * b, rel=1e-5)


def test_entropy_is_the_sum_over_tasks_of_the_mean() -> None:
    setting = make_setting("bert", inputs=6)
    objective, features, targets = Entropy(setting.heads, CPU), features_of(setting), first_targets(setting, 5)
    expected = 0.0
    for task, head in setting.heads.items():
        shares = head(features[task]).double().softmax(1)
        expected += float(-(shares * shares.log()).sum(1).mean())
    assert float(objective.loss(features, targets)) == pytest.approx(expected)
    assert objective.penalty() is None
    only = Head(Linear(torch.tensor([[1.0], [0.0], [0.0], [0.0]])), ("a", "b", "c", "d"))
    rows = Targets(torch.tensor([0, 1]), torch.zeros(2, 1), torch.ones(2))
    values = torch.tensor([[0.0], [1e4]], requires_grad=True)
    entropies = Entropy({"only": only}, CPU).terms(values, rows, "only")
    assert entropies.tolist() == pytest.approx([math.log(4), 0.0])
    entropies.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert values.grad.isfinite().all()
