"""The 70 fault cases, each with what becomes of it: refused, sound after all, or held by a test elsewhere.

Numbers and titles are those of the list in issue 7 that every reading or writing tool should survive; 0 stands for
arguments and recipes. `test_cases.py` runs every row through the command line.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from typing import Literal

import torch
from tests.faults import corruptions as m
from tests.faults.corruptions import FACTOR, QUERY, Damage

from orthomerge.core.errors import (
    CheckpointError,
    IncompatibleError,
    NumericalError,
    OrthomergeError,
    OutputError,
    RecipeError,
)

Meets = Literal["merge", "plan", "align", "fit", "evaluate", "export", "verify"]
BROKEN, NUMBERS, OUTPUT, RECIPE = CheckpointError, NumericalError, OutputError, RecipeError
OTHER = OrthomergeError
AGAIN = "fetch .*again"


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
    meets: Meets = "merge"
    more: str = ""


@dataclass(frozen=True)
class Sound:
    """Something unusual that must work, and give an output that verifies."""

    number: int
    name: str
    damage: Damage
    meets: Meets = "merge"
    more: str = ""


@dataclass(frozen=True)
class Held:
    """A test elsewhere that holds the case, `tests/file.py::function`; `why` it is not here."""

    number: int
    test: str
    why: str = ""


def nothing(world: m.World) -> None:
    """The sound world itself; the words do the damage."""


TWO = r"two/model\.safetensors"
BIN = r"two/pytorch_model\.bin"
BARE = QUERY.replace(".", r"\.")
TABLE = r"data/two\.csv"
INSIST = "check_base: false"
STATISTICS = "--set \"ignore=['*.running_mean', '*.running_var', '*.num_batches_tracked']\""
IDS = torch.arange(40)[None]

# fmt: off
ROWS: tuple[Refused | Sound | Held, ...] = (
    # 1 empty file
    Refused(1, "empty", m.write("two/model.safetensors", b""), AGAIN, file=TWO, error=BROKEN),
    Refused(1, "empty manifest", m.write("merged/orthomerge.json", b""), AGAIN, file=r"orthomerge\.json", error=BROKEN,
            meets="align"),
    # 2 truncated header
    Held(2, "tests/files/test_pickles.py::test_cut_anywhere", "also of safetensors: ::test_broken_beginnings"),
    # 3 truncated data
    Refused(3, "cut short", m.cut("two/model.safetensors", 0.9), AGAIN, file=TWO, error=BROKEN),
    # 4 trailing bytes
    Held(4, "tests/files/test_safetensors.py::test_damaged_headers"),
    # 5 header longer than the file, or than 100 MB
    Held(5, "tests/files/test_safetensors.py::test_broken_beginnings", "lengths of every kind"),
    # 6 overlapping offsets, gaps
    Held(6, "tests/files/test_safetensors.py::test_damaged_headers"),
    # 7 shape x dtype is not the number of bytes
    Held(7, "tests/files/test_safetensors.py::test_damaged_headers", "fields of every kind"),
    # 8 duplicate keys
    Held(8, "tests/files/test_safetensors.py::test_damaged_headers"),
    Held(8, "tests/runs/test_recipe.py::test_files_that_are_no_recipes"),
    # 9 unknown dtype, sub-byte floats
    Refused(9, "bytes for floats", m.tensors(m.quantised), "converted to float", tensor=BARE),
    Held(9, "tests/files/test_safetensors.py::test_damaged_headers", "dtypes of every kind"),
    # 10 bit flip, with a checksum
    Refused(10, "verify", m.flip("merged/encoder.safetensors"), "merge again|fetch", file=r"encoder\.safetensors",
            error=OUTPUT, meets="verify"),
    Refused(10, "align", m.flip("merged/encoder.safetensors"), "merge again", file="the encoder in .*merged",
            error=BROKEN, meets="align"),
    Refused(10, "export", m.flip("merged/encoder.safetensors"), "merge again", file="the encoder in .*merged",
            error=BROKEN, meets="export"),
    Refused(10, "several", m.several_changes, "merge again|fetch",
            tensor=r"(?s)(?=.*README\.md is missing)(?=.*two/config\.json has 2)(?=.*encoder\.safetensors has changed)",
            file=r"(?s)two/extra\.txt was not.*|README", error=OUTPUT, meets="verify"),
    Refused(10, "a file is lost", m.lose("merged/five/config.json"), "merge again",
            file=r"five/config\.json is missing", error=BROKEN, meets="align"),
    # 11 right size, zero pages
    Refused(11, "half of the expert", m.blank("two/model.safetensors"), AGAIN,
            tensor="'[a-z0-9A-Z_.]+' in expert 'two'", file=TWO, error=BROKEN),
    Refused(11, "half of the base", m.blank("base/model.safetensors"), AGAIN, tensor="' in the base",
            file=r"base/model\.safetensors", error=BROKEN),
    # 12 index names a missing shard
    Held(12, "tests/files/test_opening.py::test_what_is_refused"),
    # 13 shards and index disagree
    Held(13, "tests/files/test_opening.py::test_what_is_refused"),
    # 14 an index that leads out of its folder
    Held(14, "tests/files/test_opening.py::test_what_is_refused", "names of every kind"),
    # 15 index that is no index
    Held(15, "tests/runs/test_recipe.py::test_files_that_are_no_recipes"),
    Held(15, "tests/files/test_opening.py::test_what_is_refused", "documents of every kind"),
    # 16 total_size is wrong
    Held(16, "tests/files/test_opening.py::test_what_is_refused"),
    # 17 pickles that run, zip bombs, zips that lead out
    Refused(17, "evil zip", m.as_pickle, "do not open it with torch.load either", tensor="mkdir", file=BIN,
            error=BROKEN),
    Refused(17, "evil adapter", m.evil_adapter, "do not open it", file=r"adapter_model\.bin", error=BROKEN),
    Refused(17, "bomb of arrays", m.npz_bomb, "give a smaller file", file=r"two\.npz", error=BROKEN, meets="align"),
    Held(17, "tests/files/test_pickles.py::test_files_that_are_no_weights", "archives that lead out"),
    Held(17, "tests/data/test_images.py::test_arrays_that_are_refused", "pickles in arrays"),
    # 18 an adapter instead of a model, and adapters that are none
    Refused(18, "other targets",
            m.factors(lambda t: [t.update({k.replace("query", "q_proj"): t.pop(k)}) for k in list(t)]),
            "the base that it was trained on|list it under", tensor="q_proj"),
    Refused(18, "wider", m.factors(lambda t: t.update({FACTOR + "A.weight": torch.ones(2, 48)})), "same base",
            tensor=BARE),
    Refused(18, "never trained", m.factors(lambda t: [v.zero_() for k, v in t.items() if "lora_B" in k]), INSIST),
    Sound(18, "as expert", m.as_adapter),
    Held(18, "tests/files/test_opening.py::test_an_adapter_is_an_expert_but_no_base"),
    Held(18, "tests/files/test_lora.py::test_tensors_that_are_refused"),
    Held(18, "tests/models/test_adapters.py::test_an_adapter_with_nan_is_refused"),
    # 19 quantised inputs
    Refused(19, "by names", m.tensors(m.packed_query), "ignore|missing: base", tensor=BARE),
    # 20 remote code
    Refused(20, "base", m.remote_model("base"), "name it as 'family'", tensor="odd.OddModel", file="base",
            error=BROKEN),
    Refused(20, "unknown model", m.remote_model("base", model_type="odd"), "family: generic", tensor="odd.OddModel",
            file="base", error=BROKEN),
    Held(20, "tests/models/test_untrusted_folders.py::test_a_processor_with_code_is_neither_loaded_nor_copied"),
    Sound(20, "asked for by name", m.remote_model("two"), more="--set family=bert"),
    # 21 file changed between plan and read
    Held(21, "tests/faults/test_cases.py::test_an_input_that_changes_meanwhile"),
    Held(21, "tests/files/test_raw_file.py::test_a_file_cut_short_while_open_is_an_error_and_not_a_crash"),
    # 22 read-only and network file systems
    Refused(22, "stale handle", m.reads_fail(errno.ESTALE), "Stale file handle.*(try|run).*again", file=TWO,
            error=BROKEN),
    # 23 names of tensors
    Held(23, "tests/files/test_safetensors.py::test_odd_names_of_tensors", "letters of every kind"),
    # 24 another architecture, depth or width
    Refused(24, "architecture", m.configured(model_type="distilbert"), "same base model", tensor="distilbert"),
    Refused(24, "depth", m.tensors(m.fewer_layers), "missing: base", tensor=r"encoder\.layer\.1\."),
    Refused(24, "width", m.tensors(m.wider), "same base model", tensor=r"output\.dense\.weight"),
    Refused(24, "more layers", m.tensors(m.more_layers), "ignore",
            tensor=r"'bert\.encoder\.layer\.2\..*is neither encoder nor head"),
    # 25 wrong base
    Refused(25, "a stranger", m.shuffled("base"), INSIST, tensor=r"cosine between their weights is -?0\.[01]",
            file="base"),
    Refused(25, "one common way", m.base_of_the_base, INSIST, tensor=r"cosine .* at least 0\.9", file="base"),
    Sound(25, "insisted on", m.shuffled("base"), more="--set check_base=false"),
    Refused(25, "of one expert", m.shuffled("three"), INSIST, tensor="cosine between their weights is",
            file="expert 'three'"),
    # 26 identical to the base, or to another expert
    Refused(26, "to the base", m.without_training, INSIST, tensor="is the base"),
    Refused(26, "to another", m.twin, INSIST, tensor="the same model", file="three"),
    Sound(26, "insisted on", m.without_training, more="--set check_base=false"),
    # 27 mixed dtypes
    Sound(27, "float16 expert", m.tensors(lambda t: t.update({k: v.half() for k, v in t.items()}))),
    Sound(27, "bfloat16 base", m.tensors(lambda t: t.update({k: v.bfloat16() for k, v in t.items()}), "base")),
    Refused(27, "integer buffers differ", m.position_ids(base=IDS, two=IDS + 1), "same base",
            tensor=r"embeddings\.position_ids", file=TWO),
    Sound(27, "bfloat16 expert", m.tensors(m.in_dtype(torch.bfloat16))),
    Sound(27, "integer buffers that agree", m.position_ids(base=IDS, two=IDS)),
    Sound(27, "a tensor without elements",
            m.tensors(lambda t: t.update({"embeddings.position_ids": torch.zeros(1, 0).long()}), "base")),
    # 28 vocabulary
    Refused(28, "more rows", m.tensors(m.more_words), "same base model", tensor="word_embeddings"),
    Refused(28, "other words", m.other_words, "tokenizer", file=r"two/vocab\.txt"),
    Refused(28, "tokenizer of a larger model",
            m.merged_from(m.rewrite("base/vocab.txt", lambda data: data + b"more\n" * 40)), "another model's",
            file="tokenizer of .*base", meets="evaluate"),
    # 29 tied weights
    Held(29, "tests/models/test_split.py::test_tied_weights_must_be_equal"),
    Held(29, "tests/models/test_split.py::test_tied_weights_of_an_expert"),
    # 30 NaN and infinity
    Refused(30, "expert", m.spoil("two", f"bert.{QUERY}", float("nan")), "sound checkpoint", tensor=BARE, file=TWO,
            error=NUMBERS),
    Refused(30, "base", m.spoil("base", QUERY, float("nan")), "sound checkpoint", tensor=BARE,
            file=r"base/model\.safetensors", error=NUMBERS),
    Refused(30, "head", m.spoil("two", "classifier.weight", float("nan")), "sound checkpoint",
            tensor=r"classifier\.weight", file=TWO, error=NUMBERS),
    Refused(30, "since the merge", m.spoil("two", "bert.embeddings.LayerNorm.bias", float("nan")),
            "say where the right one is, or merge again", meets="align"),
    Refused(30, "in a fit", m.spoil("two", f"bert.{QUERY}", float("nan")), "sound checkpoint|check|look at",
            error=NUMBERS, meets="fit"),
    Refused(30, "expert, in a survey", m.spoil("two", f"bert.{QUERY}", float("nan")), "sound checkpoint", tensor=BARE,
            file=TWO, error=NUMBERS, more="--method ties"),
    Refused(30, "copied from the base", m.without_poolers, "",
            tensor=r"'pooler\.dense\.weight' in the base .* holds NaN", file=r"base/model\.safetensors", error=NUMBERS,
            more="--set pooling=cls"),
    # 31 overflow of the sum in half precision
    Refused(31, "float16", m.overflowing, "smaller scale, or --dtype", tensor=BARE, file="F16", error=NUMBERS,
            more="--dtype float16"),
    Held(31, "tests/api/test_merge.py::test_the_output_has_the_dtype_asked_for",
            "sums are in float32 and cast once, so that bfloat16 loses no more than its rounding"),
    # 32 keys: missing, too many, under other names
    Refused(32, "missing", m.tensors(lambda t: t.pop(f"bert.{QUERY}")), "missing: base", tensor=BARE),
    Refused(32, "too many", m.tensors(lambda t: t.update(strange=torch.ones(2))), "ignore", tensor="'strange'"),
    Refused(32, "two encoders", m.tensors(lambda t: t.update({f"ema.{k}": v + 0 for k, v in t.items()})), "'prefix'",
            tensor="ema"),
    Refused(32, "nothing in common", m.tensors(m.numbered), "'prefix'", tensor="x0"),
    Sound(32, "another prefix", m.tensors(m.prefixed("module."))),
    Sound(32, "missing, and taken from the base", m.tensors(lambda t: t.pop(f"bert.{QUERY}")),
            more="--set missing=base"),
    Sound(32, "too many, and ignored", m.tensors(lambda t: t.update({"adapter.weight": torch.ones(2)})),
            more="--set ignore=[adapter.*]"),
    Held(32, "tests/models/test_names.py::test_values_come_back_under_stock_names",
            "fused qkv and transposed projections"),
    # 33 BatchNorm
    Refused(33, "statistics", m.batch_norm, "ignore: .*running_mean", tensor=r"bn\.running_mean", file="base"),
    Sound(33, "left out", m.batch_norm, more=STATISTICS),
    # 34 no task, one task, one name twice
    Refused(34, "none", lambda w: w.experts.clear(), "orthomerge merge topic", file="nothing to merge", error=RECIPE),
    Held(34, "tests/runs/test_recipe.py::test_names_of_experts"),
    Sound(34, "one", lambda w: w.experts.__delitem__(slice(1, None))),
    # 35 scales
    Refused(35, "NaN", nothing, "finite number", file="scale", error=RECIPE, more="--set scale=.nan"),
    Refused(35, "huge", nothing, r"at most 3\.4e", file="scale", error=RECIPE, more="--set scale=1e39"),
    Refused(35, "large", nothing, "smaller scale", tensor="'[a-zA-Z0-9_.]+'", file="F16|infinity", error=NUMBERS,
            more="--set scale=3e38 --dtype float16"),
    Sound(35, "as people write it", nothing, more="--set scale=3e-1"),
    # 36 order of labels
    Refused(36, "expert and merge", m.configured(id2label={"0": "two-1", "1": "two-0"}), "give the expert",
            meets="align"),
    Held(36, "tests/data/test_labels.py::test_permuted_by_name",
            "data in another order than the head is put into it, by name"),
    # 37 other labels
    Refused(37, "more", m.configured(id2label={"0": "a", "1": "b", "2": "c"}), "'labels'",
            tensor=r"classifier\.weight"),
    Refused(37, "a gap", m.configured(id2label={"0": "a", "5": "b"}), "'labels'"),
    Refused(37, "of other data", m.rows("a film,yes,train", "it was,no,train"), "`labels`", meets="align"),
    Refused(37, "since the merge", m.configured(id2label={"0": "a", "1": "b"}), "has other labels than the model",
            meets="align"),
    # 38 kinds of heads
    Sound(38, "without bias", m.head(bias=None)),
    Refused(38, "another bias", m.head(bias=torch.ones(7)), "name the head", tensor=r"classifier\.bias"),
    Refused(38, "no head", m.head(weight=None, bias=None), "name the head", tensor="classifier"),
    Refused(38, "integers", m.head(weight=torch.ones(2, 32).to(torch.int8)), "name the head", tensor=r"\(2, 32\) I8"),
    Refused(38, "wider", m.head(weight=torch.ones(2, 64)), "reads 64 features, but the encoder makes 32",
            tensor=r"classifier\.weight"),
    Refused(38, "a family that keeps none", m.without_heads, "or its layers", tensor="this family keeps no head",
            file="expert 'five'", more="--set family=generic"),
    Held(38, "tests/alignment/test_closed_forms.py::test_every_kind_of_head_gets_a_planted_rotation",
            "hidden layers and cosine heads"),
    # 39 one logit, many labels, regression
    Refused(39, "one logit",
            m.both(m.head(weight=torch.ones(1, 32), bias=torch.ones(1)), m.configured("two", id2label={"0": "yes"})),
            "leave this one out", tensor=r"classifier\.weight"),
    Refused(39, "many labels", m.configured(problem_type="multi_label_classification"), "leave this one out",
            tensor="multi_label"),
    Refused(39, "regression", m.configured(problem_type="regression"), "leave this one out", tensor="regression"),
    # 40 more classes than features, heads without full rank
    Sound(40, "two rows alike",
            m.merged_from(m.tensors(lambda t: t["classifier.weight"].copy_(t["classifier.weight"][:1].clone()))),
            meets="align"),
    Held(40, "tests/alignment/test_closed_forms.py::test_logit_procrustes_keeps_the_gram_matrix",
            "more classes than features"),
    # 41 two tasks with one head
    Sound(41, "one head", m.one_head),
    # 42 no rows
    Refused(42, "only a header", m.rows(), "no rows", file=TABLE, error=BROKEN, meets="align"),
    Held(42, "tests/data/test_images.py::test_arrays_that_are_refused"),
    # 43 one row
    Sound(43, "aligned on one", m.rows("a film", head="text"), meets="align"),
    # 44 all rows identical
    Sound(44, "aligned", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), meets="align"),
    Sound(44, "aligned by turns", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), meets="align",
            more="--aligner orthogonal"),
    # 45 a class is missing in few shots
    Refused(45, "no row of it", m.rows(*["a film,two-0,train"] * 9, "a film,two-0,test", "it was,two-1,test"),
            "train split has no examples", tensor="two-1", error=BROKEN, meets="evaluate",
            more="--shots 2 --protocol knn"),
    # 46 fewer than k of a class
    Refused(46, "two of five",
            m.rows(*["a film,two-0,train", "it was,two-1,train"] * 3, "a film,two-0,test", "it was,two-1,test"),
            "ask for at most 2", file="class 0 has 2 examples", error=RECIPE, meets="evaluate",
            more="--shots 50 --protocol knn"),
    Held(46, "tests/data/test_task.py::test_refused"),
    # 47 features: not finite, constant
    Refused(47, "not finite", m.merged_from(m.spoil("two", "bert.embeddings.LayerNorm.bias", 3e38)),
            "check its weights", error=NUMBERS, meets="align"),
    Held(47, "tests/alignment/test_unseen.py::test_features_that_are_all_zero_say_nothing"),
    Held(47, "tests/alignment/test_unseen.py::test_inputs_that_are_all_the_same_move_the_mean_alone"),
    # 48 fewer inputs than features
    Sound(48, "ridge", nothing, meets="align", more="--limit 5"),
    Sound(48, "linear", nothing, meets="align", more="--limit 5 --aligner linear"),
    Held(48, "tests/alignment/test_aligners_table.py::test_fewer_inputs_than_features_never_hurt"),
    # 49 the same inputs in calibration and test
    Held(49, "tests/evaluation/test_evaluate.py::test_inputs_that_two_splits_share", "a note with the count"),
    # 50 rows that are damaged, empty or long
    Held(50, "tests/data/test_tables.py::test_bad_files"),
    Held(50, "tests/data/test_tables.py::test_bad_rows"),
    Refused(50, "a picture for a text model", m.other_data("two/cat/1.png", b"\x89PNG\r\n\x1a\nnonsense"), "modality",
            error=OTHER, meets="align"),
    Sound(50, "a long text", m.rows(f"{'film ' * 9000},two-0,train", "it was,two-1,train"), meets="align"),
    Held(50, "tests/data/test_reading.py::test_what_cannot_be_read"),
    Held(50, "tests/data/test_images.py::test_nothing_is_decoded_before_it_is_used",
            "pictures are decoded when a vision model reads them"),
    # 51 inputs that end early or change their number
    Held(51, "tests/models/test_processing.py::test_batches_lose_nothing"),
    Held(51, "tests/evaluation/test_statistics.py::test_a_classifier_that_loses_inputs"),
    # 52 extreme and equal logits of the teacher
    Sound(52, "1e4", m.merged_from(m.tensors(lambda t: t["classifier.weight"].mul_(1e6))), meets="align",
            more="--aligner auto"),
    Sound(52, "all equal",
            m.merged_from(m.tensors(lambda t: [t[f"classifier.{p}"].zero_() for p in ("weight", "bias")])),
            meets="align", more="--aligner auto"),
    # 53 SVD that does not converge
    Held(53, "tests/merging/test_polar.py::test_other_solvers_take_over"),
    # 54 a loss that diverges
    Held(54, "tests/tuning/test_finetune.py::test_a_loss_that_is_no_number_names_task_and_step"),
    # 55 no improvement
    Held(55, "tests/alignment/test_auto.py::test_an_expert_unchanged_by_the_merge_stays_as_it_is"),
    # 56 threads and BLAS
    Held(56, "tests/faults/test_determinism.py::test_two_worlds"),
    Held(56, "tests/merging/test_stream.py::test_every_block_once_and_in_order"),
    Held(56, "tests/api/test_merge.py::test_two_runs_write_the_same_bytes"),
    # 57 statistics in half precision
    Held(57, "tests/alignment/test_unseen.py::test_heads_keep_their_dtype", "features are float32, solves float64"),
    # 58 disk full
    Refused(58, "too little room", m.little_room, "make room, or write elsewhere",
            tensor="has 0.00 GB free, but the output needs 0.02 GB", file="results", error=OUTPUT),
    Held(58, "tests/faults/test_crash_points.py::test_every_call", "at each write"),
    Held(58, "tests/faults/test_signals.py::test_a_disk_that_is_full_or_read_only_for_real"),
    # 59 kill -9
    Held(59, "tests/faults/test_crash_points.py::test_every_call", "at each step"),
    Held(59, "tests/faults/test_signals.py::test_a_run_that_is_killed"),
    # 60 SIGINT
    Held(60, "tests/faults/test_signals.py::test_a_signal_at_a_random_moment"),
    Held(60, "tests/faults/test_signals.py::test_a_run_that_is_killed"),
    # 61 out of memory
    Held(61, "tests/faults/test_signals.py::test_memory_that_runs_out"),
    Held(61, "tests/core/test_small.py::test_exhausted_memory_is_an_error_with_advice", "on a GPU"),
    # 62 two runs into one output
    Held(62, "tests/faults/test_signals.py::test_many_runs_into_one_output"),
    # 63 a worker dies
    Held(63, "tests/runs/test_run.py::test_a_killed_run_goes_on", "a run is one process; the next goes on from it"),
    # 64 clock jumps
    Sound(64, "times of all kinds", m.old_and_new_times),
    # 65 output inside an input
    Refused(65, "expert", nothing, "choose another place", error=OUTPUT, more="OUT=two/out --force"),
    Refused(65, "of the merge itself", nothing, "choose another place", file="merged", error=OUTPUT, meets="align",
            more="OUT=merged/to"),
    # 66 output is an input
    Refused(66, "expert", nothing, "choose another place", error=OUTPUT, more="OUT=two --force"),
    Refused(66, "export", nothing, "choose another place", file="merged", error=OUTPUT, meets="export",
            more="OUT=merged/two"),
    Refused(66, "an older output", nothing, "give --force to replace it", file="merged", error=OUTPUT,
            more="OUT=merged"),
    Refused(66, "the work of others", nothing, "was not written by orthomerge", file="data", error=OUTPUT,
            more="OUT=data --force"),
    # 67 permission denied on rename
    Refused(67, "rename", m.renames_fail(errno.EACCES), "Permission denied; nothing was left behind",
            file="results/out", error=OUTPUT),
    # 68 odd paths
    Sound(68, "spaces and more", m.spelled("ein ordner für 'alles' \U0001f600")),
    Held(68, "tests/files/test_publish.py::test_targets_that_no_folder_can_be"),
    # 69 standard output is closed
    Held(69, "tests/faults/test_cases.py::test_standard_output_that_is_closed"),
    # 70 half a download
    Refused(70, "nothing at all", lambda w: shutil.rmtree(w.folder / "two"), "is not a hub id",
            file="two' does not exist", error=BROKEN),
    Held(70, "tests/files/test_opening.py::test_what_is_refused", "a folder without weights"),
    Refused(70, "an id that is not in the cache", nothing, "HF_HUB_OFFLINE", file="some-org/not-in-the-cache",
            error=BROKEN, more="six=some-org/not-in-the-cache"),
    Held(70, "tests/files/test_hub.py::test_offline_and_part_of_it_missing"),
    Held(70, "tests/files/test_hub.py::test_a_branch_that_moves_while_it_is_fetched"),
    # 0 arguments and recipes
    Refused(0, "method", nothing, r"did you mean 'task_arithmetic'\?", file="unknown method 'task_arithmatic'",
            error=RECIPE, more="--method task_arithmatic"),
    Refused(0, "family", nothing, r"did you mean 'bert'\?", file="unknown model family 'brt'", error=RECIPE,
            more="--set family=brt"),
    Refused(0, "vector", nothing, "", file="'nine', which is no expert", error=RECIPE,
            more="--set 'vector=two + nine'"),
    Refused(0, "a task to export", m.command("export {folder}/merged --task too --out {folder}/x"),
            r"did you mean 'two'\?", file="is no task 'too'", error=RECIPE),
    Refused(0, "no output", m.recipe("experts: {two: two}\nbase: base"), "Give 'out' in the recipe, or --out",
            file=r"where to\?", error=RECIPE),
    Sound(0, "a recipe from anywhere",
            m.recipe("experts: {two: two}\nbase: ./base\nparameters:\nout: results/out", "--set scale=1")),
)
# fmt: on
