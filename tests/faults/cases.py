"""The 70 fault cases, each with what becomes of it: refused, sound after all, or held by a test elsewhere.

Numbers and titles are those of the list in issue 7 that every reading or writing tool should survive. `test_cases.py`
runs every row through the command line.
"""

from __future__ import annotations

import errno
import io
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from tests.faults import corruptions as m
from tests.faults.corruptions import FACTOR, INDEX, QUERY, SHARDS, Damage

from orthomerge.core.errors import (
    CheckpointError,
    IncompatibleError,
    NumericalError,
    OrthomergeError,
    OutputError,
    RecipeError,
)

Meets = Literal["merge", "plan", "align", "fit", "evaluate", "export", "verify", "inspect"]
BROKEN, UNFIT, NUMBERS, OUTPUT, RECIPE = CheckpointError, IncompatibleError, NumericalError, OutputError, RecipeError
OTHER = OrthomergeError
AGAIN = "fetch .*again"
DISTRUST = "do not trust this file"


@dataclass(frozen=True)
class Refused:
    """A command that must fail: with which error, and what its message must match (file, tensor, way out)."""

    name: str
    damage: Damage
    error: type[OrthomergeError]
    file: str
    way_out: str
    tensor: str = ""
    meets: Meets = "merge"
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sound:
    """Something unusual that must work, and give an output that verifies."""

    name: str
    damage: Damage
    meets: Meets = "merge"
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """A test elsewhere that holds the case, `tests/file.py::function`; `why` it is not here."""

    test: str
    why: str = ""


@dataclass(frozen=True)
class Case:
    number: int
    title: str
    rows: tuple[Refused | Sound | Held, ...] = field(default=())


def nothing(world: m.World) -> None:
    """The sound world itself; the words do the damage."""


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def left_over(world: m.World) -> None:
    """An index beside a whole file: one of both is of an earlier save."""
    data = world.weights("two").read_bytes()
    m.as_shards(world)
    world.weights("two").write_bytes(data)


def evil_adapter(world: m.World) -> None:
    """An adapter whose weights are a hostile pickle."""
    m.as_adapter(world).unlink()
    torch.save({"evil": m.Evil(world.evil)}, world.folder / "two" / "adapter_model.bin")


def head_of(world: m.World) -> m.Tensors:
    found = load_file(world.weights("two"))
    return {key: value for key, value in found.items() if key.startswith("classifier.")}


TWO = r"two/model\.safetensors"
BIN = r"two/pytorch_model\.bin"
KEY = rf"bert\.{QUERY}".replace(".", r"\.").replace("\\\\.", r"\.")
BARE = QUERY.replace(".", r"\.")
POOL = "bert.pooler.dense.bias"
ADAPTER = r"two/adapter_model\.safetensors"
OPTIONS = r"two/adapter_config\.json"
TABLE = r"data/two\.csv"
INSIST = "check_base: false"

