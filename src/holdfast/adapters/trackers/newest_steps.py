"""Newest steps of a tracker's curves, by name: values of steps that are done again are left out; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

NONE = -1
"""Step of a curve without values."""
OWN_PREFIX = "holdfast/"
"""Prefix of the numbers of the run itself."""


class NewestSteps:
    """Newest step of each curve of a tracker that cannot replace a value.

    Args:
        read: returns the newest step that earlier starts have logged of a name, or `NONE`.

    Attributes:
        known: newest steps so far, by name.
    """

    def __init__(self, read: Callable[[str], int]) -> None:
        self.known: dict[str, int] = {}
        self._read = read
        self._attempt: int | None = None
        self._has_gone_back = False

    def begin(self, attempt: int) -> None:
        """Record the attempt of the next values. A second one in this process has gone back."""
        self._has_gone_back |= self._attempt not in (None, attempt)
        self._attempt = attempt

    def take(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values that are new, and count them as logged.

        After a restart, training repeats the steps since its checkpoint, so their values are left out. After
        a rollback it trains on other samples: such values get a curve of their own, with the attempt in its
        name.
        """
        found = {}
        for name, value in values.items():
            curve = name if self._is_new(name, step) else self._curve_of_repeat(name)
            if curve is not None and self._is_new(curve, step):
                found[curve] = value
                self.known[curve] = step
        return found

    def _is_new(self, name: str, step: int) -> bool:
        if name not in self.known:
            self.known[name] = self._read(name)
        return step > self.known[name]

    def _curve_of_repeat(self, name: str) -> str | None:
        if not self._has_gone_back or name.startswith(OWN_PREFIX):
            return None
        return f"{name}-attempt-{self._attempt}"
