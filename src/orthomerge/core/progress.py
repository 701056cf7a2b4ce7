"""Progress of long computations, reported to an observer."""


class Progress:
    """Observer of results, each with stages, each with a count of finished units. This one shows nothing."""

    def begin(self, name: str, *, place: int, count: int) -> None:
        """Begin a result, number `place` of `count`."""

    def end(self, name: str, *, place: int, count: int, seconds: float, found: bool) -> None:
        """End a result. `found`: whether it was in the store before."""

    def stage(self, title: str, total: int | None) -> None:
        """Begin a stage of `total` units."""

    def advance(self, count: int) -> None:
        """Add `count` finished units."""

    def say(self, text: str) -> None:
        """Show a line of text that stays."""


SILENT = Progress()
