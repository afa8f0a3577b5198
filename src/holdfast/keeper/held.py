"""The memory tier: file images that keepers of dead trainers still have mapped, for the next attempt."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Corrupt, HoldfastError, NotFound
from holdfast.keeper import protocol
from holdfast.keeper.presence import Presence, living
from holdfast.store.contract import ObjectInfo, Properties
from holdfast.store.read_only import ReadOnlyStore

_UNUSABLE = (OSError, ValueError, TypeError, LookupError)
"""What using a keeper's answer may raise."""
_ANSWER_S = 5.0  # a keeper that is asked answers at once, or it is about to end


@dataclass(frozen=True, slots=True)
class Image:
    """A data file as it lies in an arena. The arena may have been partly overwritten since: check hashes."""

    name: str
    offset: int
    num_bytes: int


def offer(presence: Presence, arenas: Mapping[int, Iterable[Image]], *, hold_s: float) -> None:
    """Give whoever asks on this host the descriptors of arenas, until told to end.

    Args:
        presence: the trace of this keeper, which then says where to ask.
        arenas: by the descriptor of the arena, the images in it.
        hold_s: how long at most.

    Blocks: until a successor says that it needs nothing more, at most `hold_s`.
    """
    path = presence.path.with_suffix(".sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door, _short(path) as address:
        door.bind(address)
        try:
            door.listen(64)
            presence.set_done(held=path.name)
            _answer_all(door, arenas, time.monotonic() + hold_s)
        finally:
            path.unlink(missing_ok=True)


def _answer_all(door: socket.socket, arenas: Mapping[int, Iterable[Image]], deadline_s: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0 and selector.select(left_s):
            end, _ = door.accept()
            end.settimeout(_ANSWER_S)
            with end, contextlib.suppress(OSError, Corrupt):  # who asked may be gone, or be no trainer
                message, _ = protocol.receive(end)
                if message is None:
                    continue
                if message.get("op") == "end":
                    return
                for fd, images in arenas.items():
                    rows = [[image.name, image.offset, image.num_bytes] for image in images]
                    protocol.send(end, {"images": rows}, (fd,))
                protocol.send(end, {"images": None})


class HeldStore(ReadOnlyStore):
    """What keepers of dead trainers on this host hold of a home, as objects that can only be read.

    Their bytes may be those of a later save in part: only a reader that knows their hashes can use them.

    Args:
        home: URL of the home.
    """

    def __init__(self, home: str) -> None:
        self.url = "memory"
        self.properties = Properties(
            survives_host=False,
            parallel_reads=len(os.sched_getaffinity(0)),  # nothing is waited for
            zero_copy_views=True,
        )
        self._home = home
        self._images: dict[str, memoryview] = {}
        # Whatever is wrong with what a keeper offers, or with its trace: there is a next tier.
        with contextlib.suppress(HoldfastError, *_UNUSABLE):
            for end in _doors(home):
                with end, contextlib.suppress(*_UNUSABLE):
                    protocol.send(end, {"op": "take"})
                    self._take(end)

    def _take(self, end: socket.socket) -> None:
        while True:
            message, fds = protocol.receive(end)
            if message is None or message.get("images") is None:
                return
            try:
                self._map(fds[0], message["images"])
            finally:
                for fd in fds:
                    os.close(fd)

    def _map(self, fd: int, images: Iterable[tuple[str, int, int]]) -> None:
        """Take the images of one arena that are still whole there."""
        there = [
            Image(name, offset, num_bytes)
            for name, offset, num_bytes in images
            if _has(fd, offset, num_bytes)
        ]
        if not there:
            return
        # Copy on write: sinks need writable memory to read from, and nothing of it shall change.
        mapped = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
        for image in there:
            self._images[image.name] = mapped[image.offset : image.offset + image.num_bytes]

    def __bool__(self) -> bool:
        return bool(self._images)

    def close(self) -> None:
        """Unmap everything, in the background. Views that were taken stay."""
        images, self._images = self._images, {}
        if images:
            threading.Thread(target=images.clear, name="holdfast-unmap").start()  # 40 ms for 1.5 GB here

    def read_view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """See `Store.read_view`: the keeper's own memory, which stays as long as the view."""
        image = self._images.get(name)
        if image is None:
            raise NotFound(f"No keeper on this host holds {name}.", key=name)
        if offset + num_bytes > len(image):
            message = f"The keeper's {name} ends at {len(image)}; {num_bytes} bytes at {offset} were wanted."
            raise Corrupt(message, key=name)
        return image[offset : offset + num_bytes]

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        size = self.size(name)
        return bytes(self.read_view(name, 0, size or 0))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        source = self.read_view(name, offset, len(buffer))
        if buffer:  # not a slice assignment: that would hold the interpreter lock
            first = ctypes.c_char.from_buffer
            ctypes.memmove(ctypes.addressof(first(buffer)), ctypes.addressof(first(source)), len(buffer))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        return (ObjectInfo(n, len(image)) for n, image in list(self._images.items()) if n.startswith(prefix))

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        image = self._images.get(name)
        return None if image is None else len(image)

    @property
    def reason(self) -> str:
        """See `ReadOnlyStore.reason`."""
        return "the memory of a dead trainer's keeper is only read."


def _has(fd: int, offset: int, num_bytes: int) -> bool:
    """Return whether an arena has memory for an image; its trainer may have given the pages back."""
    if offset < 0 or num_bytes < 1 or offset + num_bytes > os.fstat(fd).st_size:
        return False
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) == offset
    except OSError:  # nothing but a hole from there on
        return False


def end_held(home: str) -> None:
    """Let the keepers of dead trainers end, which hold what they have in memory for the next attempt.

    For the attempt that has claimed the home: a mere reader must leave it to that one.
    """
    with contextlib.suppress(HoldfastError, *_UNUSABLE):
        for end in _doors(home):
            with end, contextlib.suppress(OSError):
                protocol.send(end, {"op": "end"})


def _doors(home: str) -> Iterator[socket.socket]:
    """A connection to each keeper on this host that holds something of `home`."""
    for path, trace in living(home):
        if not trace.held:
            continue
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.settimeout(_ANSWER_S)
        try:
            with _short(path.with_name(trace.held)) as address:
                end.connect(address)
        except OSError:  # it has just ended
            end.close()
            continue
        yield end


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of `path` that is short enough for a socket's address, which takes 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
