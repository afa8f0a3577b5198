"""Numbers of measurements that one process makes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

DEPTHS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Amounts:
    """Numbers of measurements that one process makes.

    Attributes:
        compared: saves within a training; 0 for none.
        loads: loads with a cold cache; 0 for no loads at all.
        timed: saves whose medians are the times.
        depths: raw writes or reads at once; the fastest counts.
        has_unowned: saves of tensors that nothing owns are measured too, of Holdfast.
    """

    compared: int = 0
    loads: int = 3
    timed: int = 3
    depths: tuple[int, ...] = DEPTHS
    has_unowned: bool = True

    def text(self) -> str:
        """Return them as a word of a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Amounts:
        """Return those of such a word."""
        found = json.loads(text)
        return cls(**found | {"depths": tuple(found["depths"])})
