"""Audit of replicas in documents: a rank's hashes of tensors that other ranks hold too, in its part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.catalog import columns
from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES, MAX_RANKS
from holdfast.checkpoint.format.sealed import dumps
from holdfast.system.documents import Fields, decode, read_integers

REPLICA_DIGITS = 16
"""Length of the hash of a replica: xxh3-64."""
MAX_HOST_CHARS = 256


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's copy of a region of a tensor.

    Attributes:
        tensor: number of the tensor in the catalog of the rank.
        region: number of the region, in the order of the tensor's partitioning.
        is_trained: only an optimizer's step changes it, so all copies must have the same bytes.
    """

    tensor: int
    region: int
    is_trained: bool


@dataclass(frozen=True, slots=True)
class ReplicaAt:
    """A replica and its position in the arena, for the keeper that hashes it."""

    replica: Replica
    at: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AuditedReplicas:
    """The replicas of one rank that were hashed at a save.

    Attributes:
        host: name of the rank's host.
        hashes: of each replica, xxh3-64 in 16 hex digits.
    """

    host: str
    replicas: tuple[Replica, ...]
    hashes: tuple[str, ...]


def audit_members(audit: AuditedReplicas) -> dict[str, Any]:
    """Return an audit as JSON."""
    rows = [[one.tensor, one.region, int(one.is_trained)] for one in audit.replicas]
    return {"host": audit.host[:MAX_HOST_CHARS], "rows": rows, "hashes": "".join(audit.hashes)}


def read_audit(body: Fields) -> AuditedReplicas | None:
    """Return the audit in a part; None without one.

    Raises:
        Corrupt: it is something else.
        ValueError: a row is something else.
    """
    if "audit" not in body:
        return None
    audit = body.fields("audit")
    replicas = tuple(_replica(row) for row in audit.array("rows"))
    text = audit.text("hashes", max_chars=REPLICA_DIGITS * len(replicas))
    if len(text) != REPLICA_DIGITS * len(replicas):
        raise ValueError(f"{len(text)} digits of hashes for {len(replicas)} replicas")
    hashes = tuple(text[i : i + REPLICA_DIGITS] for i in range(0, len(text), REPLICA_DIGITS))
    return AuditedReplicas(audit.text("host", max_chars=MAX_HOST_CHARS), replicas, hashes)


def order_line(replicas: Iterable[ReplicaAt]) -> bytes:
    """Return the line of a draft that orders the keeper to hash replicas."""
    return dumps(
        [
            [one.replica.tensor, one.replica.region, int(one.replica.is_trained), one.at, one.num_bytes]
            for one in replicas
        ]
    )


def parse_order(line: bytes, what: str) -> tuple[ReplicaAt, ...]:
    """Return the replicas that a line of a draft orders to hash.

    Raises:
        Corrupt: it is something else.
        ValueError: a row is something else.
    """
    rows = decode(line, what, max_bytes=MAX_DOCUMENT_BYTES)
    if type(rows) is not list:
        raise ValueError("an order is an array of rows")
    return tuple(_replica_at(row) for row in rows)


def _replica_at(row: Any) -> ReplicaAt:
    *replica, at, num_bytes = columns(row, 5, "a replica")
    return ReplicaAt(_replica(replica), *read_integers([at, num_bytes]))


def _replica(row: Any) -> Replica:
    tensor, region, is_trained = columns(row, 3, "a replica")
    read_integers([tensor])
    read_integers([region], at_most=MAX_RANKS - 1)
    read_integers([is_trained], at_most=1)
    return Replica(tensor, region, bool(is_trained))


def names_of(audit: AuditedReplicas, names: Sequence[str]) -> Iterable[tuple[str, Replica, str]]:
    """Yield the name, the replica and the hash of each replica.

    Args:
        names: of the tensors in the catalog of the rank.

    Raises:
        ValueError: the catalog does not have a tensor with such a number.
    """
    for replica, found in zip(audit.replicas, audit.hashes, strict=True):
        if replica.tensor >= len(names):
            raise ValueError(f"an audit of tensor {replica.tensor}, but the catalog has {len(names)}")
        yield names[replica.tensor], replica, found
