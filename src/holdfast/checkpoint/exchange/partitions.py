"""Partitions: objects that a trainer saves as files, stored as plain trees with a record of their kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from holdfast.checkpoint.exchange.packed_value import Packed
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.state.tree import insert_tensors, references
from holdfast.errors import Corrupt, InvalidInput


@contextlib.contextmanager
def checked_metadata(name: str) -> Iterator[None]:
    """Raise Corrupt for errors of the block, which are caused by a partition's metadata."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(
            f"The metadata of the partition {name!r} is damaged, or a trainer's adapter did not write it: "
            f"{error!r}.",
            key=name,
        ) from error


def partition_key(name: Any, reserved: Collection[str]) -> str:
    """Return the key of a partition: its name, with characters escaped that keys cannot have.

    Args:
        name: name of the partition.
        reserved: keys that the partition must not get.
    """
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"A partition's name must be a non-empty string, not {name!r}.")
    key = name.replace("%", "%25").replace("/", "%2F").replace("@", "%40")
    return f"%{ord(key[0]):02X}{key[1:]}" if key in reserved else key


def describe_partitions(partitions: Mapping[str, tuple[str, Packed]]) -> dict[str, Any]:
    """Return the metadata of partitions, by name.

    Args:
        partitions: key in the checkpoint and packed value of each partition, by name.
    """
    return {
        name: {
            "key": key,
            "kinds": [[list(path), kind, detail] for path, kind, detail in packed.kinds],
            "devices": [[list(path), device] for path, device in packed.devices.items()],
        }
        for name, (key, packed) in partitions.items()
    }


def packed_of(name: str, metadata: Any, tree: Any) -> Packed:
    """Return a partition from its metadata and its tree."""
    with checked_metadata(name):
        kinds = [(tuple(path), kind, detail) for path, kind, detail in metadata["kinds"]]
        devices = {tuple(path): str(device) for path, device in metadata["devices"]}
    return Packed(tree, kinds, devices)


def read_partition(checkpoint: Checkpoint, rank: int, meta_key: str, name: str) -> Packed:
    """Return a partition that a rank has saved, on the CPU and verified.

    Args:
        checkpoint: opened checkpoint.
        rank: rank that has saved it.
        meta_key: top-level key with the metadata of all partitions.
        name: name of the partition.
    """
    values = checkpoint.values(rank)
    with checked_metadata(name):
        metadata = values[meta_key]["partitions"][name]
        tree = values[metadata["key"]]
    packed = packed_of(name, metadata, tree)
    names = list(references(tree))
    found = checkpoint.tensors(rank, keys=names) if names else {}
    packed.tree = insert_tensors(tree, found.__getitem__)
    return packed
