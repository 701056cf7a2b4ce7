"""The 70 fault cases, each with what becomes of it: refused, sound after all, or held by a test elsewhere (HELD).

Numbers and titles are those of the list in issue 7 that every reading or writing tool should survive; 0 stands for
arguments and recipes. `test_cases.py` runs every row through the command line.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.berts import HEADS
from tests.faults import corruptions as m
from tests.faults.corruptions import QUERY, Damage, nothing

from orthomerge.core.errors import (
    CheckpointError,
    IncompatibleError,
    NumericalError,
    OrthomergeError,
    OutputError,
    RecipeError,
)

BROKEN, NUMBERS, OUTPUT, RECIPE = CheckpointError, NumericalError, OutputError, RecipeError
TO = "--out results/out --quiet"
EXPERTS = " ".join(f"{name}=./{name}" for name in HEADS)
TABLES = " ".join(f"--data {name}=data/{name}.csv" for name in HEADS)
ALIGN = f"align merged --expert two=./two {TO} --device cpu --aligner ridge"
# The usual command lines; rows add words to them, or have a line of their own.
LINES = {
    "merge": f"merge {EXPERTS} --base ./base {TO} --method task_arithmetic",
    "fit": f"merge {EXPERTS} --base ./base {TO} {TABLES} --method fisher --device cpu",
    "align": f"{ALIGN} --data two=data/two.csv",
    "evaluate": "evaluate merged --expert two=./two --data two=data/two.csv --out results/out --device cpu --json",
    "export": "export merged --task two --out results/out",
    "verify": "inspect merged --verify",
    "recipe": f"merge recipe.yaml {TO}",
}


@dataclass(frozen=True)
class Refused:
    """A command that must fail: with which error, and what its message must match (way out, tensor, file)."""

    number: int
    name: str
    damage: Damage
    way_out: str
    tensor: str = ""
    file: str = "two"
    error: type[OrthomergeError] = IncompatibleError
    line: str = "merge"
    more: str = ""


@dataclass(frozen=True)
class Sound:
    """Something unusual that must work, and give an output that verifies."""

    number: int
    name: str
    damage: Damage
    line: str = "merge"
    more: str = ""


def line_of(row: Refused | Sound) -> str:
    """Give the words after `orthomerge`."""
    return f"{LINES.get(row.line, row.line)} {row.more}"


TWO = r"two/model\.safetensors"
BIN = r"two/pytorch_model\.bin"
BARE = QUERY.replace(".", r"\.")
TABLE = r"data/two\.csv"
ODD = "ein ordner für 'alles' \U0001f600"
INSIST = "check_base: false"
AGAIN = "fetch .*again"
NAN = float("nan")
STATISTICS = "--set \"ignore=['*.running_mean', '*.running_var', '*.num_batches_tracked']\""
# The name and the dtype that quantisers give a weight.
PACKED = m.both(
    m.renamed("0.attention.self.query.weight", "0.attention.self.query.qweight"), m.each("qweight", torch.Tensor.int)
)
IDS = torch.arange(40)[None]
WITHOUT_TRAINING = m.copied("base", "two", "", "bert.")

# fmt: off
ROWS: tuple[Refused | Sound, ...] = (
    # 1 empty file
    Refused(1, "empty", m.write("two/model.safetensors", b""), AGAIN, file=TWO, error=BROKEN),
    Refused(1, "empty manifest", m.write("merged/orthomerge.json", b""), AGAIN, file=r"orthomerge\.json", error=BROKEN,
            line="align"),
    # 3 truncated data
    Refused(3, "cut short", m.cut("two/model.safetensors", 0.9), AGAIN, file=TWO, error=BROKEN),
    # 9 unknown dtype, sub-byte floats
    Refused(9, "bytes for floats", m.each(QUERY, lambda v: (v * 1000).round().to(torch.int8)), "converted to float",
            tensor=BARE),
    # 10 bit flip, with a checksum
    Refused(10, "verify", m.flip("merged/encoder.safetensors"), "merge again|fetch", file=r"encoder\.safetensors",
            error=OUTPUT, line="verify"),
    Refused(10, "align", m.flip("merged/encoder.safetensors"), "merge again", file="the encoder in .*merged",
            error=BROKEN, line="align"),
    Refused(10, "export", m.flip("merged/encoder.safetensors"), "merge again", file="the encoder in .*merged",
            error=BROKEN, line="export"),
    Refused(10, "several", m.several_changes(), "merge again|fetch",
            tensor=r"(?s)(?=.*README\.md is missing)(?=.*two/config\.json has 2)(?=.*encoder\.safetensors has changed)",
            file=r"(?s)two/extra\.txt was not.*|README", error=OUTPUT, line="verify"),
    Refused(10, "a file is lost", m.lose("merged/five/config.json"), "merge again",
            file=r"five/config\.json is missing", error=BROKEN, line="align"),
    # 11 right size, zero pages
    Refused(11, "half of the expert", m.blank("two/model.safetensors"), AGAIN,
            tensor="'[a-z0-9A-Z_.]+' in expert 'two'", file=TWO, error=BROKEN),
    Refused(11, "half of the base", m.blank("base/model.safetensors"), AGAIN, tensor="' in the base",
            file=r"base/model\.safetensors", error=BROKEN),
    # 17 pickles that run, zip bombs, zips that lead out
    Refused(17, "evil zip", m.as_pickle(), "do not open it with torch.load either", tensor="mkdir", file=BIN,
            error=BROKEN),
    Refused(17, "evil adapter", m.evil_adapter(), "do not open it", file=r"adapter_model\.bin", error=BROKEN),
    Refused(17, "bomb of arrays", m.npz_bomb("data/two.npz"), "give a smaller file", file=r"two\.npz", error=BROKEN,
            line=f"{ALIGN} --data two=data/two.npz"),
    # 18 an adapter instead of a model, and adapters that are none
    Refused(18, "other targets", m.adapter(m.renamed("query", "q_proj", m.ADAPTER)),
            "the base that it was trained on|list it under", tensor="q_proj"),
    Refused(18, "wider",
            m.adapter(m.each("layer.0.attention.self.query.lora_A", lambda v: torch.ones(2, 48), m.ADAPTER)),
            "same base", tensor=BARE),
    Refused(18, "never trained", m.adapter(m.each("lora_B", torch.zeros_like, m.ADAPTER)), INSIST),
    Sound(18, "as expert", m.as_adapter()),
    # 19 quantised inputs
    Refused(19, "by names", PACKED, "ignore|missing: base", tensor=BARE),
    # 20 remote code
    Refused(20, "base", m.remote_model("base"), "name it as 'family'", tensor="odd.OddModel", file="base",
            error=BROKEN),
    Refused(20, "unknown model", m.remote_model("base", model_type="odd"), "family: generic", tensor="odd.OddModel",
            file="base", error=BROKEN),
    Sound(20, "asked for by name", m.remote_model("two"), more="--set family=bert"),
    # 22 read-only and network file systems
    Refused(22, "stale handle", m.reads_fail, "Stale file handle.*(try|run).*again", file=TWO, error=BROKEN),
    # 24 another architecture, depth or width
    Refused(24, "architecture", m.configured(model_type="distilbert"), "same base model", tensor="distilbert"),
    Refused(24, "depth", m.without("layer.1."), "missing: base", tensor=r"encoder\.layer\.1\."),
    Refused(24, "width", m.each("output.dense.weight", lambda v: torch.cat((v, v), -1)), "same base model",
            tensor=r"output\.dense\.weight"),
    Refused(24, "more layers", m.repeated(r"layer\.1\.", "layer.2."), "ignore",
            tensor=r"'bert\.encoder\.layer\.2\..*is neither encoder nor head"),
    # 25 wrong base
    Refused(25, "a stranger", m.shuffled("base"), INSIST, tensor=r"cosine between their weights is -?0\.[01]",
            file="base"),
    Refused(25, "one common way", m.base_of_the_base(), INSIST, tensor=r"cosine .* at least 0\.9", file="base"),
    Sound(25, "insisted on", m.shuffled("base"), more="--set check_base=false"),
    Refused(25, "of one expert", m.shuffled("three"), INSIST, tensor="cosine between their weights is",
            file="expert 'three'"),
    # 26 identical to the base, or to another expert
    Refused(26, "to the base", WITHOUT_TRAINING, INSIST, tensor="is the base"),
    Refused(26, "to another", m.copied("two", "three", "bert."), INSIST, tensor="the same model", file="three"),
    Sound(26, "insisted on", WITHOUT_TRAINING, more="--set check_base=false"),
    # 27 mixed dtypes
    Sound(27, "float16 expert", m.each("", torch.Tensor.half)),
    Sound(27, "bfloat16 base", m.each("", torch.Tensor.bfloat16, "base")),
    Refused(27, "integer buffers differ", m.position_ids(base=IDS, two=IDS + 1), "same base",
            tensor=r"embeddings\.position_ids", file=TWO),
    Sound(27, "bfloat16 expert", m.each("", torch.Tensor.bfloat16)),
    Sound(27, "integer buffers that agree", m.position_ids(base=IDS, two=IDS)),
    Sound(27, "a tensor without elements", m.added("embeddings.position_ids", torch.zeros(1, 0).long(), "base")),
    # 28 vocabulary
    Refused(28, "more rows", m.each("word_embeddings", lambda v: torch.cat((v, torch.zeros(3, 32)))), "same base model",
            tensor="word_embeddings"),
    Refused(28, "other words", m.other_words(), "tokenizer", file=r"two/vocab\.txt"),
    Refused(28, "tokenizer of a larger model",
            m.merged_from(m.rewrite("base/vocab.txt", lambda data: data + b"more\n" * 40)), "another model's",
            file="tokenizer of .*base", line="evaluate"),
    # 30 NaN and infinity
    Refused(30, "expert", m.spoil("two", QUERY, NAN), "sound checkpoint", tensor=BARE, file=TWO, error=NUMBERS),
    Refused(30, "base", m.spoil("base", QUERY, NAN), "sound checkpoint", tensor=BARE, file=r"base/model\.safetensors",
            error=NUMBERS),
    Refused(30, "head", m.spoil("two", "classifier.weight", NAN), "sound checkpoint", tensor=r"classifier\.weight",
            file=TWO, error=NUMBERS),
    Refused(30, "since the merge", m.spoil("two", "bert.embeddings.LayerNorm.bias", NAN),
            "give the path of the right one, or merge again", line="align"),
    Refused(30, "in a fit", m.spoil("two", QUERY, NAN), "sound checkpoint|check|look at", error=NUMBERS, line="fit"),
    Refused(30, "expert, in a survey", m.spoil("two", QUERY, NAN), "sound checkpoint", tensor=BARE, file=TWO,
            error=NUMBERS, more="--method ties"),
    Refused(30, "copied from the base",
            m.both(m.without("pooler", *HEADS), m.spoil("base", "pooler.dense.weight", NAN)), "",
            tensor=r"'pooler\.dense\.weight' in the base .* holds NaN", file=r"base/model\.safetensors", error=NUMBERS,
            more="--set pooling=cls"),
    # 31 overflow of the sum in half precision
    Refused(31, "float16", m.each(QUERY, lambda v: v * 1e6, "base", *HEADS), "smaller scale, or --dtype", tensor=BARE,
            file="F16", error=NUMBERS, more="--dtype float16"),
    # 32 keys: missing, too many, under other names
    Refused(32, "missing", m.without(QUERY), "missing: base", tensor=BARE),
    Refused(32, "too many", m.added("strange", torch.ones(2)), "ignore", tensor="'strange'"),
    Refused(32, "two encoders", m.repeated("^", "ema."), "'prefix'", tensor="ema"),
    Refused(32, "nothing in common", m.numbered(), "'prefix'", tensor="x0"),
    Sound(32, "another prefix", m.renamed("^", "module.")),
    Sound(32, "missing, and taken from the base", m.without(QUERY), more="--set missing=base"),
    Sound(32, "too many, and ignored", m.added("adapter.weight", torch.ones(2)), more="--set ignore=[adapter.*]"),
    # 33 BatchNorm
    Refused(33, "statistics", m.batch_norm(), "ignore: .*running_mean", tensor=r"bn\.running_mean", file="base",
            line="recipe"),
    Sound(33, "left out", m.batch_norm(), line="recipe", more=STATISTICS),
    # 34 no task, one task, one name twice
    Refused(34, "none", nothing, "orthomerge merge topic", file="nothing to merge", error=RECIPE,
            line=f"merge --base ./base {TO}"),
    Sound(34, "one", nothing, f"merge two=./two --base ./base {TO} --method task_arithmetic"),
    # 35 scales
    Refused(35, "NaN", nothing, "finite number", file="scale", error=RECIPE, more="--set scale=.nan"),
    Refused(35, "huge", nothing, r"at most 3\.4e", file="scale", error=RECIPE, more="--set scale=1e39"),
    Refused(35, "large", nothing, "smaller scale", tensor="'[a-zA-Z0-9_.]+'", file="F16|infinity", error=NUMBERS,
            more="--set scale=3e38 --dtype float16"),
    Sound(35, "as people write it", nothing, more="--set scale=3e-1"),
    # 36 order of labels
    Refused(36, "expert and merge", m.configured(id2label={"0": "two-1", "1": "two-0"}), "give the expert",
            line="align"),
    # 37 other labels
    Refused(37, "more", m.configured(id2label={"0": "a", "1": "b", "2": "c"}), "'labels'",
            tensor=r"classifier\.weight"),
    Refused(37, "a gap", m.configured(id2label={"0": "a", "5": "b"}), "'labels'"),
    Refused(37, "of other data", m.rows("a film,yes,train", "it was,no,train"), "`labels`", line="align"),
    Refused(37, "since the merge", m.configured(id2label={"0": "a", "1": "b"}), "has other labels than the model",
            line="align"),
    # 38 kinds of heads
    Sound(38, "without bias", m.without("classifier.bias")),
    Refused(38, "another bias", m.each("classifier.bias", lambda v: torch.ones(7)), "name the head",
            tensor=r"classifier\.bias"),
    Refused(38, "no head", m.without("classifier"), "name the head", tensor="classifier"),
    Refused(38, "integers", m.each("classifier.weight", torch.Tensor.char), "name the head", tensor=r"\(2, 32\) I8"),
    Refused(38, "wider", m.each("classifier.weight", lambda v: torch.ones(2, 64)),
            "reads 64 features, but the encoder makes 32", tensor=r"classifier\.weight"),
    Refused(38, "a family that keeps none", m.without("classifier", *HEADS), "or its layers",
            tensor="of this family hold no head", file="expert 'five'", more="--set family=generic"),
    # 39 one logit, many labels, regression
    Refused(39, "one logit", m.both(m.each("classifier", lambda v: v[:1]), m.configured(id2label={"0": "yes"})),
            "leave this one out", tensor=r"classifier\.weight"),
    Refused(39, "many labels", m.configured(problem_type="multi_label_classification"), "leave this one out",
            tensor="multi_label"),
    Refused(39, "regression", m.configured(problem_type="regression"), "leave this one out", tensor="regression"),
    # 40 more classes than features, heads without full rank
    Sound(40, "two rows alike", m.merged_from(m.each("classifier.weight", lambda v: v[:1].expand_as(v))), line="align"),
    # 41 two tasks with one head
    Sound(41, "one head", m.one_head()),
    # 42 no rows
    Refused(42, "only a header", m.rows(), "no rows", file=TABLE, error=BROKEN, line="align"),
    # 43 one row
    Sound(43, "aligned on one", m.rows("a film", head="text"), line="align"),
    # 44 all rows identical
    Sound(44, "aligned", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), line="align"),
    Sound(44, "aligned by turns", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), line="align",
          more="--aligner orthogonal"),
    # 45 a class is missing in few shots
    Refused(45, "no row of it", m.rows(*["a film,two-0,train"] * 9, "a film,two-0,test", "it was,two-1,test"),
            "train split has no examples", tensor="two-1", error=BROKEN, line="evaluate",
            more="--shots 2 --protocol knn"),
    # 46 fewer than k of a class
    Refused(46, "two of five",
            m.rows(*["a film,two-0,train", "it was,two-1,train"] * 3, "a film,two-0,test", "it was,two-1,test"),
            "ask for at most 2", file="class 0 has 2 examples", error=RECIPE, line="evaluate",
            more="--shots 50 --protocol knn"),
    # 47 features: not finite, constant
    Refused(47, "not finite", m.merged_from(m.spoil("two", "bert.embeddings.LayerNorm.bias", 3e38)),
            "check its weights", error=NUMBERS, line="align"),
    # 48 fewer inputs than features
    Sound(48, "ridge", nothing, line="align", more="--limit 5"),
    Sound(48, "linear", nothing, line="align", more="--limit 5 --aligner linear"),
    # 50 rows that are damaged, empty or long
    Refused(50, "a picture for a text model", m.write("pictures/cat/1.png", b"\x89PNG\r\n\x1a\nnonsense"), "modality",
            error=OrthomergeError, line=f"{ALIGN} --data two=pictures"),
    Sound(50, "a long text", m.rows(f"{'film ' * 9000},two-0,train", "it was,two-1,train"), line="align"),
    # 52 extreme and equal logits of the teacher
    Sound(52, "1e4", m.merged_from(m.each("classifier.weight", lambda v: v * 1e6)), line="align",
          more="--aligner auto"),
    Sound(52, "all equal", m.merged_from(m.each("classifier", torch.zeros_like)), line="align", more="--aligner auto"),
    # 58 disk full
    Refused(58, "too little room", m.little_room, "make room, or write elsewhere",
            tensor="has 0.00 GB free, but the output needs 0.02 GB", file="results", error=OUTPUT),
    # 64 clock jumps
    Sound(64, "times of all kinds", m.old_and_new_times),
    # 65 output inside an input
    Refused(65, "expert", nothing, "choose another place", error=OUTPUT, more="--out two/out --force"),
    Refused(65, "of the merge itself", nothing, "choose another place", file="merged", error=OUTPUT, line="align",
            more="--out merged/to"),
    # 66 output is an input
    Refused(66, "expert", nothing, "choose another place", error=OUTPUT, more="--out two --force"),
    Refused(66, "export", nothing, "choose another place", file="merged", error=OUTPUT, line="export",
            more="--out merged/two"),
    Refused(66, "an older output", nothing, "give --force to replace it", file="merged", error=OUTPUT,
            more="--out merged"),
    Refused(66, "the work of others", nothing, "was not written by orthomerge", file="data", error=OUTPUT,
            more="--out data --force"),
    # 67 permission denied on rename
    Refused(67, "rename", m.renames_fail, "Permission denied; nothing was left behind", file="results/out",
            error=OUTPUT),
    # 68 odd paths
    Sound(68, "spaces and more", lambda patch: Path("two").rename(ODD),
          f"merge \"two=./{ODD}\" --base ./base --method average --out \"results/{ODD}\" --quiet"),
    # 70 half a download
    Refused(70, "nothing at all", lambda patch: shutil.rmtree("two"), "is not a hub id", file="two' does not exist",
            error=BROKEN),
    Refused(70, "an id that is not in the cache", nothing, "HF_HUB_OFFLINE", file="some-org/not-in-the-cache",
            error=BROKEN, more="six=some-org/not-in-the-cache"),
    # 0 arguments and recipes
    Refused(0, "method", nothing, r"did you mean 'task_arithmetic'\?", file="unknown method 'task_arithmatic'",
            error=RECIPE, more="--method task_arithmatic"),
    Refused(0, "family", nothing, r"did you mean 'bert'\?", file="unknown model family 'brt'", error=RECIPE,
            more="--set family=brt"),
    Refused(0, "vector", nothing, "", file="'nine', which is no expert", error=RECIPE,
            more="--set 'vector=two + nine'"),
    Refused(0, "a task to export", nothing, r"did you mean 'two'\?", file="is no task 'too'", error=RECIPE,
            line=f"export merged --task too {TO}"),
    Refused(0, "no output", m.write("recipe.yaml", b"experts: {two: two}\nbase: base"),
            "give 'out' in the recipe, or --out", file=r"no output folder", error=RECIPE, line="merge recipe.yaml"),
    Sound(0, "a recipe from anywhere",
          m.write("my/recipe.yaml", b"experts: {two: ../two}\nbase: ../base\nparameters:\nout: ../results/out"),
          "merge my/recipe.yaml --set scale=1"),
)

# Tests that hold the cases without a row.
HELD: dict[int, str] = {
    2: "tests/files/test_pickles.py::test_cut_anywhere",  # truncated header
    4: "tests/files/test_safetensors.py::test_damaged_headers",  # trailing bytes
    5: "tests/files/test_safetensors.py::test_broken_beginnings",  # header longer than the file, or than 100 MB
    6: "tests/files/test_safetensors.py::test_damaged_headers",  # overlapping offsets, gaps
    7: "tests/files/test_safetensors.py::test_damaged_headers",  # shape x dtype is not the number of bytes
    8: "tests/files/test_safetensors.py::test_damaged_headers",  # duplicate keys
    12: "tests/files/test_opening.py::test_what_is_refused",  # shards that are missing
    13: "tests/files/test_opening.py::test_what_is_refused",  # shards that disagree with their index
    14: "tests/files/test_opening.py::test_what_is_refused",  # an index that leads out
    15: "tests/files/test_opening.py::test_what_is_refused",  # an index that is none
    16: "tests/files/test_opening.py::test_what_is_refused",  # a wrong total_size
    21: "tests/faults/test_cases.py::test_an_input_that_changes_meanwhile",  # file changed between plan and read
    23: "tests/files/test_safetensors.py::test_odd_names_of_tensors",  # names of tensors
    29: "tests/models/test_split.py::test_tied_weights_must_be_equal",  # tied weights
    49: "tests/evaluation/test_evaluate.py::test_inputs_that_two_splits_share",  # same inputs in calibration and test
    51: "tests/models/test_processing.py::test_batches_lose_nothing",  # inputs that end early or change their number
    53: "tests/merging/test_polar.py::test_other_solvers_take_over",  # SVD that does not converge
    54: "tests/tuning/test_finetune.py::test_a_loss_that_is_no_number_names_task_and_step",  # a loss that diverges
    55: "tests/alignment/test_auto.py::test_the_head_stays_where_no_held_out_loss_falls",  # no improvement
    56: "tests/faults/test_determinism.py::test_two_worlds",  # threads and BLAS
    57: "tests/alignment/test_unseen.py::test_heads_keep_their_dtype",  # statistics in half precision
    59: "tests/faults/test_crash_points.py::test_every_call",  # kill -9
    60: "tests/faults/test_signals.py::test_a_signal_at_a_random_moment",  # SIGINT
    61: "tests/faults/test_signals.py::test_memory_that_runs_out",  # out of memory
    62: "tests/faults/test_signals.py::test_many_runs_into_one_output",  # two runs into one output
    63: "tests/runs/test_run.py::test_a_killed_run_goes_on",  # a worker dies
    69: "tests/faults/test_cases.py::test_standard_output_that_is_closed",  # standard output is closed
}
# fmt: on
