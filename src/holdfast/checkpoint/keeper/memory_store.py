"""Memory tier: file images that keepers of dead trainers still have in memory, as a read-only store."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from holdfast.checkpoint.keeper import packets
from holdfast.checkpoint.keeper.lockfile import SOCKET_SUFFIX, Lockfile, run_filter, running_keepers
from holdfast.checkpoint.keeper.messages import ArenaImages, FreeImages, Image, RequestImages
from holdfast.checkpoint.store.contract import ObjectInfo, Properties
from holdfast.checkpoint.store.tiered import ReadOnlyStore
from holdfast.errors import Corrupt, HoldfastError, NotFound
from holdfast.system.rawbytes import copy_to

_UNUSABLE = (HoldfastError, OSError, ValueError, LookupError)
"""Errors that an offer raises if it cannot be used."""


class MemoryTierStore(ReadOnlyStore):
    """File images of a home in the memory of keepers on this host.

    An image may have been overwritten in part by a later save: only a reader with its hashes can use it.

    Args:
        with_documents: also the parts of saves that peers have copied, which describe them without a store.
    """

    why_read_only = "the memory of a dead trainer's keeper is read-only."

    def __init__(self, home: str, *, with_documents: bool = False) -> None:
        self._with_documents = with_documents
        self.url = "memory"
        self.properties = Properties(
            survives_host=False,
            parallel_reads=len(os.sched_getaffinity(0)),  # reads do not wait for I/O
            zero_copy_views=True,
            has_documents=False,
        )
        self._images: dict[str, memoryview] = {}
        # Whatever is wrong with an offer or a lock file, the next tier has the checkpoint.
        with contextlib.suppress(*_UNUSABLE):
            for end in connect_to_offers(home):
                with end, contextlib.suppress(*_UNUSABLE):
                    packets.send(end, RequestImages())
                    self._receive(end)

    def _receive(self, end: socket.socket) -> None:
        while True:
            message, fds = packets.receive(end)
            try:
                if not isinstance(message, ArenaImages):
                    return
                self._map(fds[0], message.images)
            finally:
                for fd in fds:
                    os.close(fd)

    def _map(self, fd: int, images: Sequence[Image]) -> None:
        """Map an arena, and add the images that it still has memory for."""
        whole = [one for one in images if self._is_wanted(one) and _has_memory(fd, one)]
        if not whole:
            return
        # Copy on write: sinks read from writable memory only, and the arena must not be changed.
        mapped = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
        for image in whole:
            self._images[image.name] = mapped[image.offset : image.offset + image.num_bytes]

    def _is_wanted(self, image: Image) -> bool:
        return self._with_documents or not image.name.endswith(".json")

    def __bool__(self) -> bool:
        return bool(self._images)

    def close(self) -> None:
        """Unmap everything in the background. Views of it stay valid."""
        images, self._images = self._images, {}
        if images:
            threading.Thread(target=images.clear, name="holdfast-unmap").start()  # 40 ms for 1.5 GB here

    @override
    def read_view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        image = self._images.get(name)
        if image is None:
            raise NotFound(f"No keeper on this host has {name} in memory.", key=name)
        if offset + num_bytes > len(image):
            raise Corrupt(
                f"The keeper's {name} ends at {len(image)}; {num_bytes} bytes at {offset} were requested.",
                key=name,
            )
        return image[offset : offset + num_bytes]

    @override
    def get(self, name: str) -> bytes:
        return bytes(self.read_view(name, 0, self.size(name) or 0))

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        source = self.read_view(name, offset, len(buffer))
        if buffer:  # a slice assignment would hold the GIL
            copy_to(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), source)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        images = list(self._images.items())
        return (ObjectInfo(name, len(image)) for name, image in images if name.startswith(prefix))

    @override
    def size(self, name: str) -> int | None:
        image = self._images.get(name)
        return None if image is None else len(image)


def free_memory_tier(home: str) -> None:
    """Have the keepers of dead trainers free the images in their memory, and exit.

    Only for the attempt that has claimed the home; readers leave the images to it.
    """
    with contextlib.suppress(*_UNUSABLE):
        for end in connect_to_offers(home):
            with end, contextlib.suppress(OSError):
                packets.send(end, FreeImages())


def _has_memory(fd: int, image: Image) -> bool:
    """Return True if an arena has memory for an image. The trainer may have freed the pages."""
    if image.num_bytes < 1 or image.offset + image.num_bytes > os.fstat(fd).st_size:
        return False
    try:
        return os.lseek(fd, image.offset, os.SEEK_DATA) == image.offset
    except OSError:  # a hole up to the end
        return False


_REPLY_S = 5.0
"""Time within which a keeper replies, unless it is about to exit."""
_BACKLOG = 64


Images = Mapping[int, Sequence[Image]]
"""Images by the descriptor of the arena that they are in."""


def offer_images(lockfile: Lockfile, find: Callable[[], Images], *, timeout_s: float) -> None:
    """Send the descriptors of arenas, with their images, to every process of this user that asks for them.

    Args:
        find: returns the images at the time of a request.

    The lock file of this keeper then names the socket.

    Blocks: until a later attempt frees the memory, at most `timeout_s`.
    """
    path = lockfile.path.with_suffix(SOCKET_SUFFIX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, _short_path(path) as address:
        listener.bind(address)
        try:
            listener.listen(_BACKLOG)
            lockfile.set_done(held=path.name)
            _serve(listener, find, time.monotonic() + timeout_s)
        finally:
            path.unlink(missing_ok=True)


def _serve(listener: socket.socket, find: Callable[[], Images], deadline_s: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0 and selector.select(left_s):
            end, _ = listener.accept()
            end.settimeout(_REPLY_S)
            with end, contextlib.suppress(OSError, Corrupt):  # the client has exited, or is another program
                message, _ = packets.receive(end)
                if isinstance(message, FreeImages):
                    return
                if isinstance(message, RequestImages):
                    for fd, images in find().items():
                        packets.send(end, ArenaImages(tuple(images)), (fd,))


def connect_to_offers(home: str) -> Iterator[socket.socket]:
    """Yield a connection to each keeper on this host that offers images of a home. The caller closes it.

    Images of a run that was in the home before it was deleted are left out.
    """
    is_own = run_filter(home)
    for path, info in running_keepers(home):
        if not info.held or not is_own(info):
            continue
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # With settimeout, connect() would not wait for room in the listener's queue, but fail at once.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_REPLY_S), 0))
        try:
            with _short_path(path.with_name(info.held)) as address:
                end.connect(address)
        except OSError:  # it has just exited
            end.close()
            continue
        end.settimeout(_REPLY_S)
        yield end


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yield a short name of a path. A socket address has 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
