"""How a tensor is spread over the ranks, and the two wrappers by which a user overrides the default."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Spread(enum.Enum):
    """Which ranks hold the true bytes of a tensor."""

    REPLICATED = "replicated"  # all ranks hold the same bytes; any may write them
    LOWEST = "lowest"  # all ranks hold it, rank 0's bytes are the true ones
    PER_RANK = "per rank"  # every rank has its own


@dataclass(frozen=True, slots=True)
class Marked:
    """An object of the state with the user's word on how its tensors are spread; `value` is the object."""

    value: Any
    spread: Spread


def replicated(value: Any) -> Marked:
    """Mark an object of the state: all its tensors are the same on every rank, so each is written once.

    Use it for objects that are per rank by default (anything but modules and optimizers) and large. If the
    ranks differ after all, all but one rank's tensors are lost.
    """
    return Marked(_bare(value), Spread.REPLICATED)


def per_rank(value: Any) -> Marked:
    """Mark an object of the state: every rank has its own tensors in it, so every rank writes them.

    Use it for modules whose parameters differ from rank to rank.
    """
    return Marked(_bare(value), Spread.PER_RANK)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Marked) else value
