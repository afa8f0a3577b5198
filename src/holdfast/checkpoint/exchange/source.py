"""Tensors and values of a source: each tensor has readers of its regions."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format.layout import Region, Shard, item_offset
from holdfast.checkpoint.restore.slices import copy_part
from holdfast.errors import Corrupt, NotFound, RetryLater


class RegionReader(Struct, frozen=True):
    """Reader of a region of a tensor; `read` returns the bytes of a region that is contiguous inside it."""

    region: Region
    read: Callable[[Region], memoryview]


def file_reader(path: Path, start: int, region: Region, item_bytes: int) -> RegionReader:
    """Return a reader of a region whose bytes are in a file, from `start` on."""

    def read(part: Region) -> memoryview:
        at = start + item_offset(part, region) * item_bytes
        return read_range(path, at, part.num_items * item_bytes)

    return RegionReader(region, read)


def read_range(path: Path, start: int, num_bytes: int) -> memoryview:
    """Read a range of a file."""
    view, done = memoryview(b""), 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Corrupt(f"{path} is not a regular file, so it was not read.", key=str(path))
            if start < 0 or num_bytes < 0 or start + num_bytes > status.st_size:
                raise _too_short(path, status.st_size, start, num_bytes)
            view = memoryview(bytearray(num_bytes))
            while done < num_bytes:
                count = os.preadv(fd, [view[done:]], start + done)
                if not count:
                    break
                done += count
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise NotFound(
            f"{path} does not exist, but another file of the source refers to it.", key=str(path)
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise RetryLater(f"{path} could not be read: {error}.", key=str(path)) from error
    if done < num_bytes:
        raise _too_short(path, start + done, start, num_bytes)
    return view


def _too_short(path: Path, end: int, start: int, num_bytes: int) -> Corrupt:
    return Corrupt(
        f"{path} ends at byte {end}, but {num_bytes} bytes at {start} were expected. It is truncated, or "
        "was replaced.",
        key=str(path),
    )


class SourceTensor(Struct, frozen=True):
    """Tensor of a source. `dtype` is a safetensors name; the readers' regions cover `shape` exactly once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    readers: tuple[RegionReader, ...]

    @property
    def shard(self) -> Shard:
        """The whole tensor as one shard."""
        return Shard.whole(self.name, self.dtype, self.shape)

    def read_into(self, region: Region, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a region of the tensor."""
        covered = 0
        for reader in self.readers:
            common = region.overlap(reader.region)
            if common is None:
                continue
            covered += common.num_items
            view = reader.read(common)
            offsets = tuple(map(int.__sub__, common.offsets, region.offsets))
            inside = Shard(self.name, self.dtype, region.sizes, offsets, common.sizes)
            copy_part(buffer, inside, 0, view)
        if covered != region.num_items:
            raise Corrupt(
                f"The source contains {covered} of {region.num_items} elements of {self.name} at "
                f"{list(region.offsets)} (shape {list(self.shape)}): a shard is missing, or two overlap.",
                key=self.name,
            )


class Source(Struct, frozen=True):
    """Contents of a source.

    `values` are by top-level key, with a `TensorRef` in place of each tensor. A plain dict of tensors is
    omitted or empty, because the names of the tensors imply it. `tied` maps names to the name with the same
    bytes.
    """

    tensors: tuple[SourceTensor, ...]
    tied: dict[str, str] = {}
    values: dict[str, Any] = {}

    def __iter__(self) -> Iterator[SourceTensor]:
        return iter(self.tensors)
