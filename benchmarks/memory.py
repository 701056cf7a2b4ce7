"""The most anonymous memory that a merge of large models takes, method by method.

    python benchmarks/memory.py [--gigabytes 4] [--dtype bfloat16] [--methods ties average ...] [--keep]

Makes a LLaMA-like base (wide embeddings, sharded) and two experts of the given size each, with small heads, written
tile by tile, and merges them with every method that works element by element. Exit code 1 when one exceeds the bar.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.environments import ROOT, describe_run, measure, table, write_result

from orthomerge.core.schema import maker_of
from orthomerge.merging.methods import METHODS

if TYPE_CHECKING:
    import torch

BAR = 700_000_000
FOLDER = ROOT / "runs" / "memory"
SHARD = 2_000_000_000
WIDTH, INNER, VOCABULARY = 2048, 5632, 128_256
HEADS = {"a": 2, "b": 3}
NOTES = """\
Peak of anonymous memory (`RssAnon`, looked at every 5 ms: interpreter, libraries' data and all blocks under way, but no
pages of files) of whole `orthomerge merge` commands on a synthetic LLaMA-like base and two experts."""


def element_methods() -> list[str]:
    """Every method that streams: those that need whole matrices are bound by the largest of them instead."""
    return [name for name, row in METHODS.items() if getattr(maker_of(row), "scope", "element") == "element"]


def shapes(elements: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an encoder of about so many elements: embeddings, then as many layers as fit."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    layer = {
        "self_attn.q_proj.weight": (WIDTH, WIDTH),
        "self_attn.k_proj.weight": (WIDTH // 4, WIDTH),
        "self_attn.v_proj.weight": (WIDTH // 4, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, WIDTH),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    layers = max(1, round((elements - VOCABULARY * WIDTH) / sum(map(prod, layer.values()))))
    for number in range(layers):
        tensors |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return tensors | {"model.norm.weight": (WIDTH,)}


def make_models(gigabytes: float, dtype: str) -> None:
    """Write base and experts."""
    import torch

    from orthomerge.files.checkpoint import Spec
    from orthomerge.files.safetensors import encode_header, plan_shards

    width, kind = {"bfloat16": (2, "BF16"), "float32": (4, "F32")}[dtype]
    encoder = shapes(int(gigabytes * 1e9 / width))
    for seed, model in enumerate(("base", *HEADS)):
        folder = FOLDER / model
        folder.mkdir(parents=True)
        head = {"score.weight": (HEADS[model], WIDTH)} if model in HEADS else {}
        shards = plan_shards({name: Spec(shape, kind) for name, shape in (encoder | head).items()}, SHARD)
        places: dict[str, str] = {}
        generator, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        for number, shard in enumerate(shards, 1):
            file = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
            places |= dict.fromkeys(shard, file.name)
            with file.open("wb") as out:
                out.write(encode_header(shard, {"format": "pt"}))
                for spec in shard.values():
                    for tile in _tiles(spec.numel, generator, own if seed else None):
                        out.write(tile.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes())
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _tiles(count: int, generator: torch.Generator, own: torch.Generator | None) -> Iterator[torch.Tensor]:
    """Weights of the base, the same for every model, with the expert's own noise on top."""
    import torch

    tile = 1 << 22
    for start in range(0, count, tile):
        weights = torch.randn(min(tile, count - start), generator=generator).mul_(0.02)
        if own is not None:
            weights.add_(torch.randn(len(weights), generator=own), alpha=0.002)
        yield weights


def write_recipe(method: str) -> Path:
    """Our recipe: no family has these names, so it says where encoder and head are."""
    experts = {name: {"path": name, "head": {"layers": ["score"]}} for name in HEADS}
    recipe = {"base": "base", "experts": experts, "method": method, "family": "generic", "encoder_prefix": "model."}
    path = FOLDER / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "out": "out"}))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=4, help="size of each model (4)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--methods", nargs="+", help="only these (default: all that work element by element)")
    parser.add_argument("--keep", action="store_true", help="leave the models there")
    # What needs torch runs in a process of its own: this one must stay small (see environments.py).
    parser.add_argument("--only", choices=("make", "list"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only == "make":
        make_models(arguments.gigabytes, arguments.dtype)
        return 0
    if arguments.only == "list":
        print("\n".join(element_methods()))
        return 0
    described = describe_run()
    stamp = FOLDER / f"{arguments.gigabytes:g}-{arguments.dtype}"
    if not stamp.exists():
        print(f"writing three models of {arguments.gigabytes:g} GB", flush=True)
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, __file__, "--only", "make", *sys.argv[1:]], check=True)
        stamp.touch()

    listed = subprocess.run([sys.executable, __file__, "--only", "list"], capture_output=True, text=True, check=True)
    rows, good = [], True
    for method in arguments.methods or listed.stdout.split():
        shutil.rmtree(FOLDER / "out", ignore_errors=True)
        program = Path(sys.executable).parent / "orthomerge"
        used = measure([program, "merge", write_recipe(method), "--quiet"])
        within = used.anonymous <= BAR
        good &= within
        peak = f"{used.anonymous / 1e6:.0f}"
        cells = (method, peak, f"{used.rss / 1e6:.0f}", f"{used.wall:.0f}", f"{used.cpu:.0f}")
        rows.append((*cells, "within" if within else "MISSED"))
        print("  ".join(rows[-1]), flush=True)
    size = sum(path.stat().st_size for path in (FOLDER / "base").iterdir())
    shown = table(("method", "anonymous MB", "peak RSS MB", "wall s", "CPU s", "verdict"), rows)
    notes = f"{NOTES} Each is {size / 1e9:.1f} GB in {arguments.dtype}; the bar is {BAR / 1e6:.0f} MB."
    print(write_result("memory", {"# Memory of large merges": notes, "## Run": described, "## Result": shown}))
    shutil.rmtree(FOLDER / "out", ignore_errors=True)
    if not arguments.keep:
        shutil.rmtree(FOLDER)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
