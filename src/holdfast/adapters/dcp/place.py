"""Place of a checkpoint: a home and a step, from arguments or from DCP's id."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from holdfast.errors import InvalidInput
from holdfast.store.place import absolute_place

_ID = re.compile(r"(?:(.*)/)?step-([0-9]+)/*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """Home as an absolute path or URL, and a step; None where none was given."""

    home: str
    step: int | None

    @classmethod
    def of(cls, home: str | os.PathLike[str], step: int | None) -> Place:
        """The place that a user's arguments name.

        Raises:
            InvalidInput: the step is no step.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise InvalidInput(f"step must be the number of steps completed, 0 or more; got {step!r}.")
        return cls(absolute_place(home), step)

    def at(self, checkpoint_id: str | os.PathLike[str] | None) -> Place:
        """The place that a `checkpoint_id` names; without one, this place.

        `HOME/step-N` is step N of that home, however many zeros N begins with; anything else is a home, and
        the step stays as it was given.
        """
        if checkpoint_id is None:
            return self
        text = os.fspath(checkpoint_id)
        if found := _ID.fullmatch(text):
            home = found[1] if found[1] is not None else "."
            return Place.of(home or "/", int(found[2]))
        return Place.of(checkpoint_id, self.step)
