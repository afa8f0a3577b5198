"""Arenas of the trainer, mapped by the keeper, and the file images that they hold."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.checkpoint.keeper.messages import Image


@dataclass(slots=True)
class _Arena:
    fd: int
    memory: mmap.mmap
    images: tuple[Image, ...] = ()


class MappedArenas:
    """Mappings of arenas by number."""

    def __init__(self) -> None:
        self._arenas: dict[int, _Arena] = {}

    def map(self, number: int, fd: int) -> memoryview:
        """Return the memory of an arena, mapped at its first use.

        Args:
            fd: its descriptor, which this object closes.
        """
        if number in self._arenas:
            os.close(fd)
        else:
            self._arenas[number] = _Arena(fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        return memoryview(self._arenas[number].memory)

    def unmap_except(self, numbers: Collection[int]) -> None:
        """Unmap the arenas that the trainer has freed: a mapping keeps their memory in use."""
        for number in self._arenas.keys() - set(numbers):
            with contextlib.suppress(BufferError):  # the traceback of a failed write refers to it: next time
                self._arenas[number].memory.close()
                os.close(self._arenas.pop(number).fd)

    def set_images(self, number: int, images: tuple[Image, ...]) -> None:
        """Record the images in an arena. They stay until the next save is copied over them."""
        self._arenas[number].images = images

    def images(self) -> dict[int, tuple[Image, ...]]:
        """Return the images of each arena by its descriptor."""
        return {arena.fd: arena.images for arena in self._arenas.values() if arena.images}
