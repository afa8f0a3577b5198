"""What a source offers: tensors by name, each as regions that can be read slab by slab."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from holdfast.errors import Corrupt, NotFound, RetryLater
from holdfast.format.cuts import Box
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.layout import Piece
from holdfast.restore.boxes import item_offset, runs


class Region(ABC):
    """A box of a tensor whose bytes lie somewhere in row-major order."""

    box: Box

    @abstractmethod
    def read(self, box: Box) -> memoryview:
        """Bytes of a box inside this one that is a single run of bytes in it.

        Raises:
            Corrupt: they are not there.
            RetryLater: they could not be read.
        """


@final
class FileRegion(Region):
    """A region that lies in a file as it is.

    Args:
        path: the file.
        start: byte of it at which the region begins.
        box: which region of the tensor it is.
        item_bytes: bytes of an element.
    """

    def __init__(self, path: Path, start: int, box: Box, item_bytes: int) -> None:
        self.box = box
        self._path = path
        self._start = start
        self._item_bytes = item_bytes

    def read(self, box: Box) -> memoryview:
        """See `Region.read`."""
        start = self._start + item_offset(box, self.box) * self._item_bytes
        return read_range(self._path, start, box.num_items * self._item_bytes)


def read_range(path: Path, start: int, num_bytes: int) -> memoryview:
    """Some bytes of a file.

    Raises:
        NotFound: there is no such file.
        Corrupt: the file ends before.
        RetryLater: it could not be read.
    """
    view, done = memoryview(b""), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Corrupt(f"{path} is not read: it is no regular file.", key=str(path))
            if start < 0 or num_bytes < 0 or start + num_bytes > status.st_size:
                message = f"{path} ends at byte {status.st_size}; {num_bytes} bytes at {start} were wanted."
                raise Corrupt(f"{message} It is truncated, or not the file that was written.", key=str(path))
            view = memoryview(bytearray(num_bytes))
            while done < num_bytes:
                got = os.preadv(fd, [view[done:]], start + done)
                if not got:
                    break
                done += got
        finally:
            os.close(fd)
    except FileNotFoundError:
        message = f"{path} does not exist, though something else of the source refers to it."
        raise NotFound(message, key=str(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise RetryLater(f"{path} could not be read: {error}.", key=str(path)) from error
    if done < num_bytes:
        message = f"{path} ends at byte {start + done}; {num_bytes} bytes at {start} were wanted."
        raise Corrupt(f"{message} It is truncated, or not the file that was written.", key=str(path))
    return view


@dataclass(frozen=True, slots=True)
class Offer:
    """A tensor of a source. `dtype` is a safetensors name; the regions cover `shape` exactly once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]

    @property
    def piece(self) -> Piece:
        """The whole tensor as a piece."""
        return Piece.whole(self.name, self.dtype, self.shape)

    def read_into(self, slab: Box, room: memoryview) -> None:
        """Fill `room` with the bytes of a slab of the tensor.

        Raises:
            Corrupt: the source does not hold all of it.
            RetryLater: the source could not be read.
        """
        covered = 0
        for region in self.regions:
            common = slab.overlap(region.box)
            if common is None:
                continue
            covered += common.num_items
            view = region.read(common)
            offsets = tuple(map(int.__sub__, common.offsets, slab.offsets))
            inside = Piece(self.name, self.dtype, slab.lengths, offsets, common.lengths)
            for start, at, num_bytes in runs(inside, 0, len(view)):
                room[at : at + num_bytes] = view[start : start + num_bytes]
        if covered != slab.num_items:
            message = (
                f"The source holds {covered} of {slab.num_items} elements of {self.name} at "
                f"{list(slab.offsets)} (shape {list(self.shape)}): a shard is missing, or two overlap."
            )
            raise Corrupt(message, key=self.name)


def whole_offer(name: str, dtype: str, shape: tuple[int, ...], path: Path, start: int) -> Offer:
    """A tensor that lies whole in a file."""
    region = FileRegion(path, start, Box.whole(shape), ITEM_BYTES[dtype])
    return Offer(name, dtype, shape, (region,))


@dataclass(frozen=True, slots=True)
class Offered:
    """All that a source offers.

    `values` are by top-level key, with a `TensorRef` where a tensor is; what is no more than a dict of
    tensors is left out or empty, since the names tell it. `tied` says which names show another one's bytes.
    """

    tensors: tuple[Offer, ...]
    tied: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Offer]:
        return iter(self.tensors)
