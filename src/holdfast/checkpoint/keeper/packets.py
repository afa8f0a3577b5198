"""Packets of one message each over a Unix socket, and an outbox whose `send` never waits."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.keeper.messages import MAX_MESSAGE_BYTES, Message, RecordEvent, encode, parse

_MAX_FDS = 4


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the borders of packets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
    """Send a message.

    Blocks: while the socket is full, unless `flags` of sendmsg(2) has MSG_DONTWAIT.
    """
    send_encoded(end, encode(message), fds, flags=flags)


def send_encoded(end: socket.socket, packet: bytes, fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
    """Send an encoded message, as `send` does."""
    # Not socket.send_fds: up to Python 3.13 it drops its flags, and would block.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([packet], rights, flags)


def receive(end: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and its descriptors, which the caller must close; None if the end is closed.

    Blocks: until a packet arrives.
    """
    try:
        packet, fds, _, _ = _receive_packet(end)
    except ConnectionError:
        return None, []
    message = None
    try:
        message = parse(packet) if packet else None
    finally:
        if message is None:
            for fd in fds:
                os.close(fd)
    return message, ([] if message is None else fds)


def _receive_packet(end: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """Receive the next packet, even if its sender has died since."""
    try:
        return socket.recv_fds(end, MAX_MESSAGE_BYTES, _MAX_FDS)
    except ConnectionResetError:
        # Reported once, if the other end died before it had received everything, and ahead of the packets
        # that it had sent, which can still be received.
        return socket.recv_fds(end, MAX_MESSAGE_BYTES, _MAX_FDS)


_MAX_QUEUED = 4096
"""Messages in the queue. Further events are dropped; saves never are.

Saves in the queue are limited by the staging memory that they hold.
"""
_CHECK_S = 1.0
"""Pause between checks whether the outbox was closed."""
_PAUSE_S = 0.05
"""Pause after a refusal. A socket may be writable by poll(2) and still have no room for a packet."""
_NO_ROOM = (errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)
"""Refusals that end: of the socket's buffer, and of descriptors that no process has received yet."""


class _Queued(Struct, frozen=True):
    packet: bytes
    fds: tuple[int, ...]  # duplicates, closed once they are sent or dropped
    on_sent: Callable[[], None] | None


class Outbox:
    """Sending half of a connection to a keeper.

    A message is sent at once if the socket has room, so that it outlives this process. Otherwise a thread
    sends it later, in order. The owner of the socket closes it, after `close`.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._queue: deque[_Queued] = deque()
        self._lock = threading.RLock()  # taken directly: Ctrl+C in Condition.__enter__ leaves it locked
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __bool__(self) -> bool:
        """Return True if messages are queued."""
        return bool(self._queue)

    def send(
        self, message: Message, fds: tuple[int, ...] = (), *, on_sent: Callable[[], None] | None = None
    ) -> None:
        """Send a message now or later, without blocking. The successor of a dead keeper is sent it again.

        Args:
            fds: descriptors to send with it. The caller may close them after the call.
            on_sent: called once the socket has the message, possibly in another thread. It must not block.
        """
        with self._lock:
            if self._is_closed:
                return
            packet = encode(message)  # once: a message that waits is tried many times
            if self._queue or not self._try_send(packet, fds):
                self._enqueue(packet, fds, on_sent, may_drop=isinstance(message, RecordEvent))
                return
            if on_sent is not None and not self._is_closed:
                on_sent()

    def _try_send(self, packet: bytes, fds: tuple[int, ...]) -> bool:
        """Return False if the socket has no room."""
        try:
            send_encoded(self._end, packet, fds, flags=socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno in _NO_ROOM:
                return False
            self._is_closed = True  # the keeper has died
        return True

    def _enqueue(
        self, packet: bytes, fds: tuple[int, ...], on_sent: Callable[[], None] | None, *, may_drop: bool
    ) -> None:
        if len(self._queue) >= _MAX_QUEUED and may_drop:
            return
        self._queue.append(_Queued(packet, tuple(map(os.dup, fds)), on_sent))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-outbox", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        poll = select.poll()
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
            with contextlib.suppress(OSError, ValueError):  # the socket was closed meanwhile
                poll.register(self._end, select.POLLOUT)
                poll.poll(_CHECK_S * 1000)
            if not self._send_queued():
                time.sleep(_PAUSE_S)

    def _send_queued(self) -> bool:
        """Send what the socket has room for; return False if it refuses a message."""
        while True:
            with self._lock:
                if self._is_closed or not self._queue:
                    return True
                first = self._queue[0]
                if not self._try_send(first.packet, first.fds):
                    return False
                if self._is_closed:
                    return True  # the keeper has died; `close` drops the rest
                self._queue.popleft()
                if first.on_sent is not None:
                    first.on_sent()  # before `close` can return: then it is settled what the keeper received
                self._changed.notify_all()
            _close(first.fds)

    def flush(self, timeout_s: float) -> None:
        """Wait until all queued messages are sent, at most `timeout_s`."""
        with self._lock:
            self._changed.wait_for(lambda: self._is_closed or not self._queue, timeout_s)

    def close(self) -> None:
        """Drop all queued messages, and send no others."""
        with self._lock:
            self._is_closed = True
            for queued in self._queue:
                _close(queued.fds)
            self._queue.clear()
            self._changed.notify_all()


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
