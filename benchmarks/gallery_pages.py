"""Pictures and pages of the gallery, from what was measured. Needs matplotlib, and neither a suite nor a model."""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gallery_words import (
    say_accuracy,
    say_coefficients,
    say_conflict,
    say_families,
    say_fits,
    say_geometry,
    say_layers,
    say_masking,
    say_scale,
    say_shots,
    say_tsne,
)

from orthomerge.analysis.diagnosis import Diagnosis, Figure

_COLOURS = 192  # of a picture
_MARGIN = 8  # white pixels above and below
_WIDE = 1000  # pixels from which a picture has a line of its own
_TITLES = {
    "digits": "seven tasks from scikit-learn's digits, a tiny ViT",
    "text8": "eight text tasks, all-MiniLM-L6-v2",
    "vision8": "eight image tasks, a small ViT",
}
_START, _END = "<!-- suites: written by benchmarks/gallery.py -->", "<!-- end of suites -->"

Figures = Mapping[str, Figure]


@dataclass(frozen=True)
class Section:
    """Figures under one heading. `keys`: of figures, or how several begin (`tsne-*`). `seen`: what they show here."""

    title: str
    paper: str
    text: str
    keys: tuple[str, ...]
    seen: Callable[[Figures, Diagnosis], str]


_MOMA = "MOMA (arXiv 2412.13526 v3)"
SECTIONS = (
    Section(
        "What the merge loses",
        "FT-Classifier, the first version of MOMA, Figure 4: current evaluation beside aligned",
        "Experts, their merge by task arithmetic under the experts' own heads, the same encoder with aligned heads "
        "(unlabelled training inputs, nothing added to the model), a linear probe, and the base.",
        ("accuracy",),
        say_accuracy,
    ),
    Section(
        "What the encoders see",
        f"{_MOMA}, Figures 1, 2, 9 and 10",
        "t-SNE of the same test inputs by the expert, the merged encoder and the merged encoder aligned. Colours are "
        "classes; full dots are read rightly, hollow ones wrongly. Where clusters stay whole and the dots are hollow, "
        "the head looks in the wrong place.",
        ("tsne-*",),
        say_tsne,
    ),
    Section(
        "Which kind of map brings the features back",
        f"{_MOMA}, Table 1 and Figure 4",
        "Merged features are mapped onto the expert's by maps with more and more freedom, then read by the expert's "
        "head. The paper shows training loss; here every map is measured on inputs that it was not fitted to.",
        ("families-accuracy", "families-distance", "families-kl", "families-by-task"),
        say_families,
    ),
    Section(
        "Direction and length of features",
        f"{_MOMA}, Figure 5",
        "Cosine and coefficient between merged and expert features of one input: raw, after the best orthogonal map, "
        "and after the best linear one.",
        ("cosine", "coefficient", "cosine-by-task"),
        say_geometry("cosine", "coefficient"),
    ),
    Section(
        "Layer by layer",
        "the lecture's slides on CKA (Kornblith et al. 2019, arXiv 1905.00414)",
        "Linear CKA: 1 is equal up to rotation and scale. Left, merged encoder against each expert; right, all "
        "encoders against each other on inputs of all tasks.",
        ("cka-layers", "cka-experts"),
        say_layers,
    ),
    Section(
        "Task vectors",
        "task arithmetic (Ilharco et al. 2023, arXiv 2212.04089) and TIES (Yadav et al. 2023, arXiv 2306.01708)",
        "How far each expert moved from the base, whether two of them moved the same way, how often they pull a "
        "weight in opposite directions, and how many directions each uses.",
        ("vector-norms", "vector-cosines", "sign-conflicts", "vector-ranks"),
        say_conflict,
    ),
    Section(
        "How much the scale matters",
        "task arithmetic (Ilharco et al. 2023) and AdaMerging (Yang et al. 2024), sensitivity to lambda",
        "All task vectors times one lambda, scored on validation inputs.",
        ("scale",),
        say_scale,
    ),
    Section(
        "Loss of the fits",
        f"{_MOMA}, Figure 6; `realign` is ours",
        "MOMA trains a mask over the merged vector and an orthogonal map a task; `realign` trains the encoder under "
        "solved heads. Both see unlabelled training inputs, of which a tenth is held out.",
        ("moma-loss", "realign-loss"),
        say_fits,
    ),
    Section(
        "What MOMA learns",
        f"{_MOMA}, Figure 7",
        "As in Figure 5, for the encoder that MOMA made.",
        ("moma-cosine", "moma-coefficient"),
        say_geometry("moma-cosine", "moma-coefficient"),
    ),
    Section(
        "Masking rate",
        f"{_MOMA}, Figure 8",
        "Left, the share of the merged vector that MOMA's mask takes away in each layer. Right, MOMA fitted again with "
        "more and more decay of the mask.",
        ("masking", "masking-accuracy"),
        say_masking,
    ),
    Section(
        "Coefficients by layer",
        "AdaMerging (Yang et al. 2024, arXiv 2310.02575), its figure of layer-wise coefficients",
        "The coefficient of each task vector in each layer after AdaMerging, which makes predictions on unlabelled "
        "inputs sure.",
        ("coefficients",),
        say_coefficients,
    ),
    Section(
        "How many inputs it takes",
        f"{_MOMA}, Figures 3 and 12 to 15; FT-Classifier, Figures 2 and 5",
        "The merged encoder read in other ways over the number of training inputs a class. KNN sees labels; Aligned-C, "
        "Surgery and the aligner `auto` do not, and only Surgery adds parameters. Bands: a deviation over draws.",
        ("shots",),
        say_shots,
    ),
)


