"""Position of a training loop: its newest step, and the objects that count completed steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.checkpoint.state import State
from holdfast.checkpoint.state.loader_watch import batches_returned
from holdfast.system.rawbytes import view_bytes


class Position:
    """Newest completed step, with a mark of the state at that moment.

    Args:
        mark: function whose value differs from an earlier one if training has changed the state since.
    """

    def __init__(self, mark: Callable[[], object]) -> None:
        self.step: int | None = None
        """Newest step that the loop has completed; None before the first, and after `clear`."""
        self._mark = mark
        self._mark_then: object = None
        self._began_then: object = None
        self._is_counted = False

    def reach(self, step: int, *, is_counted: bool = False) -> None:
        """Record that a step is complete; if counted, the next change of the state completes one more."""
        self.step, self._mark_then, self._is_counted = step, self._mark(), is_counted
        self._began_then = _beginning()

    def follow(self, step: int) -> None:
        """Record that a loop with its own counter has saved `step`."""
        if self.step is not None and step > self.step and not self._is_counted:
            self.reach(step)

    def clear(self) -> None:
        """Forget the step: the state may now hold half of another one."""
        self.step, self._mark_then = None, None

    def step_between(self) -> int | None:
        """Return the step if the next one has not begun: no batch was returned, no random number drawn.

        None without data loaders, whose batches show that.
        """
        began = _beginning()
        has_begun = began is None or began != self._began_then or self._mark() != self._mark_then
        return None if has_begun else self.step

    def step_now(self) -> int | None:
        """Return the step of the present state; None if it cannot be determined."""
        if self.step is None or self._mark() == self._mark_then:
            return self.step
        return self.step + 1 if self._is_counted else None


def _beginning() -> object:
    """Return a value that changes when a step begins, if data loaders feed the training."""
    batches = batches_returned()
    return (batches, bytes(view_bytes(torch.get_rng_state()))) if batches else None


class StepFollowers:
    """Objects of the state with a method `complete_steps`, which is called after each optimizer step."""

    def __init__(self, objects: State) -> None:
        self._objects = objects
        self._step = 0

    def restart(self, step: int) -> None:
        """Count from a restored step, or from 0. The objects begin to count steps."""
        self._step = step
        for follower in self._objects.followers():
            follower.complete_steps(0)

    def reach(self, step: int) -> None:
        """Record that all steps up to this one are complete."""
        if (num_steps := step - self._step) <= 0:
            return
        self._step = step
        for follower in self._objects.followers():
            follower.complete_steps(num_steps)
