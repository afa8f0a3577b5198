"""Objects of the state that follow completed steps."""

from __future__ import annotations

from holdfast.checkpoint.state import State


class StepFollowers:
    """Objects of the state with a method `complete_steps`, which is called after each optimizer step.

    Args:
        objects: the state.
    """

    def __init__(self, objects: State) -> None:
        self._objects = objects
        self._step = 0

    def restart(self, step: int) -> None:
        """Count from a restored step, or from 0. The objects begin to count steps."""
        self._step = step
        for one in self._objects.followers():
            one.complete_steps(0)

    def reach(self, step: int) -> None:
        """Record that all steps up to this one are complete."""
        if (num_steps := step - self._step) <= 0:
            return
        self._step = step
        for one in self._objects.followers():
            one.complete_steps(num_steps)
