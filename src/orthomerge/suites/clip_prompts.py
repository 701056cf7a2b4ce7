"""Prompts of the frozen heads with which the eight CLIP experts were fine-tuned.

Radford et al. 2021, arXiv 2103.00020, and FusionBench (Tang et al. 2024, arXiv 2406.03280), which made the experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orthomerge.core.errors import RecipeError, some

_NUMBER = ('a photo of the number: "{}".',)
_CARS = (
    "a photo of my {}.",
    "i love my {}!",
    *(f"a photo of my {how} {{}}." for how in ("dirty", "clean", "new", "old")),
)

TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "sun397": ("a photo of a {}.", "a photo of the {}."),
    "stanford-cars": ("a photo of a {}.", "a photo of the {}.", *_CARS),
    "resisc45": tuple(
        f"{source} {kind} of {article}{{}}."
        for article in ("", "a ", "the ")
        for kind in ("imagery", "photo", "view")
        for source in ("satellite", "aerial")
    ),
    "eurosat": tuple(f"a centered satellite photo of {article}{{}}." for article in ("", "a ", "the ")),
    "svhn": _NUMBER,
    "gtsrb": tuple(f'a {how} photo of a "{{}}" traffic sign.' for how in ("zoomed in", "centered", "close up")),
    "mnist": _NUMBER,
    "dtd": tuple(
        f"a photo of {article} {{}} {noun}."
        for article in ("a", "the")
        for noun in ("texture", "pattern", "thing", "object")
    ),
}
_DIGIT_TASKS = ("svhn", "mnist")  # tasks whose classes are digits
# Words for prompts by task and label, for datasets with other labels.
_PROMPT_WORDS: Mapping[str, Mapping[str, str]] = {
    "eurosat": {
        "annualcrop": "annual crop land",
        "herbaceousvegetation": "brushland or shrubland",
        "highway": "highway or road",
        "industrial": "industrial buildings or commercial buildings",
        "pasture": "pasture land",
        "permanentcrop": "permanent crop land",
        "residential": "residential buildings or homes or apartments",
        "sealake": "lake or sea",
        "forest": "forest",
        "river": "river",
    }
}


def class_names(task: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the class names of a task for its templates; numbers are refused, except in tasks of digits."""
    numbers = [label for label in labels if label.isdecimal()]
    if numbers and task not in _DIGIT_TASKS:
        raise RecipeError(
            f"the classes of {task!r} must be named in words, from which its head is computed, got {some(numbers)}; "
            "rename its folders, or its labels, to the words for the prompts"
        )
    words = _PROMPT_WORDS.get(task, {})
    names = (re.sub(r"[\s_]+", " ", label).strip() for label in labels)
    return tuple(words.get(name.replace(" ", "").casefold(), name) for name in names)
