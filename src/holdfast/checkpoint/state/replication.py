"""Replication: which ranks hold the true bytes of a tensor, and two functions to override the default."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar


class Replication(enum.Enum):
    """Ranks that hold the true bytes of a tensor."""

    REPLICATED = "replicated"  # all ranks hold the same bytes; any may write them
    LOWEST = "lowest"  # all ranks hold it, but rank 0's bytes are the true ones
    PER_RANK = "per rank"  # every rank has its own
    OWN = "own"  # every rank has its own, except for tensors that are sharded by themselves


@dataclass(frozen=True, slots=True)
class MarkedObject:
    """An object of the state, marked by the user with the replication of its tensors."""

    _holdfast_is_leaf: ClassVar[bool] = True  # no container of a state, whose fields are saved
    value: Any
    replication: Replication
    ranks: tuple[int, ...] | None = None  # its holders, if the user has named them


def replicated(value: Any, ranks: Iterable[int] | None = None) -> MarkedObject:
    """Mark an object of the state as the same on every rank. Each tensor is written once.

    Use it for large objects that are per rank by default (anything but modules and optimizers). If the ranks
    differ nevertheless, the tensors of all ranks but one are lost.

    Args:
        ranks: the global ranks that hold it, if not all ranks that have its key; the same on each of them.
    """
    return MarkedObject(
        _bare(value), Replication.REPLICATED, None if ranks is None else tuple(sorted(set(ranks)))
    )


def per_rank(value: Any) -> MarkedObject:
    """Mark an object of the state as different on every rank. Every rank writes its tensors.

    Use it for modules whose parameters differ from rank to rank. A sharded tensor in it counts as this rank's
    local part.
    """
    return MarkedObject(_bare(value), Replication.PER_RANK)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, MarkedObject) else value
