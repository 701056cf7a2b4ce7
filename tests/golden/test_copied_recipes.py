"""A saved model opens its base and experts again exactly as the merge did: `--expert` and `--base` only name files.

Eight bugs (R1 to R8; R3, averaged heads, is no option any more) came from recipes that were copied by hand and lost a
key on the way: pooling, `ignore`, `missing`, prefix, labels or tokenizer.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.golden.driver import Driver, Result
from tests.golden.observe import Value, observe

BASE = "--base world/base"
DATA = "--data two=world/two.csv --data three=world/three.csv"


def run(child: Driver, line: str) -> Result:
    """Run a command that must succeed."""
    result = child.run(line.split())
    assert result.exit == 0, f"orthomerge {line}\n{result.errors[-2000:]}"
    return result


def once(child: Driver, line: str, out: str) -> str:
    """Run a merge unless an earlier test has; its folder."""
    if not (child.place / out).exists():
        run(child, f"merge {line} --out {out} -q")
    return out


def scores(child: Driver, folder: str) -> dict[str, Value]:
    """Value and interval, and predictions, of every record."""
    return observe(None, child.place / folder)


def expert_is_right(child: Driver, folder: str, task: str) -> None:
    """An expert read as it is has nine of ten labels right: so the world's labels were made."""
    values = scores(child, folder)
    (score,) = [value for name, value in values.items() if name.startswith(f"score/expert/{task}/current/")]
    assert float(np.asarray(score)[0]) == pytest.approx(0.9)


# --- R1, R2: pooling --------------------------------------------------------------------------------------------------

MEAN = f"two=world/two {BASE} --method task_arithmetic --set scale=1.0 --set pooling=mean"
TWO = "--expert two=world/two --data two=world/two.csv --device cpu"


@pytest.mark.parametrize("dtype", ["keep", "float16"])
def test_r1_evaluate_reads_experts_by_the_pooling_of_the_merge(child: Driver, dtype: str) -> None:
    # One expert merged alone is that expert: to the byte, or but for the cast.
    merged = once(child, f"{MEAN} --dtype {dtype}", f"mean-{dtype}")
    line = f"evaluate {merged} --data two=world/two.csv --protocol current --device cpu --no-references"
    run(child, f"{line} --out r1-alone-{dtype}")
    run(child, f"evaluate {merged} {TWO} --protocol current --out r1-{dtype}")
    alone, both = (
        {name: value for name, value in scores(child, folder).items() if "/current/" in name}
        for folder in (f"r1-alone-{dtype}", f"r1-{dtype}")
    )
    assert (len(alone), len(both)) == (2, 4)  # of each model a score and predictions
    for name, value in both.items():
        (wanted,) = [each for other, each in alone.items() if other.split("/")[0] == name.split("/")[0]]
        assert np.array_equal(np.asarray(value), np.asarray(wanted)), name


def test_r2_diagnose_finds_no_distance_between_a_model_and_itself(child: Driver) -> None:
    merged = once(child, f"{MEAN} --dtype float16", "mean-float16")
    run(child, f"diagnose {merged} {BASE} {TWO} --points 0 --layers 0 --out r2")
    distance = scores(child, "r2")["number/raw"]
    assert isinstance(distance, float)
    assert distance < 0.01


def test_two_poolings_of_the_same_weights_are_two_models(child: Driver) -> None:
    alone = f"three=world/three {BASE} --method task_arithmetic --set scale=1.0"
    by_pooler, by_mean = once(child, alone, "by-pooler"), once(child, f"{alone} --set pooling=mean", "by-mean")
    half = once(child, f"{alone} --set pooling=mean --dtype float16", "half-by-mean")  # other bytes: encoded anew
    three = "--data three=world/three.csv --protocol current --device cpu"
    run(child, f"evaluate {half} {three} --no-references --out half-alone")
    run(child, f"evaluate {by_pooler} {by_mean} {three} --out two-poolings")
    both = scores(child, "two-poolings")
    pooler, mean = (
        next(value for name, value in both.items() if name.startswith("predicted/") and f"({folder})" in name)
        for folder in (by_pooler, by_mean)
    )
    (wanted,) = [value for name, value in scores(child, "half-alone").items() if name.startswith("predicted/")]
    assert pooler != wanted
    assert mean == wanted


# --- R4: device -------------------------------------------------------------------------------------------------------

DEVICE = "base: base\nexperts: {two: two, three: three}\nmethod: tsv_m\ndevice: auto\n"
TABLES = "{two: two.csv, three: three.csv}"
BLOCKS = {
    "align": f"align: {{data: {TABLES}, aligner: ridge}}\n",
    "run": f"evaluate: {{data: {TABLES}}}\ndiagnose: false\nreport: false\n",
    "sweep": f"evaluate: {{data: {TABLES}}}\nsweep: {{aligners: [none]}}\nreport: false\n",
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_r4_a_device_of_the_method_is_no_matter_of_experts(child: Driver, kind: str) -> None:
    (child.place / "world" / f"device-{kind}.yaml").write_text(DEVICE + BLOCKS[kind])
    run(child, f"merge world/device-{kind}.yaml --dry-run")
    run(child, f"{'merge' if kind == 'align' else 'run'} world/device-{kind}.yaml --out r4-{kind} -q")


# --- R5, R6, R7: how an expert was opened -----------------------------------------------------------------------------

# Experts, and the key that opens them: an unknown tensor, missing ones, a state dict without config.
OPENED = {
    "extra": ("two=world/two-extra three=world/three", "--set ignore=[bert.translation.*]"),
    "gap": ("two=world/two-gap three=world/three", "--set missing=base"),
    "bare": ("two=world/two three=world/three.pth", ""),
}


@pytest.mark.parametrize("kind", OPENED)
def test_how_experts_were_opened_is_known_to_every_command(child: Driver, kind: str) -> None:
    words, key = OPENED[kind]
    merged = once(child, f"{words} {BASE} --method ties {key}", f"{kind}-merged")
    experts = " ".join(f"--expert {word}" for word in words.split())
    run(child, f"align {merged} {experts} {DATA} --aligner ridge --device cpu --out {kind}-aligned -q")
    aligned = observe(child.place / f"{kind}-aligned", None)
    assert {name.split("/")[1] for name in aligned if name.startswith("head/")} == {"two", "three"}
    run(child, f"evaluate {merged} {experts} {DATA} --device cpu --out {kind}-scores")
    expert_is_right(child, f"{kind}-scores", "three")
    if kind != "gap":  # there `two` is an expert with two layers of its base
        expert_is_right(child, f"{kind}-scores", "two")
    run(child, f"diagnose {merged} {BASE} {experts} {DATA} --points 0 --layers 0 --device cpu --out {kind}-diagnosis")
    assert "number/raw" in scores(child, f"{kind}-diagnosis")


# --- R8: tokenizer ----------------------------------------------------------------------------------------------------


def test_r8_the_bases_tokenizer_serves_all_experts(child: Driver) -> None:
    words = f"two=world/two-plain {BASE} --data two=world/two.csv --method task_arithmetic --set scale=auto"
    result = run(child, f"merge {words} --out r8 --json")
    assert 0 < json.loads(result.output)["manifest"]["method"]["parameters"]["scale"] <= 1
