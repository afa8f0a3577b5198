"""No saves at all: the step time of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator

from .contract import Loop


class Without(Loop):
    """Training that is never saved."""

    title = "no saves"

    def steps(self, total: int) -> Iterator[int]:
        """Yield all steps."""
        yield from range(total)