FILES = (
    Case(
        1,
        "empty file",
        (
            Refused("empty", m.write("two/model.safetensors", b""), BROKEN, TWO, AGAIN),
            Refused("empty base", m.write("base/model.safetensors", b""), BROKEN, r"base/model\.safetensors", AGAIN),
            Refused("empty pickle", m.pickled(m.write("two/pytorch_model.bin", b"")), BROKEN, BIN, AGAIN),
            Refused("empty config", m.write("two/config.json", b""), BROKEN, r"two/config\.json", AGAIN),
            Refused("empty index", m.index_text(b""), BROKEN, INDEX, AGAIN),
            Refused("empty adapter", m.adapted(m.write("two/adapter_model.safetensors", b"")), BROKEN, ADAPTER, AGAIN),
            Refused("empty adapter config", m.adapted(m.write("two/adapter_config.json", b"")), BROKEN, OPTIONS, AGAIN),
            Refused(
                "empty manifest",
                m.write("merged/orthomerge.json", b""),
                BROKEN,
                r"orthomerge\.json",
                AGAIN,
                meets="align",
            ),
        ),
    ),
    Case(
        2,
        "truncated header",
        (
            Refused("half a header", m.cut("two/model.safetensors", 0.01), BROKEN, TWO, AGAIN),
            Refused("five bytes", m.write("two/model.safetensors", b"\x08\0\0\0\0"), BROKEN, TWO, AGAIN),
            Refused("half a zip", m.pickled(m.cut("two/pytorch_model.bin", 0.01)), BROKEN, BIN, AGAIN),
            Refused("half a stream", m.pickled(m.cut("two/pytorch_model.bin", 0.01), new=False), BROKEN, BIN, AGAIN),
            Refused("half an adapter", m.adapted(m.cut("two/adapter_model.safetensors", 0.1)), BROKEN, ADAPTER, AGAIN),
        ),
    ),
    Case(
        3,
        "truncated data",
        (
            Refused("cut short", m.cut("two/model.safetensors", 0.9), BROKEN, TWO, AGAIN),
            Refused("zip cut short", m.pickled(m.cut("two/pytorch_model.bin", 0.9)), BROKEN, BIN, AGAIN),
            Refused("stream cut short", m.pickled(m.cut("two/pytorch_model.bin", 0.9), new=False), BROKEN, BIN, AGAIN),
            Refused(
                "shard cut short",
                m.both(m.as_shards, m.cut(f"two/{SHARDS[1]}", 0.9)),
                BROKEN,
                SHARDS[1],
                AGAIN,
            ),
        ),
    ),
    Case(
        4,
        "trailing bytes",
        (
            Refused("trailing", m.append("two/model.safetensors", b"x"), BROKEN, TWO, AGAIN),
            Refused("trailing gigabyte", m.append("two/model.safetensors", bytes(1 << 20)), BROKEN, TWO, AGAIN),
        ),
    ),
    Case(
        5,
        "header longer than the file, or than 100 MB",
        (
            Refused(
                "longer than the file",
                m.write("two/model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
                BROKEN,
                TWO,
                AGAIN,
            ),
            Refused(
                "150 MB",
                m.grow("two/model.safetensors", 160 << 20, (150 << 20).to_bytes(8, "little") + b"{"),
                BROKEN,
                TWO,
                AGAIN,
            ),
            Refused("2^64 - 1", m.write("two/model.safetensors", b"\xff" * 8 + b"{}"), BROKEN, TWO, AGAIN),
        ),
    ),
    Case(
        6,
        "overlapping offsets, gaps",
        (
            Refused(
                "overlap",
                m.header(lambda h: h[f"bert.{QUERY}"].update(data_offsets=[0, 4096])),
                BROKEN,
                TWO,
                AGAIN,
                tensor="tensor '",
            ),
            Refused("gap", m.header(lambda h: h.pop(f"bert.{QUERY}")), BROKEN, TWO, AGAIN, tensor="tensor 'bert"),
        ),
    ),
    Case(
        7,
        "shape x dtype is not the number of bytes",
        (
            Refused("too few", m.entry(shape=[31, 32]), BROKEN, TWO, AGAIN, tensor=KEY),
            Refused("overflow", m.entry(shape=[1 << 40, 1 << 40]), BROKEN, TWO, AGAIN, tensor=KEY),
            Refused("negative", m.entry(shape=[-32, -32]), BROKEN, TWO, AGAIN, tensor=KEY),
            Refused("not whole", m.entry(shape=[32.0, 32]), BROKEN, TWO, AGAIN, tensor=KEY),
            Refused("true", m.entry(shape=[True, 1024]), BROKEN, TWO, AGAIN, tensor=KEY),
            Refused("backwards", m.entry(data_offsets=[4096, 0]), BROKEN, TWO, AGAIN, tensor=KEY),
            Refused("a field more", m.entry(evil=1), BROKEN, TWO, AGAIN, tensor=KEY),
        ),
    ),
    Case(
        8,
        "duplicate keys",
        (
            Refused("a tensor twice", m.named_twice, BROKEN, TWO, DISTRUST, tensor=KEY),
            Refused(
                "a config option twice",
                m.write("two/config.json", b'{"model_type": "bert", "model_type": "vit"}'),
                BROKEN,
                r"two/config\.json",
                DISTRUST,
                tensor="model_type",
            ),
            Refused(
                "a recipe option twice",
                m.write("recipe.yaml", b"base: a\nbase: b\n"),
                RECIPE,
                r"recipe\.yaml",
                "given twice",
                tensor="base",
                more=("RECIPE",),
            ),
        ),
    ),
    Case(
        9,
        "unknown dtype, sub-byte floats",
        (
            Refused("F4", m.entry(dtype="F4", data_offsets=[0, 512]), BROKEN, TWO, "converted to float", tensor=KEY),
            Refused("no dtype", m.entry(dtype=None), BROKEN, TWO, "converted to float", tensor=KEY),
            Refused(
                "complex",
                m.header(lambda h: h[f"bert.{QUERY}"].update(dtype="C64", shape=[32, 16])),
                UNFIT,
                "two",
                "converted to float|same base",
                tensor=BARE,
            ),
            Refused("bytes for floats", m.tensors(m.quantised), UNFIT, "two", "converted to float", tensor=BARE),
        ),
    ),
    Case(
        10,
        "bit flip, with a checksum",
        (
            Refused(
                "verify",
                m.flip("merged/encoder.safetensors"),
                OUTPUT,
                r"encoder\.safetensors",
                "merge again|fetch",
                meets="verify",
            ),
            Refused(
                "align",
                m.flip("merged/encoder.safetensors"),
                BROKEN,
                "the encoder in .*merged",
                "merge again",
                meets="align",
            ),
            Refused(
                "export",
                m.flip("merged/encoder.safetensors"),
                BROKEN,
                "the encoder in .*merged",
                "merge again",
                meets="export",
            ),
            Refused(
                "export head",
                m.flip("merged/two/head.safetensors"),
                BROKEN,
                r"two/head\.safetensors",
                "merge again",
                meets="export",
            ),
        ),
    ),
    Case(
        11,
        "right size, zero pages",
        (
            Refused(
                "half of the expert",
                m.blank("two/model.safetensors"),
                BROKEN,
                TWO,
                AGAIN,
                tensor="'[a-z0-9A-Z_.]+' in expert 'two'",
            ),
            Refused(
                "half of the base",
                m.blank("base/model.safetensors"),
                BROKEN,
                r"base/model\.safetensors",
                AGAIN,
                tensor="' in the base",
            ),
            Refused("all zeros", m.write("two/model.safetensors", bytes(100_000)), BROKEN, TWO, AGAIN),
            Refused("pickle of zeros", m.pickled(m.write("two/pytorch_model.bin", bytes(100_000))), BROKEN, BIN, AGAIN),
        ),
    ),
    Case(
        12, "index names a missing shard", (Refused("missing", m.shard_gone, BROKEN, INDEX, AGAIN, tensor=SHARDS[0]),)
    ),
    Case(
        13,
        "shards and index disagree",
        (
            Refused("shard holds more", m.shard_with_more, BROKEN, SHARDS[0], AGAIN, tensor="'strange'"),
            Refused(
                "index holds more",
                m.index(lambda d: d["weight_map"].update(strange=SHARDS[0])),
                BROKEN,
                INDEX,
                AGAIN,
                tensor="'strange'",
            ),
            Refused("a key in two shards", m.shards_share_a_key, BROKEN, SHARDS[1], AGAIN, tensor="'bert"),
            Refused("left-over file", left_over, BROKEN, "two", "remove it"),
        ),
    ),
    Case(
        14,
        "an index that leads out of its folder",
        (
            Refused("parent", m.points_to("../three/model.safetensors"), BROKEN, INDEX, DISTRUST, tensor="three"),
            Refused("absolute", m.points_to("/etc/passwd"), BROKEN, INDEX, DISTRUST, tensor="passwd"),
            Refused("backslash", m.points_to("..\\three\\model.safetensors"), BROKEN, INDEX, DISTRUST),
            Refused("nothing", m.points_to(""), BROKEN, INDEX, DISTRUST),
            Refused("null byte", m.points_to("a\0.safetensors"), BROKEN, INDEX, DISTRUST),
            Refused("folder", m.points_to("sub/model.safetensors"), BROKEN, INDEX, DISTRUST),
            Refused("pickle among safetensors", m.points_to("evil.bin"), BROKEN, INDEX, DISTRUST, tensor="evil"),
            Refused(
                "link",
                m.points_to(SHARDS[0], m._link("{folder}/three/model.safetensors")),
                BROKEN,
                SHARDS[0],
                "copy the file",
            ),
            Refused("device", m.points_to(SHARDS[0], m._link("/dev/zero")), BROKEN, SHARDS[0], "copy the file"),
            Refused("fifo", m.points_to(SHARDS[0], m._fifo), BROKEN, SHARDS[0], "plain files only"),
            Refused(
                "other letters",
                m.points_to(SHARDS[1].upper().replace("SAFETENSORS", "safetensors"), m._other_case),
                BROKEN,
                INDEX,
                DISTRUST,
            ),
        ),
    ),
    Case(
        15,
        "index that is no index",
        (
            Refused("not JSON", m.index_text(b"{"), BROKEN, INDEX, AGAIN),
            Refused("huge", m.huge_index, BROKEN, INDEX, AGAIN),
            Refused("deep", m.index_text(m.deep()), BROKEN, INDEX, AGAIN),
            Refused("numbers for names", m.index(lambda d: d.update(weight_map={"a": 3})), BROKEN, INDEX, AGAIN),
            Refused("a list", m.index_text(b"[]"), BROKEN, INDEX, AGAIN),
            Refused("deep config", m.write("two/config.json", m.deep()), BROKEN, r"two/config\.json", AGAIN),
            Refused(
                "deep header",
                m.write("two/model.safetensors", (600_001).to_bytes(8, "little") + m.deep()),
                BROKEN,
                TWO,
                AGAIN,
            ),
            Refused(
                "a number without end",
                m.write("two/config.json", b'{"vocab_size": ' + b"9" * 9999 + b"}"),
                BROKEN,
                r"two/config\.json",
                AGAIN,
            ),
            Refused(
                "deep recipe",
                m.write("recipe.yaml", b"a: " + b"[" * 5000),
                RECIPE,
                r"recipe\.yaml",
                "lists and mappings",
                more=("RECIPE",),
            ),
            Refused(
                "aliases in a recipe",
                m.write("recipe.yaml", b"a: &a [x]\nb: [*a, *a]\n"),
                RECIPE,
                r"recipe\.yaml",
                "write the value out",
                more=("RECIPE",),
            ),
            Refused(
                "a huge recipe",
                m.grow("recipe.yaml", 2 << 20, b"a: "),
                RECIPE,
                r"recipe\.yaml",
                "not a recipe",
                more=("RECIPE",),
            ),
            Refused(
                "code in a recipe",
                m.write("recipe.yaml", b"a: !!python/object/apply:os.mkdir [evil]\n"),
                RECIPE,
                r"recipe\.yaml",
                "plain words",
                more=("RECIPE",),
            ),
        ),
    ),
    Case(
        16,
        "total_size is wrong",
        (
            Refused(
                "one more",
                m.index(lambda d: d["metadata"].update(total_size=d["metadata"]["total_size"] + 1)),
                BROKEN,
                INDEX,
                "of another save",
            ),
        ),
    ),
    Case(
        17,
        "pickles that run, zip bombs, zips that lead out",
        (
            Refused("evil zip", m.evil_pickle(), BROKEN, BIN, "do not open it with torch.load either", tensor="mkdir"),
            Refused(
                "evil stream",
                m.evil_pickle(new=False),
                BROKEN,
                BIN,
                "do not open it with torch.load either",
                tensor="mkdir",
            ),
            Refused("evil pickle", m.evil_pickle(bare=True), BROKEN, BIN, "do not open it with torch.load either"),
            Refused("evil adapter", evil_adapter, BROKEN, r"adapter_model\.bin", "do not open it"),
            Refused("packed", m.repacked(method=8), BROKEN, BIN, "torch.save"),
            Refused("bomb", m.zip_bomb, BROKEN, BIN, "torch.save", tensor="archive/data/99"),
            Refused("leads out", m.repacked(lambda name: "../" + name), BROKEN, BIN, "do not trust it"),
            Refused("bomb of arrays", m.npz_bomb, BROKEN, r"two\.npz", "give a smaller file", meets="align"),
            Refused(
                "pickles in arrays",
                m.other_data("two.npz", _npz(x_train=np.array([{}], dtype=object), y_train=np.zeros(1, int))),
                BROKEN,
                r"two\.npz",
                "pickles",
                meets="align",
            ),
        ),
    ),
    Case(
        18,
        "an adapter instead of a model, and adapters that are none",
        (
            Refused("as base", m.adapted(), BROKEN, "two", "must be the full model", more=("BASE=two",)),
            Refused("rank 0", m.adapted(r=0), BROKEN, OPTIONS, AGAIN, tensor="r must be a positive"),
            Refused("another rank", m.adapted(r=4), BROKEN, ADAPTER, "correct r", tensor="lora_A"),
            Refused(
                "other targets",
                m.factors(lambda t: [t.update({k.replace("query", "q_proj"): t.pop(k)}) for k in list(t)]),
                UNFIT,
                "two",
                "the base that it was trained on|list it under",
                tensor="q_proj",
            ),
            Refused(
                "half a pair", m.factors(lambda t: t.pop(FACTOR + "B.weight")), BROKEN, ADAPTER, AGAIN, tensor="lora_A"
            ),
            Refused(
                "wider",
                m.factors(lambda t: t.update({FACTOR + "A.weight": torch.ones(2, 48)})),
                UNFIT,
                "two",
                "same base",
                tensor=BARE,
            ),
            Refused(
                "other ranks",
                m.factors(lambda t: t.update({FACTOR + "B.weight": torch.ones(32, 3)})),
                BROKEN,
                ADAPTER,
                "save the adapter again",
                tensor="lora_B",
            ),
            Refused(
                "NaN",
                m.factors(lambda t: t[FACTOR + "B.weight"].fill_(float("nan"))),
                NUMBERS,
                "two",
                "sound checkpoint",
                tensor=BARE,
            ),
            Refused(
                "never trained",
                m.factors(lambda t: [v.zero_() for k, v in t.items() if "lora_B" in k]),
                UNFIT,
                "two",
                INSIST,
            ),
            Refused("DoRA", m.adapted(use_dora=True), BROKEN, OPTIONS, "merge_and_unload", tensor="use_dora"),
            Refused("another kind", m.adapted(peft_type="IA3"), BROKEN, OPTIONS, "merge_and_unload", tensor="IA3"),
            Refused(
                "alpha without end",
                m.adapted(m.write("two/adapter_config.json", b'{"peft_type": "LORA", "lora_alpha": 1e999}')),
                BROKEN,
                OPTIONS,
                AGAIN,
            ),
            Refused(
                "a pattern that takes for ever",
                m.adapted(rank_pattern={"(a+)+x": 2}),
                BROKEN,
                OPTIONS,
                "merge_and_unload",
                tensor="rank_pattern",
            ),
            Refused(
                "another one",
                m.adapted(rank_pattern={".*.*.*.*.*.*.*x": 2}),
                BROKEN,
                OPTIONS,
                "merge_and_unload",
                tensor="rank_pattern",
            ),
            Sound("as expert", m.adapted()),
            Sound("with patterns", m.adapted(rank_pattern={"layer.*.query": 2, r"^bert\.encoder\..*": 2})),
        ),
    ),
    Case(
        19,
        "quantised inputs",
        (
            Refused(
                "by config",
                m.configured(quantization_config={"quant_method": "gptq"}),
                BROKEN,
                "two",
                "original float weights",
                tensor="gptq",
            ),
            Refused("by dtype", m.tensors(m.quantised), UNFIT, "two", "converted to float", tensor=BARE),
            Refused(
                "by names",
                m.tensors(
                    lambda t: t.update(
                        {"bert.encoder.layer.0.attention.self.query.qweight": t.pop(f"bert.{QUERY}").to(torch.int32)}
                    )
                ),
                UNFIT,
                "two",
                "ignore|missing: base",
                tensor=BARE,
            ),
        ),
    ),
    Case(
        20,
        "remote code",
        (
            Refused("expert", m.remote_model("two"), BROKEN, "two", "name it as 'family'", tensor="odd.OddModel"),
            Refused("base", m.remote_model("base"), BROKEN, "base", "name it as 'family'", tensor="odd.OddModel"),
            Refused(
                "unknown model",
                m.remote_model("base", model_type="odd"),
                BROKEN,
                "base",
                "family: generic",
                tensor="odd.OddModel",
            ),
            Refused(
                "tokenizer",
                m.remote_tokenizer,
                BROKEN,
                "encoder|tokenizer_config",
                "take 'auto_map' out of the file",
                meets="fit",
            ),
            Sound("asked for by name", m.remote_model("two"), more=("--set", "family=bert")),
        ),
    ),
    Case(
        21,
        "file changed between plan and read",
        (
            Held("tests/faults/test_bad_inputs.py::test_an_input_that_changes_meanwhile"),
            Held("tests/files/test_paths.py::test_a_file_cut_short_while_open_is_an_error_and_not_a_crash"),
        ),
    ),
    Case(
        22,
        "read-only and network file systems",
        (
            Refused("stale handle", m.reads_fail(errno.ESTALE), BROKEN, TWO, "Stale file handle.*(try|run).*again"),
            Refused("read error", m.reads_fail(errno.EIO), BROKEN, TWO, "Input/output error.*(try|run).*again"),
            Refused("read-only", m.makes_fail(errno.EROFS), OUTPUT, "results", "Read-only file system"),
        ),
    ),
    Case(
        23,
        "names of tensors",
        (
            Refused("not UTF-8", m.not_utf8, BROKEN, TWO, AGAIN),
            Refused("null byte", m.renamed("a\0b"), BROKEN, TWO, DISTRUST, tensor=r"a\\x00b"),
            Refused("leads out", m.renamed("../../a"), BROKEN, TWO, DISTRUST, tensor=r"\.\./\.\./a"),
            Refused("long", m.renamed("a" * 100_000), BROKEN, TWO, DISTRUST, tensor="aaaa"),
            Refused("none", m.renamed(""), BROKEN, TWO, DISTRUST),
            Refused("line break", m.renamed("a\nb"), BROKEN, TWO, DISTRUST),
            Refused("half a surrogate pair", m.text("query", "qu\\ud800ry"), BROKEN, TWO, DISTRUST),
        ),
    ),
)

MODELS = (
    Case(
        24,
        "another architecture, depth or width",
        (
            Refused(
                "architecture",
                m.configured(model_type="distilbert"),
                UNFIT,
                "two",
                "same base model",
                tensor="distilbert",
            ),
            Refused("depth", m.tensors(m.fewer_layers), UNFIT, "two", "missing: base", tensor=r"encoder\.layer\.1\."),
            Refused("width", m.tensors(m.wider), UNFIT, "two", "same base model", tensor=r"output\.dense\.weight"),
            Refused(
                "positions", m.tensors(m.more_positions), UNFIT, "two", "same base model", tensor="position_embeddings"
            ),
        ),
    ),
    Case(
        25,
        "wrong base",
        (
            Refused(
                "a stranger", m.other_base, UNFIT, "base", INSIST, tensor=r"cosine between their weights is -?0\.[01]"
            ),
            Refused("one common way", m.base_of_the_base, UNFIT, "base", INSIST, tensor=r"cosine .* at least 0\.9"),
            Refused("in a fit", m.other_base, UNFIT, "base", INSIST, tensor="cosine", meets="fit"),
            Sound("insisted on", m.other_base, more=("--set", "check_base=false")),
        ),
    ),
    Case(
        26,
        "identical to the base, or to another expert",
        (
            Refused("to the base", m.without_training, UNFIT, "two", INSIST, tensor="is the base"),
            Refused("to another", m.twin, UNFIT, "three", INSIST, tensor="the same model"),
            Sound("insisted on", m.without_training, more=("--set", "check_base=false")),
        ),
    ),
    Case(
        27,
        "mixed dtypes",
        (
            Sound("float16 expert", m.tensors(lambda t: t.update({k: v.half() for k, v in t.items()}))),
            Sound("bfloat16 base", m.tensors(lambda t: t.update({k: v.bfloat16() for k, v in t.items()}), "base")),
            Refused(
                "integer buffers differ",
                m.both(
                    m.tensors(lambda t: t.update({"embeddings.position_ids": torch.arange(40)[None]}), "base"),
                    m.tensors(lambda t: t.update({"bert.embeddings.position_ids": torch.arange(40)[None] + 1})),
                ),
                UNFIT,
                TWO,
                "same base",
                tensor=r"embeddings\.position_ids",
            ),
        ),
    ),
    Case(
        28,
        "vocabulary",
        (
            Refused("more rows", m.tensors(m.more_words), UNFIT, "two", "same base model", tensor="word_embeddings"),
            Refused("other words", m.other_words, UNFIT, r"two/vocab\.txt", "tokenizer"),
            Refused(
                "tokenizer of a larger model",
                m.merged_from(m.append("base/vocab.txt", b"more\n" * 40)),
                UNFIT,
                "tokenizer of .*base",
                "another model's",
                meets="evaluate",
            ),
        ),
    ),
    Case(
        29,
        "tied weights",
        (
            Held("tests/models/test_end_to_end.py::test_tied_weights_must_be_equal"),
            Held("tests/models/test_split.py::test_tied_weights_of_an_expert"),
        ),
    ),
    Case(
        30,
        "NaN and infinity",
        (
            Refused(
                "expert", m.spoil("two", f"bert.{QUERY}", float("nan")), NUMBERS, TWO, "sound checkpoint", tensor=BARE
            ),
            Refused(
                "infinity", m.spoil("two", f"bert.{QUERY}", float("inf")), NUMBERS, TWO, "sound checkpoint", tensor=BARE
            ),
            Refused(
                "base",
                m.spoil("base", QUERY, float("nan")),
                NUMBERS,
                r"base/model\.safetensors",
                "sound checkpoint",
                tensor=BARE,
            ),
            Refused(
                "head",
                m.spoil("two", "classifier.weight", float("nan")),
                NUMBERS,
                TWO,
                "sound checkpoint",
                tensor=r"classifier\.weight",
            ),
            Refused(
                "since the merge",
                m.spoil("two", "bert.embeddings.LayerNorm.bias", float("nan")),
                UNFIT,
                "two",
                "say where the right one is, or merge again",
                meets="align",
            ),
            Refused(
                "in a fit",
                m.spoil("two", f"bert.{QUERY}", float("nan")),
                NUMBERS,
                "two",
                "sound checkpoint|check|look at",
                meets="fit",
            ),
            Held("tests/faults/test_bad_inputs.py::test_nan_in_a_tensor_that_is_only_copied"),
        ),
    ),
    Case(
        31,
        "overflow of the sum in half precision",
        (
            Refused(
                "float16",
                m.overflowing,
                NUMBERS,
                "F16",
                "smaller scale, or --dtype",
                tensor=BARE,
                more=("--dtype", "float16"),
            ),
            Held(
                "tests/api/test_merge.py::test_the_output_has_the_dtype_asked_for",
                "sums are in float32 and cast once, so that bfloat16 loses no more than its rounding",
            ),
        ),
    ),
    Case(
        32,
        "keys: missing, too many, under other names",
        (
            Refused("missing", m.tensors(lambda t: t.pop(f"bert.{QUERY}")), UNFIT, "two", "missing: base", tensor=BARE),
            Refused(
                "too many",
                m.tensors(lambda t: t.update(strange=torch.ones(2))),
                UNFIT,
                "two",
                "ignore",
                tensor="'strange'",
            ),
            Refused(
                "two encoders",
                m.tensors(lambda t: t.update({f"ema.{k}": v + 0 for k, v in t.items()})),
                UNFIT,
                "two",
                "'prefix'",
                tensor="ema",
            ),
            Refused("nothing in common", m.tensors(m.numbered), UNFIT, "two", "'prefix'", tensor="x0"),
            Sound("another prefix", m.tensors(m.prefixed("module."))),
            Held(
                "tests/models/test_open_clip.py::test_values_come_back_under_stock_names",
                "fused qkv and transposed projections",
            ),
        ),
    ),
    Case(
        33,
        "BatchNorm",
        (
            Refused("statistics", m.batch_norm, UNFIT, "base", "ignore: .*running_mean", tensor=r"bn\.running_mean"),
            Sound(
                "left out",
                m.batch_norm,
                more=("--set", "ignore=['*.running_mean', '*.running_var', '*.num_batches_tracked']"),
            ),
        ),
    ),
    Case(
        34,
        "no task, one task, one name twice",
        (
            Refused("none", lambda w: w.experts.clear(), RECIPE, "nothing to merge", "--expert NAME=PATH"),
            Refused("twice", lambda w: w.experts.append("two"), RECIPE, "two", "same name"),
            Refused(
                "in other letters", nothing, RECIPE, "differ in case", "differ in case", more=("--expert", "TWO=x")
            ),
            Refused("a name that leads out", nothing, RECIPE, r"\.\./x", "use letters", more=("--expert", "../x=y")),
            Sound("one", lambda w: w.experts.__delitem__(slice(1, None))),
        ),
    ),
    Case(
        35,
        "scales",
        (
            Refused("NaN", nothing, RECIPE, "scale", "finite number", more=("--set", "scale=.nan")),
            Refused("infinite", nothing, RECIPE, "scale", "finite number", more=("--set", "scale=.inf")),
            Refused("huge", nothing, RECIPE, "scale", r"at most 3\.4e", more=("--set", "scale=1e39")),
            Refused(
                "large",
                nothing,
                NUMBERS,
                "F16|infinity",
                "smaller scale",
                tensor="'[a-zA-Z0-9_.]+'",
                more=("--set", "scale=3e38", "--dtype", "float16"),
            ),
            Refused("a word", nothing, RECIPE, "scale", "must be number", more=("--set", "scale=much")),
            Sound("negative", nothing, more=("--set", "scale=-1")),
        ),
    ),
)

HEADS = (
    Case(
        36,
        "order of labels",
        (
            Refused(
                "expert and merge",
                m.configured(id2label={"0": "two-1", "1": "two-0"}),
                UNFIT,
                "two",
                "give the expert",
                meets="align",
            ),
            Held(
                "tests/evaluation/test_evaluate.py::test_labels_in_another_order",
                "data in another order than the head is put into it, by name",
            ),
        ),
    ),
    Case(
        37,
        "other labels",
        (
            Refused(
                "more",
                m.configured(id2label={"0": "a", "1": "b", "2": "c"}),
                UNFIT,
                "two",
                "'labels'",
                tensor=r"classifier\.weight",
            ),
            Refused("a gap", m.configured(id2label={"0": "a", "5": "b"}), UNFIT, "two", "'labels'"),
            Refused("the same", m.configured(id2label={"0": "a", "1": "a"}), UNFIT, "two", "'labels'"),
            Refused(
                "of other data", m.rows("a film,yes,train", "it was,no,train"), UNFIT, "two", "`labels`", meets="align"
            ),
            Refused(
                "of other data, evaluated",
                m.rows("a,yes,train", "it,no,train", "it,no,test"),
                UNFIT,
                "two",
                "`labels`",
                meets="evaluate",
            ),
        ),
    ),
    Case(
        38,
        "kinds of heads",
        (
            Sound("without bias", m.head(bias=None)),
            Refused(
                "another bias", m.head(bias=torch.ones(7)), UNFIT, "two", "name the head", tensor=r"classifier\.bias"
            ),
            Refused("no head", m.head(weight=None, bias=None), UNFIT, "two", "name the head", tensor="classifier"),
            Refused(
                "three axes",
                m.head(weight=torch.ones(2, 32, 1)),
                UNFIT,
                "two",
                "name the head",
                tensor=r"classifier\.weight",
            ),
            Held(
                "tests/alignment/test_closed_forms.py::test_every_kind_of_head_gets_a_planted_rotation",
                "hidden layers and cosine heads",
            ),
        ),
    ),
    Case(
        39,
        "one logit, many labels, regression",
        (
            Refused(
                "one logit",
                m.both(
                    m.head(weight=torch.ones(1, 32), bias=torch.ones(1)), m.configured("two", id2label={"0": "yes"})
                ),
                UNFIT,
                "two",
                "leave this one out",
                tensor=r"classifier\.weight",
            ),
            Refused(
                "many labels",
                m.configured(problem_type="multi_label_classification"),
                UNFIT,
                "two",
                "leave this one out",
                tensor="multi_label",
            ),
            Refused(
                "regression",
                m.configured(problem_type="regression"),
                UNFIT,
                "two",
                "leave this one out",
                tensor="regression",
            ),
        ),
    ),
    Case(
        40,
        "more classes than features, heads without full rank",
        (
            Sound(
                "two rows alike",
                m.merged_from(m.tensors(lambda t: t["classifier.weight"].copy_(t["classifier.weight"][:1].clone()))),
                meets="align",
            ),
            Held(
                "tests/alignment/test_closed_forms.py::test_logit_procrustes_keeps_the_gram_matrix",
                "more classes than features",
            ),
        ),
    ),
    Case(
        41,
        "two tasks with one head",
        (
            Sound(
                "one head",
                m.both(
                    lambda w: w.change("three", lambda t: t.update(head_of(w))),
                    m.configured("three", id2label={"0": "two-0", "1": "two-1"}),
                ),
            ),
        ),
    ),
)

DATA = (
    Case(
        42,
        "no rows",
        (
            Refused("only a header", m.rows(), BROKEN, TABLE, "no rows", meets="align"),
            Refused("nothing at all", m.raw_rows(b""), BROKEN, TABLE, "no rows", meets="align"),
            Refused(
                "no images",
                m.other_data("two.npz", _npz(x_train=np.zeros((0, 8, 8), np.uint8), y_train=np.zeros(0, int))),
                BROKEN,
                r"two\.npz",
                "empty",
                meets="align",
            ),
            Refused("no lines", m.other_data("two.jsonl", b"\n\n"), BROKEN, r"two\.jsonl", "no rows", meets="align"),
            Refused("no files", m.other_data("two.parquet", b""), BROKEN, r"two\.parquet", AGAIN, meets="align"),
            Refused("to fit", m.rows(), BROKEN, TABLE, "no rows", meets="fit"),
        ),
    ),
    Case(43, "one row", (Sound("aligned on one", m.rows("a film", head="text"), meets="align"),)),
    Case(
        44,
        "all rows identical",
        (
            Sound("aligned", m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20), meets="align"),
            Sound(
                "aligned by turns",
                m.rows(*["a film,two-0,train", "a film,two-1,train"] * 20),
                meets="align",
                more=("--aligner", "orthogonal"),
            ),
        ),
    ),
    Case(
        45,
        "a class is missing in few shots",
        (
            Refused(
                "no row of it",
                m.rows(*["a film,two-0,train"] * 9, "a film,two-0,test", "it was,two-1,test"),
                BROKEN,
                "two",
                "train split has no examples",
                tensor="two-1",
                meets="evaluate",
                more=("--shots", "2", "--protocol", "knn"),
            ),
        ),
    ),
    Case(
        46,
        "fewer than k of a class",
        (
            Refused(
                "two of five",
                m.rows(*["a film,two-0,train", "it was,two-1,train"] * 3, "a film,two-0,test", "it was,two-1,test"),
                RECIPE,
                "class 0 has 2 examples",
                "ask for at most 2",
                meets="evaluate",
                more=("--shots", "50", "--protocol", "knn"),
            ),
            Held("tests/data/test_sampling.py::test_too_few_examples"),
        ),
    ),
    Case(
        47,
        "features: not finite, constant",
        (
            Refused(
                "not finite",
                m.merged_from(m.spoil("two", "bert.embeddings.LayerNorm.bias", 3e38)),
                NUMBERS,
                "two",
                "check its weights",
                meets="align",
            ),
            Held("tests/alignment/test_unseen.py::test_features_that_are_all_zero_say_nothing"),
            Held("tests/alignment/test_unseen.py::test_inputs_that_are_all_the_same_move_the_mean_alone"),
        ),
    ),
    Case(
        48,
        "fewer inputs than features",
        (
            Sound("ridge", nothing, meets="align", more=("--limit", "5")),
            Sound("linear", nothing, meets="align", more=("--limit", "5", "--aligner", "linear")),
            Held("tests/alignment/test_aligners_table.py::test_fewer_inputs_than_features_never_hurt"),
        ),
    ),
    Case(
        49,
        "the same inputs in calibration and test",
        (
            Held(
                "tests/evaluation/test_notes.py::test_inputs_that_two_splits_share", "a note of the run, with the count"
            ),
        ),
    ),
    Case(
        50,
        "rows that are damaged, empty or long",
        (
            Refused(
                "not UTF-8",
                m.raw_rows(b"text,label,split\n\xff\xfe,two-0,train\n"),
                BROKEN,
                f"{TABLE} line 2",
                "convert the file",
                meets="align",
            ),
            Refused(
                "null byte",
                m.raw_rows(b'text,label,split\na\0b,two-0,train\n"a,two-1,train\n'),
                BROKEN,
                f"{TABLE} line 3",
                "correct the line",
                meets="align",
            ),
            Refused(
                "empty",
                m.rows("   ,two-0,train", "a,two-1,train"),
                BROKEN,
                f"{TABLE}.* line 2",
                "keep_empty",
                meets="align",
            ),
            Refused(
                "a column more", m.rows("a,two-0,train,x"), BROKEN, f"{TABLE}.* line 2", "correct them", meets="align"
            ),
            Refused(
                "an unknown split",
                m.rows("a,two-0,trian"),
                BROKEN,
                f"{TABLE}.* line 2",
                "train, val or test",
                meets="align",
            ),
            Refused(
                "not JSON",
                m.other_data("two.jsonl", b'{"text": "a", "label": 0}\n{"text"\n'),
                BROKEN,
                r"two\.jsonl.* line 2",
                AGAIN,
                meets="align",
            ),
            Refused(
                "deep JSON",
                m.other_data("two.jsonl", m.deep() + b"\n"),
                BROKEN,
                r"two\.jsonl.* line 1",
                AGAIN,
                meets="align",
            ),
            Refused(
                "no parquet",
                m.other_data("two.parquet", b"PAR1" + bytes(100) + b"PAR1"),
                BROKEN,
                r"two\.parquet",
                AGAIN,
                meets="align",
            ),
            Refused(
                "no gzip", m.other_data("two.csv.gz", b"text,label\n"), BROKEN, r"two\.csv\.gz", AGAIN, meets="align"
            ),
            Refused(
                "a picture for a text model",
                m.other_data("two/cat/1.png", b"\x89PNG\r\n\x1a\nnonsense"),
                OTHER,
                "two",
                "labels",
                meets="align",
            ),
            Sound("a long text", m.rows(f"{'film ' * 9000},two-0,train", "it was,two-1,train"), meets="align"),
            Held(
                "tests/data/test_folders.py::test_what_is_no_picture",
                "pictures are decoded when a vision model reads them",
            ),
        ),
    ),
    Case(
        51,
        "inputs that end early or change their number",
        (
            Held("tests/models/test_processing.py::test_what_is_wrong_with_batches"),
            Held("tests/evaluation/test_metrics.py::test_a_classifier_that_loses_inputs"),
        ),
    ),
    Case(
        52,
        "extreme and equal logits of the teacher",
        (
            Sound(
                "1e4",
                m.merged_from(m.tensors(lambda t: t["classifier.weight"].mul_(1e6))),
                meets="align",
                more=("--aligner", "auto"),
            ),
            Sound(
                "all equal",
                m.merged_from(m.tensors(lambda t: [t[f"classifier.{p}"].zero_() for p in ("weight", "bias")])),
                meets="align",
                more=("--aligner", "auto"),
            ),
        ),
    ),
)

