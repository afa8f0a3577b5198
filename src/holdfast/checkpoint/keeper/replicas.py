"""Hashes of the replicas that a trainer has ordered, computed from the staged bytes."""

from __future__ import annotations

import os

from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.audit import MAX_HOST_CHARS, AuditedReplicas
from holdfast.checkpoint.format.hashes import short_digest
from holdfast.errors import Corrupt


def hash_replicas(draft: bytes, arena: memoryview, what: str) -> AuditedReplicas | None:
    """Return the hashes that a draft orders; None if it orders nothing.

    Raises:
        Corrupt: the order cannot be parsed, or lists bytes beyond the arena.

    Blocks: for about 0.1 s per GB.
    """
    ordered = parts.order_of(draft, what)
    if not ordered:
        return None
    for one in ordered:
        if one.at + one.num_bytes > len(arena):
            raise Corrupt(f"{what} orders bytes to {one.at + one.num_bytes} of {len(arena)}.", key=what)
    hashes = tuple(short_digest(arena[one.at : one.at + one.num_bytes]) for one in ordered)
    return AuditedReplicas(
        os.uname().nodename[:MAX_HOST_CHARS], tuple(one.replica for one in ordered), hashes
    )
