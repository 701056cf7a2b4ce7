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

BROKEN, MISMATCH, NUMBERS = CheckpointError, IncompatibleError, NumericalError
OUTPUT, RECIPE = OutputError, RecipeError
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
class Row:
    """A fault and a command that meets it, which must fail with an error that matches all patterns, or work."""

    number: int
    name: str
    damage: Damage
    error: type[OrthomergeError] | None
    says: tuple[str, ...]
    line: str
    more: str

    @property
    def words(self) -> str:
        """The words after `orthomerge`."""
        return f"{LINES.get(self.line, self.line)} {self.more}"


def refused(
    number: int,
    name: str,
    damage: Damage,
    error: type[OrthomergeError],
    *says: str,
    line: str = "merge",
    more: str = "",
) -> Row:
    """A command that must fail; its message must say in which file, of which tensor, and the way out."""
    return Row(number, name, damage, error, says, line, more)


def sound(number: int, name: str, damage: Damage, line: str = "merge", more: str = "") -> Row:
    """Something unusual that must work, and give an output that verifies."""
    return Row(number, name, damage, None, (), line, more)


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
ROWS = (
    # 1 empty file
    refused(1, "empty", m.write("two/model.safetensors", b""), BROKEN, TWO, AGAIN),
    refused(1, "empty manifest", m.write("merged/orthomerge.json", b""), BROKEN, r"orthomerge\.json", AGAIN,
            line="align"),
    # 3 truncated data
    refused(3, "cut short", m.cut("two/model.safetensors", 0.9), BROKEN, TWO, AGAIN),
    # 9 unknown dtype, sub-byte floats
    refused(9, "bytes for floats", m.each(QUERY, lambda v: (v * 1000).round().to(torch.int8)), MISMATCH, "two", BARE,
            "converted to float"),
    # 10 bit flip, with a checksum
    refused(10, "verify", m.flip("merged/encoder.safetensors"), OUTPUT, r"encoder\.safetensors", "merge again|fetch",
            line="verify"),
    refused(10, "align", m.flip("merged/encoder.safetensors"), BROKEN, "the encoder in .*merged", "merge again",
            line="align"),
    refused(10, "export", m.flip("merged/encoder.safetensors"), BROKEN, "the encoder in .*merged", "merge again",
            line="export"),
    refused(10, "several", m.several_changes(), OUTPUT, r"(?s)two/extra\.txt was not.*|README",
            r"(?s)(?=.*README\.md is missing)(?=.*two/config\.json has 2)(?=.*encoder\.safetensors has changed)",
            "merge again|fetch", line="verify"),
    refused(10, "a file is lost", m.lose("merged/five/config.json"), BROKEN, r"five/config\.json is missing",
            "merge again", line="align"),
    # 11 right size, zero pages
    refused(11, "half of the expert", m.blank("two/model.safetensors"), BROKEN, TWO, "'[a-z0-9A-Z_.]+' in expert 'two'",
            AGAIN),
    refused(11, "half of the base", m.blank("base/model.safetensors"), BROKEN, r"base/model\.safetensors",
            "' in the base", AGAIN),
    # 17 pickles that run, zip bombs, zips that lead out
    refused(17, "evil zip", m.as_pickle(), BROKEN, BIN, "mkdir", "do not open it with torch.load either"),
    refused(17, "evil adapter", m.evil_adapter(), BROKEN, r"adapter_model\.bin", "do not open it"),
    refused(17, "bomb of arrays", m.npz_bomb("data/two.npz"), BROKEN, r"two\.npz", "give a smaller file",
            line=f"{ALIGN} --data two=data/two.npz"),
    # 18 an adapter instead of a model, and adapters that are none
    refused(18, "other targets", m.both(m.as_adapter(), m.renamed("query", "q_proj", m.ADAPTER)), MISMATCH, "two",
            "q_proj", "the base that it was trained on|list it under"),
    refused(18, "wider",
            m.both(m.as_adapter(), m.each("0.attention.self.query.lora_A", lambda v: torch.ones(2, 48), m.ADAPTER)),
            MISMATCH, "two", BARE, "same base"),
    refused(18, "never trained", m.both(m.as_adapter(), m.each("lora_B", torch.zeros_like, m.ADAPTER)), MISMATCH, "two",
            INSIST),
    sound(18, "as expert", m.as_adapter()),
    # 19 quantised inputs
    refused(19, "by names", PACKED, MISMATCH, "two", BARE, "ignore|missing: base"),
    # 20 remote code
    refused(20, "base", m.remote_model("base"), BROKEN, "base", "odd.OddModel", "name it as 'family'"),
    refused(20, "unknown model", m.remote_model("base", model_type="odd"), BROKEN, "base", "odd.OddModel",
            "family: generic"),
    sound(20, "asked for by name", m.remote_model("two"), more="--set family=bert"),
    # 22 read-only and network file systems
    refused(22, "stale handle", m.reads_fail, BROKEN, TWO, "Stale file handle.*(try|run).*again"),
    # 24 another architecture, depth or width
    refused(24, "architecture", m.configured(model_type="distilbert"), MISMATCH, "two", "distilbert",
            "same base model"),
    refused(24, "depth", m.without("layer.1."), MISMATCH, "two", r"encoder\.layer\.1\.", "missing: base"),
    refused(24, "width", m.each("output.dense.weight", lambda v: torch.cat((v, v), -1)), MISMATCH, "two",
            r"output\.dense\.weight", "same base model"),
    refused(24, "more layers", m.repeated(r"layer\.1\.", "layer.2."), MISMATCH, "two",
            r"'bert\.encoder\.layer\.2\..*is neither encoder nor head", "ignore"),
    # 25 wrong base
    refused(25, "a stranger", m.shuffled("base"), MISMATCH, "base", r"cosine between their weights is -?0\.[01]",
            INSIST),
    refused(25, "one common way", m.base_of_the_base(), MISMATCH, "base", r"cosine .* at least 0\.9", INSIST),
    sound(25, "insisted on", m.shuffled("base"), more="--set check_base=false"),
    refused(25, "of one expert", m.shuffled("three"), MISMATCH, "expert 'three'", "cosine between their weights is",
            INSIST),
    # 26 identical to the base, or to another expert
    refused(26, "to the base", WITHOUT_TRAINING, MISMATCH, "two", "is the base", INSIST),
    refused(26, "to another", m.copied("two", "three", "bert."), MISMATCH, "three", "the same model", INSIST),
    sound(26, "insisted on", WITHOUT_TRAINING, more="--set check_base=false"),
    # 27 mixed dtypes
    sound(27, "float16 expert", m.each("", torch.Tensor.half)),
    sound(27, "bfloat16 base", m.each("", torch.Tensor.bfloat16, "base")),
    refused(27, "integer buffers differ", m.position_ids(base=IDS, two=IDS + 1), MISMATCH, TWO,
            r"embeddings\.position_ids", "same base"),
    sound(27, "bfloat16 expert", m.each("", torch.Tensor.bfloat16)),
    sound(27, "integer buffers that agree", m.position_ids(base=IDS, two=IDS)),
    sound(27, "a tensor without elements", m.added("embeddings.position_ids", torch.zeros(1, 0).long(), "base")),
    # 28 vocabulary
    refused(28, "more rows", m.each("word_embeddings", lambda v: torch.cat((v, torch.zeros(3, 32)))), MISMATCH, "two",
            "word_embeddings", "same base model"),
    refused(28, "other words", m.other_words(), MISMATCH, r"two/vocab\.txt", "tokenizer"),
    refused(28, "tokenizer of a larger model",
            m.merged_from(m.rewrite("base/vocab.txt", lambda data: data + b"more\n" * 40)), MISMATCH,
            "tokenizer of .*base", "another model's", line="evaluate"),
    # 30 NaN and infinity
    refused(30, "expert", m.spoil("two", QUERY, NAN), NUMBERS, TWO, BARE, "sound checkpoint"),
    refused(30, "base", m.spoil("base", QUERY, NAN), NUMBERS, r"base/model\.safetensors", BARE, "sound checkpoint"),
    refused(30, "head", m.spoil("two", "classifier.weight", NAN), NUMBERS, TWO, r"classifier\.weight",
            "sound checkpoint"),
    refused(30, "since the merge", m.spoil("two", "bert.embeddings.LayerNorm.bias", NAN), MISMATCH, "two",
            "give the path of the right one, or merge again", line="align"),
    refused(30, "in a fit", m.spoil("two", QUERY, NAN), NUMBERS, "two", "sound checkpoint|check|look at", line="fit"),
    refused(30, "expert, in a survey", m.spoil("two", QUERY, NAN), NUMBERS, TWO, BARE, "sound checkpoint",
            more="--method ties"),
    refused(30, "copied from the base",
            m.both(m.without("pooler", *HEADS), m.spoil("base", "pooler.dense.weight", NAN)), NUMBERS,
            r"base/model\.safetensors", r"'pooler\.dense\.weight' in the base .* holds NaN", more="--set pooling=cls"),
    # 31 overflow of the sum in half precision
    refused(31, "float16", m.each(QUERY, lambda v: v * 1e6, "base", *HEADS), NUMBERS, "F16", BARE,
            "smaller scale, or --dtype", more="--dtype float16"),
    # 32 keys: missing, too many, under other names
    refused(32, "missing", m.without(QUERY), MISMATCH, "two", BARE, "missing: base"),
    refused(32, "too many", m.added("strange", torch.ones(2)), MISMATCH, "two", "'strange'", "ignore"),
    refused(32, "two encoders", m.repeated("^", "ema."), MISMATCH, "two", "ema", "'prefix'"),
    refused(32, "nothing in common", m.numbered(), MISMATCH, "two", "x0", "'prefix'"),
    sound(32, "another prefix", m.renamed("^", "module.")),
    sound(32, "missing, and taken from the base", m.without(QUERY), more="--set missing=base"),
    sound(32, "too many, and ignored", m.added("adapter.weight", torch.ones(2)), more="--set ignore=[adapter.*]"),
    # 33 BatchNorm
    refused(33, "statistics", m.batch_norm(), MISMATCH, "base", r"bn\.running_mean", "ignore: .*running_mean",
            line="recipe"),
    sound(33, "left out", m.batch_norm(), line="recipe", more=STATISTICS),
    # 34 no task, one task, one name twice
    refused(34, "none", nothing, RECIPE, "nothing to merge", "orthomerge merge topic",
            line=f"merge --base ./base {TO}"),
    sound(34, "one", nothing, line=f"merge two=./two --base ./base {TO} --method task_arithmetic"),
    # 35 scales
    refused(35, "NaN", nothing, RECIPE, "scale", "finite number", more="--set scale=.nan"),
    refused(35, "huge", nothing, RECIPE, "scale", r"at most 3\.4e", more="--set scale=1e39"),
    refused(35, "large", nothing, NUMBERS, "F16|infinity", "'[a-zA-Z0-9_.]+'", "smaller scale",
            more="--set scale=3e38 --dtype float16"),
    sound(35, "as people write it", nothing, more="--set scale=3e-1"),
    # 36 order of labels
    refused(36, "expert and merge", m.configured(id2label={"0": "two-1", "1": "two-0"}), MISMATCH, "two",
            "give the expert", line="align"),
    # 37 other labels
    refused(37, "more", m.configured(id2label={"0": "a", "1": "b", "2": "c"}), MISMATCH, "two", r"classifier\.weight",
            "'labels'"),
    refused(37, "a gap", m.configured(id2label={"0": "a", "5": "b"}), MISMATCH, "two", "'labels'"),
    refused(37, "of other data", m.rows("a film,yes,train", "it was,no,train"), MISMATCH, "two", "`labels`",
            line="align"),
    refused(37, "since the merge", m.configured(id2label={"0": "a", "1": "b"}), MISMATCH, "two",
            "has other labels than the model", line="align"),
    # 38 kinds of heads
    sound(38, "without bias", m.without("classifier.bias")),
    refused(38, "another bias", m.each("classifier.bias", lambda v: torch.ones(7)), MISMATCH, "two",
            r"classifier\.bias", "name the head"),
    refused(38, "no head", m.without("classifier"), MISMATCH, "two", "classifier", "name the head"),
    refused(38, "integers", m.each("classifier.weight", torch.Tensor.char), MISMATCH, "two", r"\(2, 32\) I8",
            "name the head"),
    refused(38, "wider", m.each("classifier.weight", lambda v: torch.ones(2, 64)), MISMATCH, "two",
            r"classifier\.weight", "reads 64 features, but the encoder makes 32"),
    refused(38, "a family that keeps none", m.without("classifier", *HEADS), MISMATCH, "expert 'five'",
            "of this family hold no head", "or its layers", more="--set family=generic"),
    # 39 one logit, many labels, regression
    refused(39, "one logit", m.both(m.each("classifier", lambda v: v[:1]), m.configured(id2label={"0": "yes"})),
            MISMATCH, "two", r"classifier\.weight", "leave this one out"),
    refused(39, "many labels", m.configured(problem_type="multi_label_classification"), MISMATCH, "two", "multi_label",
            "leave this one out"),
    refused(39, "regression", m.configured(problem_type="regression"), MISMATCH, "two", "regression",
            "leave this one out"),
    # 40 more classes than features, heads without full rank
    sound(40, "two rows alike", m.merged_from(m.each("classifier.weight", lambda v: v[:1].expand_as(v))), line="align"),
    # 41 two tasks with one head
    sound(41, "one head", m.one_head()),
    # 42 no rows
    refused(42, "only a header", m.rows(), BROKEN, TABLE, "no rows", line="align"),
    # 43 one row
    sound(43, "aligned on one", m.rows("a film", head="text"), line="align"),
    # 44 all rows identical
    sound(44, "aligned", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), line="align"),
    sound(44, "aligned by turns", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), line="align",
          more="--aligner orthogonal"),
    # 45 a class is missing in few shots
    refused(45, "no row of it", m.rows(*["a film,two-0,train"] * 9, "a film,two-0,test", "it was,two-1,test"), BROKEN,
            "two", "two-1", "train split has no examples", line="evaluate", more="--shots 2 --protocol knn"),
    # 46 fewer than k of a class
    refused(46, "two of five",
            m.rows(*["a film,two-0,train", "it was,two-1,train"] * 3, "a film,two-0,test", "it was,two-1,test"), RECIPE,
            "class 0 has 2 examples", "ask for at most 2", line="evaluate", more="--shots 50 --protocol knn"),
    # 47 features: not finite, constant
    refused(47, "not finite", m.merged_from(m.spoil("two", "bert.embeddings.LayerNorm.bias", 3e38)), NUMBERS, "two",
            "check its weights", line="align"),
    # 48 fewer inputs than features
    sound(48, "ridge", nothing, line="align", more="--limit 5"),
    sound(48, "linear", nothing, line="align", more="--limit 5 --aligner linear"),
    # 50 rows that are damaged, empty or long
    refused(50, "a picture for a text model", m.write("pictures/cat/1.png", b"\x89PNG\r\n\x1a\nnonsense"), MISMATCH,
            "two", "modality", line=f"{ALIGN} --data two=pictures"),
    sound(50, "a long text", m.rows(f"{'film ' * 9000},two-0,train", "it was,two-1,train"), line="align"),
    # 52 extreme and equal logits of the teacher
    sound(52, "1e4", m.merged_from(m.each("classifier.weight", lambda v: v * 1e6)), line="align",
          more="--aligner auto"),
    sound(52, "all equal", m.merged_from(m.each("classifier", torch.zeros_like)), line="align", more="--aligner auto"),
    # 58 disk full
    refused(58, "too little room", m.little_room, OUTPUT, "results", "has 0.00 GB free, but the output needs 0.02 GB",
            "make room, or write elsewhere"),
    # 64 clock jumps
    sound(64, "times of all kinds", m.old_and_new_times),
    # 65 output inside an input
    refused(65, "expert", nothing, OUTPUT, "two", "choose another place", more="--out two/out --force"),
    refused(65, "of the merge itself", nothing, OUTPUT, "merged", "choose another place", line="align",
            more="--out merged/to"),
    # 66 output is an input
    refused(66, "expert", nothing, OUTPUT, "two", "choose another place", more="--out two --force"),
    refused(66, "export", nothing, OUTPUT, "merged", "choose another place", line="export", more="--out merged/two"),
    refused(66, "an older output", nothing, OUTPUT, "merged", "give --force to replace it", more="--out merged"),
    refused(66, "the work of others", nothing, OUTPUT, "data", "was not written by orthomerge",
            more="--out data --force"),
    # 67 permission denied on rename
    refused(67, "rename", m.renames_fail, OUTPUT, "results/out", "Permission denied; nothing was left behind"),
    # 68 odd paths
    sound(68, "spaces and more", lambda patch: Path("two").rename(ODD),
          line=f"merge \"two=./{ODD}\" --base ./base --method average --out \"results/{ODD}\" --quiet"),
    # 70 half a download
    refused(70, "nothing at all", lambda patch: shutil.rmtree("two"), BROKEN, "two' does not exist", "is not a hub id"),
    refused(70, "an id that is not in the cache", nothing, BROKEN, "some-org/not-in-the-cache", "HF_HUB_OFFLINE",
            more="six=some-org/not-in-the-cache"),
    # 0 arguments and recipes
    refused(0, "method", nothing, RECIPE, "unknown method 'task_arithmatic'", r"did you mean 'task_arithmetic'\?",
            more="--method task_arithmatic"),
    refused(0, "family", nothing, RECIPE, "unknown model family 'brt'", r"did you mean 'bert'\?",
            more="--set family=brt"),
    refused(0, "vector", nothing, RECIPE, "'nine', which is no expert", more="--set 'vector=two + nine'"),
    refused(0, "a task to export", nothing, RECIPE, "is no task 'too'", r"did you mean 'two'\?",
            line=f"export merged --task too {TO}"),
    refused(0, "no output", m.write("recipe.yaml", b"experts: {two: two}\nbase: base"), RECIPE, r"no output folder",
            "give 'out' in the recipe, or --out", line="merge recipe.yaml"),
    sound(0, "a recipe from anywhere",
          m.write("my/recipe.yaml", b"experts: {two: ../two}\nbase: ../base\nparameters:\nout: ../results/out"),
          line="merge my/recipe.yaml --set scale=1"),
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
