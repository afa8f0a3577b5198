"""Copies of other ranks' files in the memory of a keeper, limited and recycled."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Collection

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.part import DataFile, Part
from holdfast.checkpoint.keeper.messages import Image
from holdfast.errors import RetryLater
from holdfast.system.units import format_bytes


class Room(Struct):
    """A memfd for one copy."""

    fd: int
    memory: mmap.mmap

    @classmethod
    def make(cls, num_bytes: int) -> Room:
        """Allocate memory, or raise RetryLater: later writes to missing memory would end this process."""
        fd = os.memfd_create("holdfast-copy")
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(fd, mmap.mmap(fd, num_bytes))
        except OSError as error:
            os.close(fd)
            raise RetryLater(
                f"the host of the peer has no {format_bytes(num_bytes)} of memory: {error.strerror}"
            ) from error


class HeldCopy(Struct):
    """Copy of the files of one rank of one save."""

    part: Part
    room: Room
    images: tuple[Image, ...]  # of the data file, that of the frozen tensors if there is one, and the part
    is_whole: bool = False  # all bytes are there, and match their hashes

    def view(self, number: int) -> memoryview:
        """Return the memory of an image."""
        image = self.images[number]
        return memoryview(self.room.memory)[image.offset : image.offset + image.num_bytes]

    @property
    def files(self) -> list[DataFile]:
        """The files of tensors, in the order of the images."""
        return [self.part.file] if self.part.frozen is None else [self.part.file, self.part.frozen]


class CopyMemory:
    """Memory for the copies of other ranks. Threads may share it.

    Args:
        limit_bytes: of all copies together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._copies: dict[int, list[HeldCopy]] = {}  # by the rank that wrote them
        self._free: list[Room] = []  # to be used again: new pages take a second per GB
        self._lock = threading.Lock()

    def begin(self, part: Part, document: bytes, keep: Collection[int]) -> HeldCopy:
        """Return a new copy of a rank's files without their bytes. Drops earlier ones but those to keep.

        Raises:
            RetryLater: there is no memory for it.
        """
        images, end = _arrange(part, len(document))
        with self._lock:
            own = self._copies.setdefault(part.rank, [])
            for copy in [one for one in own if one.part.step not in keep or not one.is_whole]:
                own.remove(copy)
                self._free.append(copy.room)
            copy = HeldCopy(part, self._take_room(end), images)
            own.append(copy)
        copy.view(-1)[:] = document
        return copy

    def _take_room(self, num_bytes: int) -> Room:
        for room in self._free:
            if num_bytes <= len(room.memory) <= 2 * num_bytes:
                self._free.remove(room)
                return room
        while self._free:
            room = self._free.pop()
            room.memory.close()
            os.close(room.fd)
        used = sum(len(copy.room.memory) for own in self._copies.values() for copy in own)
        if used + num_bytes > self._limit_bytes:
            raise RetryLater(
                f"its memory for copies is full: {format_bytes(used)} of {format_bytes(self._limit_bytes)} "
                f"are in use, and {format_bytes(num_bytes)} more are needed. Raise Peers(memory=)"
            )
        return Room.make(num_bytes)

    def frozen_like(self, wanted: HeldCopy) -> memoryview | None:
        """Return the file of frozen tensors of an earlier copy, if it has the same bytes."""
        with self._lock:
            for copy in self._copies.get(wanted.part.rank, ()):
                if copy.is_whole and copy.part.frozen == wanted.part.frozen:
                    return copy.view(1)
        return None

    def images(self) -> dict[int, tuple[Image, ...]]:
        """Return the images of all whole copies by the descriptor of their memory."""
        with self._lock:
            return {
                copy.room.fd: copy.images for own in self._copies.values() for copy in own if copy.is_whole
            }


def _arrange(part: Part, part_bytes: int) -> tuple[tuple[Image, ...], int]:
    """Return the images of a copy, each from the start of a page, and the size of all."""
    key = part.step, part.attempt, part.rank
    sizes = [(names.data(*key), part.file.num_bytes)]
    sizes += [] if part.frozen is None else [(names.frozen(*key), part.frozen.num_bytes)]
    images, end = list[Image](), 0
    for name, num_bytes in (*sizes, (names.part(*key), part_bytes)):
        images.append(Image(name, end, num_bytes))
        end += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return tuple(images), end
