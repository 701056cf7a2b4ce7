"""How closely a diagnosis looks."""

from __future__ import annotations

from dataclasses import dataclass

from orthomerge.alignment.aligners import find_aligner
from orthomerge.core.errors import RecipeError


@dataclass(frozen=True)
class Looks:
    """How closely to look. `points`: inputs per task for t-SNE; `layers`: for CKA; `maps`: that maps are fitted to.

    0 points or layers leave these figures out. `probe`: also classify the merged features with labels, as a second
    witness. `limit`: at most so many inputs per task are used for any fit; all if it is None.
    """

    aligner: str = "auto"
    points: int = 400
    layers: int = 512
    maps: int = 4096
    probe: bool = True
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        find_aligner(self.aligner)
        if min(self.points, self.layers, self.seed) < 0 or min(self.maps, 1 if self.limit is None else self.limit) < 1:
            raise RecipeError("'points', 'layers' and 'seed' must be at least 0, 'maps' and 'limit' at least 1")