NUMERICS = (
    Case(53, "SVD that does not converge", (Held("tests/merging/test_polar.py::test_other_solvers_take_over"),)),
    Case(
        54,
        "a loss that diverges",
        (Held("tests/tuning/test_finetune.py::test_a_loss_that_is_no_number_names_task_and_step"),),
    ),
    Case(
        55,
        "no improvement",
        (Held("tests/alignment/test_auto.py::test_an_expert_unchanged_by_the_merge_stays_as_it_is"),),
    ),
    Case(
        56,
        "threads and BLAS",
        (
            Held("tests/faults/test_determinism.py::test_two_worlds"),
            Held("tests/merging/test_stream.py::test_every_block_once_and_in_order"),
            Held("tests/api/test_merge.py::test_two_runs_write_the_same_bytes"),
        ),
    ),
    Case(
        57,
        "statistics in half precision",
        (Held("tests/alignment/test_moments.py::test_narrow_inputs_are_summed_in_float64"),),
    ),
)

PROCESS = (
    Case(
        58,
        "disk full",
        (
            Held("tests/faults/test_crash_points.py::test_every_call", "at each write"),
            Held("tests/faults/test_signals.py::test_a_disk_that_is_full_or_read_only_for_real"),
            Held("tests/faults/test_bad_inputs.py::test_a_full_disk"),
        ),
    ),
    Case(
        59,
        "kill -9",
        (
            Held("tests/faults/test_crash_points.py::test_every_call", "at each step"),
            Held("tests/faults/test_kill.py::test_a_run_that_is_killed"),
        ),
    ),
    Case(
        60,
        "SIGINT",
        (
            Held("tests/faults/test_signals.py::test_a_signal_at_a_random_moment"),
            Held("tests/faults/test_kill.py::test_a_run_that_is_killed"),
        ),
    ),
    Case(
        61,
        "out of memory",
        (
            Sound("once", m.memory_runs_out(1)),
            Refused("again and again", m.memory_runs_out(10**9), OTHER, "3 experts", "close other programs"),
            Held("tests/models/encoding/test_extract.py::test_out_of_memory_says_what_to_do", "on a GPU"),
        ),
    ),
    Case(62, "two runs into one output", (Held("tests/faults/test_kill.py::test_two_runs_at_once"),)),
    Case(
        63,
        "a worker dies",
        (
            Held(
                "tests/runs/test_line.py::test_a_killed_run_goes_on",
                "a run is one process; the next goes on from it",
            ),
        ),
    ),
    Case(64, "clock jumps", (Sound("times of all kinds", m.old_and_new_times),)),
    Case(
        65,
        "output inside an input",
        (
            Refused("expert", nothing, OUTPUT, "two", "choose another place", more=("OUT=two/out", "--force")),
            Refused("base", nothing, OUTPUT, "base", "choose another place", more=("OUT=base/deep/out", "--force")),
            Refused("around all", nothing, OUTPUT, "world overlaps", "choose another place", more=("OUT=.", "--force")),
        ),
    ),
    Case(
        66,
        "output is an input",
        (
            Refused("expert", nothing, OUTPUT, "two", "choose another place", more=("OUT=two", "--force")),
            Refused(
                "merge",
                nothing,
                OUTPUT,
                "merged",
                "choose another place",
                meets="align",
                more=("OUT=merged", "--force"),
            ),
            Refused(
                "export",
                nothing,
                OUTPUT,
                "merged",
                "choose another place",
                meets="export",
                more=("OUT=merged/two",),
            ),
        ),
    ),
    Case(
        67,
        "permission denied on rename",
        (
            Refused(
                "rename",
                m.renames_fail(errno.EACCES),
                OUTPUT,
                "results/out",
                "Permission denied; nothing was left behind",
            ),
        ),
    ),
    Case(
        68,
        "odd paths",
        (
            Sound("spaces and more", m.spelled("ein ordner für 'alles' \U0001f600")),
            Sound("long", m.spelled("x" * 200)),
            Refused("too long", nothing, OUTPUT, "results", "File name too long", more=(f"OUT={'x' * 300}",)),
            Refused("null byte", nothing, OUTPUT, r"a\\x00b", "null byte", more=("OUT=a\0b",)),
        ),
    ),
    Case(69, "standard output is closed", (Held("tests/faults/test_cases.py::test_standard_output_that_is_closed"),)),
    Case(
        70,
        "half a download",
        (
            Held("tests/files/test_hub.py::test_offline_and_part_of_it_missing"),
            Held("tests/files/test_hub.py::test_a_branch_that_moves_while_it_is_fetched"),
        ),
    ),
)

CASES = (*FILES, *MODELS, *HEADS, *DATA, *NUMERICS, *PROCESS)
CORRUPTIONS = {
    f"{case.number:02} {row.name}": row.damage for case in CASES for row in case.rows if not isinstance(row, Held)
}