def draw_all(found: Diagnosis, folder: Path) -> list[int]:
    """FOLDER/KEY.png for every figure, and their sizes in bytes; pictures of an earlier time are removed."""
    from orthomerge.reporting.drawing import draw

    for old in folder.glob("*.png"):
        old.unlink()
    sizes = []
    for figure in found.figures:
        data = _compact(draw(figure).png)
        (folder / f"{figure.key}.png").write_bytes(data)
        sizes.append(len(data))
    return sizes


def _compact(png: bytes) -> bytes:
    """The same picture with few colours, on white."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as picture:
        plain = picture.convert("RGB")
        few = plain.crop(_frame(plain)).quantize(_COLOURS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    few.save(out, format="png", optimize=True)
    return out.getvalue()


def _frame(picture: Any) -> tuple[int, int, int, int]:
    """The picture's whole width, without white above and below what is drawn."""
    from PIL import ImageChops

    found = ImageChops.invert(picture).getbbox()
    top, bottom = (found[1], found[3]) if found else (0, picture.height)
    return 0, max(top - _MARGIN, 0), picture.width, min(bottom + _MARGIN, picture.height)


def write_page(found: Diagnosis, *, pictures: Path, pages: Path) -> Path:
    """PAGES/SUITE.md, with links to the pictures."""
    suite = str(found.facts["suite"])
    figures = {figure.key: figure for figure in found.figures}
    where = Path(os.path.relpath(pictures, pages)).as_posix()
    parts = [f"# Gallery: {suite}", _intro(found, where)]
    for section in SECTIONS:
        shown = [figure for key in section.keys for figure in _matching(figures, key)]
        if shown:
            told = f"{section.text} **Here:** {section.seen(figures, found)}"
            parts += [f"## {section.title}", told, *_pictures(shown, pictures, where), f"Counterpart: {section.paper}."]
    parts += ["## How it was made", _made(found)]
    pages.mkdir(parents=True, exist_ok=True)
    page = pages / f"{suite}.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def list_pages(pages: Path) -> None:
    """Name all pages of suites that there are in the page over them, between its two marks."""
    index = pages.parent / f"{pages.name}.md"
    if not index.is_file():
        return
    rows = [
        f"| [{suite}]({pages.name}/{suite}.md) | {title} |"
        for suite, title in _TITLES.items()
        if (pages / f"{suite}.md").is_file()
    ]
    table = "\n".join(("| suite | what it is |", "|---|---|", *rows))
    text = index.read_text("utf-8")
    index.write_text(re.sub(rf"(?s){_START}.*{_END}", lambda _: f"{_START}\n\n{table}\n\n{_END}", text), "utf-8")


def _intro(found: Diagnosis, where: str) -> str:
    suite = str(found.facts["suite"])
    title, count = _TITLES.get(suite, suite), len(found.tasks)
    return (
        f"{title[0].upper()}{title[1:]}: {count} experts, merged by task arithmetic at scale "
        f"{found.facts['scale']:g}. The numbers behind every figure are in [figures.json]({where}/figures.json); "
        "what each measure is stands in [diagnosis](../diagnosis.md)."
    )


def _matching(figures: Figures, key: str) -> list[Figure]:
    if key.endswith("*"):
        return [figure for name, figure in figures.items() if name.startswith(key[:-1])]
    return [figures[key]] if key in figures else []


def _pictures(shown: Sequence[Figure], pictures: Path, where: str) -> list[str]:
    """Wide pictures one under the other, narrow ones two in a line."""
    parts: list[str] = []
    waiting: list[Figure] = []
    for figure in shown:
        if _width(pictures / f"{figure.key}.png") >= _WIDE:
            parts += [*_pairs(waiting, where), _picture(figure, where), _caption(figure, shown)]
            waiting = []
        else:
            waiting.append(figure)
    return [*parts, *_pairs(waiting, where)]


def _pairs(figures: Sequence[Figure], where: str) -> list[str]:
    parts = []
    for number in range(0, len(figures), 2):
        pair = figures[number : number + 2]
        if len(pair) == 1:
            cells = [(pair[0].title, _picture(pair[0], where), pair[0].caption), ("", "", "")]
        else:
            cells = [(figure.title, _picture(figure, where), figure.caption) for figure in pair]
        titles, images, captions = (" | ".join(column) for column in zip(*cells, strict=True))
        parts.append(f"| {titles} |\n|---|---|\n| {images} |\n| {captions} |")
    return parts


def _picture(figure: Figure, where: str) -> str:
    return f"![{_words(figure.title)}]({where}/{figure.key}.png)"


def _caption(figure: Figure, shown: Sequence[Figure]) -> str:
    """In full under the first of several that say the same."""
    first = next(other for other in shown if other.caption == figure.caption) is figure
    return f"*{_words(figure.title)}.*" + (f" {_words(figure.caption)}" if first else "")


def _words(text: str) -> str:
    return re.sub(r"([\[\]|*])", r"\\\1", text)


def _width(picture: Path) -> int:
    """Of a PNG, in pixels."""
    found: int = struct.unpack(">I", picture.read_bytes()[16:20])[0]
    return found


def _made(found: Diagnosis) -> str:
    left = found.facts.get("left_out") or {}
    lines = [str(found.facts["about"]), f"- fits: {found.facts['steps']} steps each, inputs of the training split"]
    lines += [f"- left out: {name}: {reason}" for name, reason in left.items()]
    return "\n".join(lines)
