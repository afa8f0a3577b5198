"""Packs: compressed files one after the other in one object, each checked when it is taken out; pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from holdfast.compiled.index import Packed
from holdfast.errors import Corrupt
from holdfast.format.hashes import digest

_LEVEL, _LARGE_LEVEL = 6, 1
_LARGE_BYTES = 8 << 20  # compiled headers; a better compression of them costs more than it saves


def pack(files: Mapping[str, bytes]) -> tuple[bytes, tuple[Packed, ...]]:
    """One object of all files, and where in it each is.

    Args:
        files: bytes by path.
    """
    whole, places = bytearray(), []
    for path, data in sorted(files.items()):
        packed = zlib.compress(data, _LARGE_LEVEL if len(data) > _LARGE_BYTES else _LEVEL)
        places.append((path, len(data), digest(data), len(whole), len(packed)))
        whole += packed
    named = digest(whole)
    return bytes(whole), tuple(
        Packed(path, num_bytes, file_hash, named, offset, packed_bytes)
        for path, num_bytes, file_hash, offset, packed_bytes in places
    )


def unpack(whole: bytes, file: Packed) -> bytes:
    """The bytes of a file, after comparing them with its hash.

    Raises:
        Corrupt: they are not what was packed.
    """
    stretch = memoryview(whole)[file.offset : file.offset + file.packed_bytes]
    try:
        # One byte more than there may be: what is longer is found without making all of it.
        data = zlib.decompressobj().decompress(stretch, file.num_bytes + 1)
    except zlib.error as error:
        raise Corrupt(f"{file.path} in the pack {file.pack} is damaged: {error}.", key=file.path) from error
    if len(data) != file.num_bytes or digest(data) != file.hash:
        raise Corrupt(
            f"{file.path} in the pack {file.pack} is damaged (expected {file.num_bytes} bytes of "
            f"xxh3:{file.hash}, found {len(data)} of xxh3:{digest(data)}).",
            key=file.path,
        )
    return data


def divide(sizes: Iterable[tuple[str, int]], max_bytes: int) -> list[list[str]]:
    """Paths in groups of at most so many bytes each; a file that is larger alone has a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for path, num_bytes in sizes:
        if not groups or num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(path)
        room -= num_bytes
    return groups
