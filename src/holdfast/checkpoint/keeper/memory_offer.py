"""Offer of a keeper's memory: later attempts on this host receive the descriptors of its arenas."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.checkpoint.keeper import packets
from holdfast.checkpoint.keeper.host_processes import run_filter
from holdfast.checkpoint.keeper.lockfile import SOCKET_SUFFIX, Lockfile, running_keepers
from holdfast.checkpoint.keeper.messages import ArenaImages, EndOfImages, FreeImages, Image, RequestImages
from holdfast.errors import Corrupt

_REPLY_S = 5.0
"""Time within which a keeper replies, unless it is about to exit."""
_BACKLOG = 64


def offer_images(lockfile: Lockfile, arenas: Mapping[int, Sequence[Image]], *, timeout_s: float) -> None:
    """Send the descriptors of arenas to every process of this user that asks for them.

    Args:
        lockfile: lock file of this keeper, which then names the socket.
        arenas: images in each arena, by its descriptor.
        timeout_s: longest time.

    Blocks: until a later attempt frees the memory, at most `timeout_s`.
    """
    path = lockfile.path.with_suffix(SOCKET_SUFFIX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, _short_path(path) as address:
        listener.bind(address)
        try:
            listener.listen(_BACKLOG)
            lockfile.set_done(held=path.name)
            _serve(listener, arenas, time.monotonic() + timeout_s)
        finally:
            path.unlink(missing_ok=True)


def _serve(listener: socket.socket, arenas: Mapping[int, Sequence[Image]], deadline_s: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0 and selector.select(left_s):
            end, _ = listener.accept()
            end.settimeout(_REPLY_S)
            with (
                end,
                contextlib.suppress(OSError, Corrupt),
            ):  # the client may have exited, or be another program
                message, _ = packets.receive(end)
                if isinstance(message, FreeImages):
                    return
                if isinstance(message, RequestImages):
                    for fd, images in arenas.items():
                        packets.send(end, ArenaImages(tuple(images)), (fd,))
                    packets.send(end, EndOfImages())


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
