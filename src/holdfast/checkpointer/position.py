"""Position of a training loop: the newest completed step, and whether training has moved since."""

from __future__ import annotations

from collections.abc import Callable


class Position:
    """The newest completed step, with a mark of the state at that moment.

    Args:
        mark: returns a value that differs from an earlier one if training has changed the state since.
    """

    def __init__(self, mark: Callable[[], object]) -> None:
        self.step: int | None = None
        """The newest step that the loop has completed; None before the first, and after `clear`."""
        self._mark = mark
        self._mark_then: object = None
        self._is_counted = False

    def reach(self, step: int, *, is_counted: bool = False) -> None:
        """Note that a step is complete.

        Args:
            step: its number.
            is_counted: the next change of the state completes the step after it.
        """
        self.step, self._mark_then, self._is_counted = step, self._mark(), is_counted

    def follow(self, step: int) -> None:
        """Note that a step was saved in a loop that does its own counting."""
        if self.step is not None and step > self.step and not self._is_counted:
            self.reach(step)

    def clear(self) -> None:
        """Forget the step: what the state holds now may be half of another one."""
        self.step, self._mark_then = None, None

    def step_now(self) -> int | None:
        """Return the step that the state is of now; None if that cannot be told."""
        if self.step is None or self._mark() == self._mark_then:
            return self.step
        return self.step + 1 if self._is_counted else None
