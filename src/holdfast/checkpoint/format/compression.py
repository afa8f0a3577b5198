"""Compressed form of a data file: blocks of byte planes, some as differences to a base, and an index.

The bytes of the same place in each number stand together: signs and exponents of neighbours are alike, while
the last bytes of mantissas are random. Each block can be read without the others. What proves that the bytes
are right are the hashes of the plain file.

Source: byte planes are the shuffle of HDF5 and Blosc; moonclip stores differences between checkpoints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import zstandard
from msgspec import Struct

from holdfast.errors import Corrupt

BLOCK_BYTES = 4 << 20
"""Plain bytes of each block but the last."""
_SAMPLE_BYTES = 32 << 10
"""Bytes in the middle of a block that each method is tried on."""
_WORTH = 0.8
"""Largest size of a difference, as a share of the block alone: readers of a difference read the base too."""
_LEVEL = 1  # higher ones take three times as long for one hundredth of the bytes
_ENTRY = struct.Struct("<IB")  # of the index: compressed bytes of a block, and its method
_PLAIN = 0  # method of a block that does not get smaller; the others are a width, perhaps with the flag below
_WIDTHS = (1, 2, 4)  # bytes of a number
_DIFFERENCE = 1 << 7


class CompressedBlock(Struct, frozen=True):
    """Place of a compressed block in its object, and its method."""

    start: int
    num_bytes: int
    method: int

    @property
    def needs_base(self) -> bool:
        """True if the block is a difference to the same bytes of the base."""
        return self.method & _DIFFERENCE != 0


def index_bytes(plain_bytes: int) -> int:
    """Return the length of the index at the end of the compressed form."""
    return -(-plain_bytes // BLOCK_BYTES) * _ENTRY.size


def compress(blocks: Iterable[tuple[memoryview, memoryview | None]]) -> Iterator[bytes]:
    """Yield the compressed form of a file, given its blocks, each with that of the base if there is one."""
    index = bytearray()
    for block, base in blocks:
        method, data = _compress_block(block, base)
        index += _ENTRY.pack(len(data), method)
        yield data
    yield bytes(index)


def _compress_block(block: memoryview, base: memoryview | None) -> tuple[int, bytes]:
    variants = {0: block}
    if base is not None and len(base) == len(block):
        variants[_DIFFERENCE] = _difference(block, base)
    middle = slice(len(block) // 16 * 8, len(block) // 16 * 8 + _SAMPLE_BYTES)  # from where a number begins
    sizes = {
        flag | width: len(_encode(variant[middle], width)) / (_WORTH if flag else 1)
        for flag, variant in variants.items()
        for width in _WIDTHS
    }
    method = min(sizes, key=sizes.__getitem__)
    data = _encode(variants[method & _DIFFERENCE], method & ~_DIFFERENCE)
    return (method, data) if len(data) < len(block) else (_PLAIN, bytes(block))


def _encode(block: memoryview, width: int) -> bytes:
    data = bytes(block)
    planes = b"".join(data[place::width] for place in range(width))
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes)


def _difference(block: memoryview, base: memoryview) -> memoryview:
    return (np.frombuffer(block, np.uint8) ^ np.frombuffer(base, np.uint8)).data


def read_index(index: bytearray, plain_bytes: int, object_bytes: int, what: str) -> list[CompressedBlock]:
    """Return the places of all blocks, checked against the size of the object.

    Raises:
        Corrupt: they do not fill the object, or have an unknown method.
    """
    found, start = [], 0
    for num_bytes, method in _ENTRY.iter_unpack(index):
        if num_bytes > BLOCK_BYTES or (method & ~_DIFFERENCE not in _WIDTHS and method != _PLAIN):
            raise Corrupt(
                f"{what} has a block of {num_bytes} bytes with method {method} in its index.", key=what
            )
        found.append(CompressedBlock(start, num_bytes, method))
        start += num_bytes
    if start + len(index) != object_bytes or len(index) != index_bytes(plain_bytes):
        raise Corrupt(f"{what} has {object_bytes} bytes; its index describes {start + len(index)}.", key=what)
    return found


def decompress(
    data: memoryview, block: CompressedBlock, num_bytes: int, base: memoryview | None, what: str
) -> memoryview:
    """Return the plain bytes of a block.

    Args:
        data: its compressed bytes.
        num_bytes: expected length of the plain ones.
        base: the same range of the base, if `block.needs_base`.

    Raises:
        Corrupt: the bytes are damaged, or have another length.
    """
    if block.method == _PLAIN:
        if len(data) != num_bytes:
            raise Corrupt(f"{what} has a block of {len(data)} bytes; expected {num_bytes}.", key=what)
        return data
    try:
        # A damaged frame may announce any size: the library would allocate it.
        if zstandard.get_frame_parameters(data).content_size != num_bytes:
            raise Corrupt(f"{what} has a block of another size than {num_bytes} bytes.", key=what)
        planes = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{what} is damaged: {error}.", key=what) from None
    width, start = block.method & ~_DIFFERENCE, 0
    plain = bytearray(num_bytes)
    for place in range(width):
        stop = start + len(range(place, num_bytes, width))
        plain[place::width] = planes[start:stop]
        start = stop
    return memoryview(plain) if base is None else _difference(memoryview(plain), base)
