"""Target of a save or load: a home and a step, from arguments or from DCP's checkpoint id."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.errors import HoldfastError, InvalidInput

_ID = re.compile(r"(?:(.*)/)?step-([0-9]+)/*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Target:
    """Home as an absolute path or URL, and a step or None."""

    home: str
    step: int | None

    @classmethod
    def of(cls, home: str | os.PathLike[str], step: int | None) -> Target:
        """Return the target of a user's arguments."""
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise InvalidInput(f"step must be the number of completed steps, 0 or more, not {step!r}.")
        return cls(absolute_place(home), step)

    def at(self, checkpoint_id: str | os.PathLike[str] | None) -> Target:
        """Return the target of a `checkpoint_id`, or this one without it.

        `HOME/step-N` is step N of that home; N may begin with zeros. Anything else is a home, and the step
        does not change.
        """
        if checkpoint_id is None:
            return self
        text = os.fspath(checkpoint_id)
        if found := _ID.fullmatch(text):
            home = found[1] if found[1] is not None else "."
            return Target.of(home or "/", int(found[2]))
        return Target.of(checkpoint_id, self.step)

    @staticmethod
    def is_valid(checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if a store can be opened for a checkpoint id."""
        try:
            open_store(Target.of("", None).at(checkpoint_id).home)
        except HoldfastError:
            return False
        return True
