"""How a tensor is spread over the ranks, and the two wrappers by which a user overrides the default."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class Spread(enum.Enum):
    """Which ranks hold the true bytes of a tensor."""

    REPLICATED = "replicated"  # all ranks hold the same bytes; any may write them
    LOWEST = "lowest"  # all ranks hold it, rank 0's bytes are the true ones
    PER_RANK = "per rank"  # every rank has its own
    OWN = "own"  # every rank has its own, except of tensors that say themselves how they are sharded


@dataclass(frozen=True, slots=True)
class Marked:
    """An object of the state with the user's word on how its tensors are spread; `value` is the object."""

    value: Any
    spread: Spread
    ranks: tuple[int, ...] | None = None  # that hold it, if the user has said so


def replicated(value: Any, ranks: Iterable[int] | None = None) -> Marked:
    """Mark an object of the state: all its tensors are the same on every rank, so each is written once.

    Use it for objects that are per rank by default (anything but modules and optimizers) and large. If the
    ranks differ after all, all but one rank's tensors are lost.

    Args:
        value: the object.
        ranks: the global ranks that hold it, if not every rank that has its key does; alike on all of these.
    """
    return Marked(_bare(value), Spread.REPLICATED, None if ranks is None else tuple(sorted(set(ranks))))


def per_rank(value: Any) -> Marked:
    """Mark an object of the state: every rank has its own tensors in it, so every rank writes them.

    Use it for modules whose parameters differ from rank to rank. A sharded tensor in it counts as this rank's
    local part.
    """
    return Marked(_bare(value), Spread.PER_RANK)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Marked) else value
