"""Packs: compressed files joined into one object, each verified when it is extracted; pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from holdfast.checkpoint.format.hashes import digest
from holdfast.errors import Corrupt
from holdfast.watch.compiled.index import PackedFile

_LEVEL, _LARGE_LEVEL = 6, 1
_LARGE_BYTES = 8 << 20  # precompiled headers; better compression costs more than it saves


def pack(files: Mapping[str, bytes]) -> tuple[bytes, tuple[PackedFile, ...]]:
    """Pack files into one object, and return their positions in it."""
    whole, positions = bytearray(), []
    for path, data in sorted(files.items()):
        packed = zlib.compress(data, _LARGE_LEVEL if len(data) > _LARGE_BYTES else _LEVEL)
        positions.append((path, len(data), digest(data), len(whole), len(packed)))
        whole += packed
    named = digest(whole)
    return bytes(whole), tuple(
        PackedFile(path, num_bytes, file_hash, named, offset, packed_bytes)
        for path, num_bytes, file_hash, offset, packed_bytes in positions
    )


def unpack(whole: bytes, file: PackedFile) -> bytes:
    """Return the contents of a file, verified against its hash.

    Raises:
        Corrupt: the contents do not match.
    """
    stretch = memoryview(whole)[file.offset : file.offset + file.packed_bytes]
    try:
        # One byte more than allowed: longer data are detected without decompressing all of them.
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
    """Divide paths into groups of at most `max_bytes` each. A larger file has its own group."""
    groups: list[list[str]] = []
    room = 0
    for path, num_bytes in sizes:
        if not groups or num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(path)
        room -= num_bytes
    return groups
