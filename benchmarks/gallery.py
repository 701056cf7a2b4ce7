"""The gallery: the papers' figures for one suite, from one command, as small pictures with their data and a page.

    python benchmarks/gallery.py --suite digits
    python benchmarks/gallery.py --suite text8 --device cuda --measure-only --out OUT     (without matplotlib)
    python benchmarks/gallery.py --draw-only OUT/text8/figures.json                        (without a GPU or a suite)

Parts that were measured apart (`--only`, with an `--out` each) are drawn together: `--draw-only ONE OTHER`. Writes
OUT/SUITE/figures.json with all numbers, OUT/SUITE/KEY.png, and the page docs/gallery/SUITE.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.environments import describe_run  # noqa: E402
from benchmarks.gallery_measures import PARTS, Plan, joined, measure  # noqa: E402
from benchmarks.gallery_pages import draw_all, list_pages, write_page  # noqa: E402

from orthomerge.analysis.diagnosis import read_diagnosis, write_diagnosis  # noqa: E402
from orthomerge.suites.table import build_suite  # noqa: E402

FILE = "figures.json"


def main() -> None:
    arguments = parsed()
    sources = arguments.draw_only or [measured(arguments)]
    if not arguments.measure_only:
        drawn(sources, arguments.out, arguments.pages)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", choices=["digits", "text8", "vision8"])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="for text8 and vision8")
    parser.add_argument("--folder", type=Path, help="the suite's own; built if it is not there (runs/SUITE)")
    parser.add_argument("--base", help="folder or hub id of the base (text8)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "gallery")
    parser.add_argument("--pages", type=Path, default=ROOT / "docs" / "gallery", help="where SUITE.md goes")
    parser.add_argument("--steps", type=int, default=300, help="of every fit (300)")
    parser.add_argument("--limit", type=int, help="at most so many training inputs a task (all)")
    parser.add_argument("--draws", type=int, default=3, help="of few inputs a class (3)")
    parser.add_argument("--scale", metavar="task_arithmetic=X", help="instead of the best on validation data")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--measure-only", action="store_true", help="write figures.json alone; needs no matplotlib")
    parser.add_argument("--draw-only", type=Path, nargs="+", metavar=FILE, help="draw what was measured elsewhere")
    arguments = parser.parse_args()
    if (arguments.suite is None) == (arguments.draw_only is None):
        parser.error(f"give --suite, or --draw-only with a {FILE}")
    if arguments.scale is not None and not arguments.scale.startswith("task_arithmetic="):
        parser.error("--scale is task_arithmetic=X")
    return arguments


def measured(arguments: argparse.Namespace) -> Path:
    """Measure a suite; where its numbers are."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    plan = Plan(
        about=describe_run(),
        scale=None if arguments.scale is None else float(arguments.scale.partition("=")[2]),
        steps=arguments.steps,
        limit=arguments.limit,
        draws=arguments.draws,
        parts=tuple(arguments.only),
        device=arguments.device,
    )
    suite = build_suite(
        arguments.suite,
        folder=arguments.folder or ROOT / "runs" / arguments.suite,
        data=arguments.data,
        base=arguments.base,
        device=arguments.device,
        say=say,
    )
    found = measure(suite, plan, say=say)
    place: Path = arguments.out / arguments.suite / FILE
    place.parent.mkdir(parents=True, exist_ok=True)
    write_diagnosis(place, found)
    say(f"{len(found.figures)} figures are measured: {place} ({place.stat().st_size / 1e6:.2f} MB)")
    return place


def drawn(sources: Sequence[Path], out: Path, pages: Path) -> None:
    """Draw all figures of some files, keep their data beside them, and write the page."""
    found = joined([read_diagnosis(source) for source in sources])
    folder = out / str(found.facts["suite"])
    folder.mkdir(parents=True, exist_ok=True)
    if [folder / FILE] != sources:
        write_diagnosis(folder / FILE, found)
    sizes = draw_all(found, folder)
    page = write_page(found, pictures=folder, pages=pages)
    list_pages(pages)
    print(f"{len(sizes)} pictures of {sum(sizes) / 1e3:.0f} kB, the largest {max(sizes) / 1e3:.0f} kB; {page}")


if __name__ == "__main__":
    main()
