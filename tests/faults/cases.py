"""The 70 fault cases, each with what becomes of it: refused, sound after all, or held by a test elsewhere (HELD).

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
ROWS: tuple[Refused | Sound, ...] = (
    # 1 empty file
    Refused(1, "empty", m.write("two/model.safetensors", b""), AGAIN, file=TWO, error=BROKEN),
    Refused(1, "empty manifest", m.write("merged/orthomerge.json", b""), AGAIN, file=r"orthomerge\.json", error=BROKEN,
            meets="align"),
    # 3 truncated data
    Refused(3, "cut short", m.cut("two/model.safetensors", 0.9), AGAIN, file=TWO, error=BROKEN),
    # 9 unknown dtype, sub-byte floats
    Refused(9, "bytes for floats", m.tensors(m.quantised), "converted to float", tensor=BARE),
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
    # 17 pickles that run, zip bombs, zips that lead out
    Refused(17, "evil zip", m.as_pickle, "do not open it with torch.load either", tensor="mkdir", file=BIN,
            error=BROKEN),
    Refused(17, "evil adapter", m.evil_adapter, "do not open it", file=r"adapter_model\.bin", error=BROKEN),
    Refused(17, "bomb of arrays", m.npz_bomb, "give a smaller file", file=r"two\.npz", error=BROKEN, meets="align"),
    # 18 an adapter instead of a model, and adapters that are none
    Refused(18, "other targets",
            m.factors(lambda t: [t.update({k.replace("query", "q_proj"): t.pop(k)}) for k in list(t)]),
            "the base that it was trained on|list it under", tensor="q_proj"),
    Refused(18, "wider", m.factors(lambda t: t.update({FACTOR + "A.weight": torch.ones(2, 48)})), "same base",
            tensor=BARE),
    Refused(18, "never trained", m.factors(lambda t: [v.zero_() for k, v in t.items() if "lora_B" in k]), INSIST),
    Sound(18, "as expert", m.as_adapter),
    # 19 quantised inputs
    Refused(19, "by names", m.tensors(m.packed_query), "ignore|missing: base", tensor=BARE),
    # 20 remote code
    Refused(20, "base", m.remote_model("base"), "name it as 'family'", tensor="odd.OddModel", file="base",
            error=BROKEN),
    Refused(20, "unknown model", m.remote_model("base", model_type="odd"), "family: generic", tensor="odd.OddModel",
            file="base", error=BROKEN),
    Sound(20, "asked for by name", m.remote_model("two"), more="--set family=bert"),
    # 22 read-only and network file systems
    Refused(22, "stale handle", m.reads_fail(errno.ESTALE), "Stale file handle.*(try|run).*again", file=TWO,
            error=BROKEN),
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
    Sound(27, "float16 expert", m.tensors(m.in_dtype(torch.float16))),
    Sound(27, "bfloat16 base", m.tensors(m.in_dtype(torch.bfloat16), "base")),
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
    # 30 NaN and infinity
    Refused(30, "expert", m.spoil("two", f"bert.{QUERY}", float("nan")), "sound checkpoint", tensor=BARE, file=TWO,
            error=NUMBERS),
    Refused(30, "base", m.spoil("base", QUERY, float("nan")), "sound checkpoint", tensor=BARE,
            file=r"base/model\.safetensors", error=NUMBERS),
    Refused(30, "head", m.spoil("two", "classifier.weight", float("nan")), "sound checkpoint",
            tensor=r"classifier\.weight", file=TWO, error=NUMBERS),
    Refused(30, "since the merge", m.spoil("two", "bert.embeddings.LayerNorm.bias", float("nan")),
            "give the path of the right one, or merge again", meets="align"),
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
    # 33 BatchNorm
    Refused(33, "statistics", m.batch_norm, "ignore: .*running_mean", tensor=r"bn\.running_mean", file="base"),
    Sound(33, "left out", m.batch_norm, more=STATISTICS),
    # 34 no task, one task, one name twice
    Refused(34, "none", lambda w: w.experts.clear(), "orthomerge merge topic", file="nothing to merge", error=RECIPE),
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
    Refused(38, "a family that keeps none", m.head(*m.EXPERTS, weight=None, bias=None), "or its layers",
            tensor="of this family hold no head", file="expert 'five'", more="--set family=generic"),
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
    # 41 two tasks with one head
    Sound(41, "one head", m.one_head),
    # 42 no rows
    Refused(42, "only a header", m.rows(), "no rows", file=TABLE, error=BROKEN, meets="align"),
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
    # 47 features: not finite, constant
    Refused(47, "not finite", m.merged_from(m.spoil("two", "bert.embeddings.LayerNorm.bias", 3e38)),
            "check its weights", error=NUMBERS, meets="align"),
    # 48 fewer inputs than features
    Sound(48, "ridge", nothing, meets="align", more="--limit 5"),
    Sound(48, "linear", nothing, meets="align", more="--limit 5 --aligner linear"),
    # 50 rows that are damaged, empty or long
    Refused(50, "a picture for a text model", m.other_data("two/cat/1.png", b"\x89PNG\r\n\x1a\nnonsense"), "modality",
            error=OTHER, meets="align"),
    Sound(50, "a long text", m.rows(f"{'film ' * 9000},two-0,train", "it was,two-1,train"), meets="align"),
    # 52 extreme and equal logits of the teacher
    Sound(52, "1e4", m.merged_from(m.tensors(lambda t: t["classifier.weight"].mul_(1e6))), meets="align",
            more="--aligner auto"),
    Sound(52, "all equal",
            m.merged_from(m.tensors(lambda t: [t[f"classifier.{p}"].zero_() for p in ("weight", "bias")])),
            meets="align", more="--aligner auto"),
    # 58 disk full
    Refused(58, "too little room", m.little_room, "make room, or write elsewhere",
            tensor="has 0.00 GB free, but the output needs 0.02 GB", file="results", error=OUTPUT),
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
    # 70 half a download
    Refused(70, "nothing at all", lambda w: shutil.rmtree(w.folder / "two"), "is not a hub id",
            file="two' does not exist", error=BROKEN),
    Refused(70, "an id that is not in the cache", nothing, "HF_HUB_OFFLINE", file="some-org/not-in-the-cache",
            error=BROKEN, more="six=some-org/not-in-the-cache"),
    # 0 arguments and recipes
    Refused(0, "method", nothing, r"did you mean 'task_arithmetic'\?", file="unknown method 'task_arithmatic'",
            error=RECIPE, more="--method task_arithmatic"),
    Refused(0, "family", nothing, r"did you mean 'bert'\?", file="unknown model family 'brt'", error=RECIPE,
            more="--set family=brt"),
    Refused(0, "vector", nothing, "", file="'nine', which is no expert", error=RECIPE,
            more="--set 'vector=two + nine'"),
    Refused(0, "a task to export", m.command("export {folder}/merged --task too --out {folder}/x"),
            r"did you mean 'two'\?", file="is no task 'too'", error=RECIPE),
    Refused(0, "no output", m.recipe("experts: {two: two}\nbase: base"), "give 'out' in the recipe, or --out",
            file=r"no output folder", error=RECIPE),
    Sound(0, "a recipe from anywhere",
            m.recipe("experts: {two: two}\nbase: ./base\nparameters:\nout: results/out", "--set scale=1")),
)

# Cases that a test elsewhere holds, also those whose title stands above.
HELD: dict[str, tuple[int, ...]] = {
    "tests/alignment/test_aligners_table.py::test_fewer_inputs_than_features_never_hurt": (48,),
    "tests/alignment/test_auto.py::test_an_expert_unchanged_by_the_merge_stays_as_it_is": (55,),  # no improvement
    "tests/alignment/test_closed_forms.py::test_every_kind_of_head_gets_a_planted_rotation": (38,),
    "tests/alignment/test_closed_forms.py::test_logit_procrustes_keeps_the_gram_matrix": (40,),
    "tests/alignment/test_unseen.py::test_features_that_are_all_zero_say_nothing": (47,),
    "tests/alignment/test_unseen.py::test_heads_keep_their_dtype": (57,),  # statistics in half precision
    "tests/alignment/test_unseen.py::test_inputs_that_are_all_the_same_move_the_mean_alone": (47,),
    "tests/api/test_merge.py::test_the_output_has_the_dtype_asked_for": (31,),
    "tests/api/test_merge.py::test_two_runs_write_the_same_bytes": (56,),  # threads and BLAS
    "tests/core/test_small.py::test_exhausted_memory_is_an_error_with_advice": (61,),  # out of memory
    "tests/data/test_images.py::test_arrays_that_are_refused": (17, 42),
    "tests/data/test_images.py::test_nothing_is_decoded_before_it_is_used": (50,),
    "tests/data/test_labels.py::test_permuted_by_name": (36,),
    "tests/data/test_reading.py::test_what_cannot_be_read": (50,),
    "tests/data/test_tables.py::test_bad_files": (50,),
    "tests/data/test_tables.py::test_bad_rows": (50,),
    "tests/data/test_task.py::test_refused": (46,),
    # the same inputs in calibration and test
    "tests/evaluation/test_evaluate.py::test_inputs_that_two_splits_share": (49,),
    # inputs that end early or change their number
    "tests/evaluation/test_statistics.py::test_a_classifier_that_loses_inputs": (51,),
    "tests/faults/test_cases.py::test_an_input_that_changes_meanwhile": (21,),  # file changed between plan and read
    "tests/faults/test_cases.py::test_standard_output_that_is_closed": (69,),  # standard output is closed
    "tests/faults/test_crash_points.py::test_every_call": (58, 59),  # kill -9
    "tests/faults/test_determinism.py::test_two_worlds": (56,),  # threads and BLAS
    "tests/faults/test_signals.py::test_a_disk_that_is_full_or_read_only_for_real": (58,),
    "tests/faults/test_signals.py::test_a_run_that_is_killed": (59, 60),  # kill -9; SIGINT
    "tests/faults/test_signals.py::test_a_signal_at_a_random_moment": (60,),  # SIGINT
    "tests/faults/test_signals.py::test_many_runs_into_one_output": (62,),  # two runs into one output
    "tests/faults/test_signals.py::test_memory_that_runs_out": (61,),  # out of memory
    "tests/files/test_hub.py::test_a_branch_that_moves_while_it_is_fetched": (70,),
    "tests/files/test_hub.py::test_offline_and_part_of_it_missing": (70,),
    "tests/files/test_lora.py::test_tensors_that_are_refused": (18,),
    "tests/files/test_opening.py::test_an_adapter_is_an_expert_but_no_base": (18,),
    # shards that are missing or disagree with their index, an index that leads out or is none, a wrong total_size
    "tests/files/test_opening.py::test_what_is_refused": (12, 13, 14, 15, 16, 70),
    "tests/files/test_pickles.py::test_cut_anywhere": (2,),  # truncated header
    "tests/files/test_pickles.py::test_files_that_are_no_weights": (17,),
    "tests/files/test_publish.py::test_targets_that_no_folder_can_be": (68,),
    # file changed between plan and read
    "tests/files/test_raw_file.py::test_a_file_cut_short_while_open_is_an_error_and_not_a_crash": (21,),
    "tests/files/test_safetensors.py::test_broken_beginnings": (5,),  # header longer than the file, or than 100 MB
    # trailing bytes; overlapping offsets, gaps; shape x dtype is not the number of bytes; duplicate keys
    "tests/files/test_safetensors.py::test_damaged_headers": (4, 6, 7, 8, 9),
    "tests/files/test_safetensors.py::test_odd_names_of_tensors": (23,),  # names of tensors
    "tests/merging/test_polar.py::test_other_solvers_take_over": (53,),  # SVD that does not converge
    "tests/merging/test_stream.py::test_every_block_once_and_in_order": (56,),  # threads and BLAS
    "tests/models/test_adapters.py::test_an_adapter_with_nan_is_refused": (18,),
    "tests/models/test_names.py::test_values_come_back_under_stock_names": (32,),
    "tests/models/test_processing.py::test_batches_lose_nothing": (51,),  # inputs that end early or change their number
    "tests/models/test_split.py::test_tied_weights_must_be_equal": (29,),  # tied weights
    "tests/models/test_split.py::test_tied_weights_of_an_expert": (29,),  # tied weights
    "tests/models/test_untrusted_folders.py::test_a_processor_with_code_is_neither_loaded_nor_copied": (20,),
    "tests/runs/test_recipe.py::test_files_that_are_no_recipes": (8, 15),  # duplicate keys; index that is no index
    "tests/runs/test_recipe.py::test_names_of_experts": (34,),
    "tests/runs/test_run.py::test_a_killed_run_goes_on": (63,),  # a worker dies
    "tests/tuning/test_finetune.py::test_a_loss_that_is_no_number_names_task_and_step": (54,),  # a loss that diverges
}
# fmt: on
