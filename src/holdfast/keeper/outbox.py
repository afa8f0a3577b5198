"""Sends messages to a keeper without waiting for it: what its socket has no room for waits in a queue."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.keeper import protocol
from holdfast.keeper.protocol import Message

_MAX_WAITING = 4096
"""Messages in the queue; further notes for the history are dropped and counted, saves never are.

Saves in the queue are bounded by the staging memory that they hold.
"""
_LOOK_S = 1.0  # pause between looks whether the outbox was closed meanwhile


@dataclass(slots=True)
class _Waiting:
    message: Message
    fds: tuple[int, ...]  # duplicates, closed when they are sent or dropped
    sent: Callable[[], None] | None


class Outbox:
    """The sending half of one keeper's socket.

    A message is sent at once where the socket has room: then it outlives this process. Else a thread sends it
    later, in order.

    Args:
        end: this side of the socket; closed by its owner, after `close`.
    """

    def __init__(self, end: socket.socket) -> None:
        self.num_dropped = 0  # notes for the history that found no room
        self._end = end
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __bool__(self) -> bool:
        """Whether any message is waiting for room."""
        return bool(self._waiting)

    def send(
        self, message: Message, fds: tuple[int, ...] = (), *, sent: Callable[[], None] | None = None
    ) -> None:
        """Send a message now or later; a keeper that is gone gets none, and its successor is sent it again.

        Args:
            message: for the keeper.
            fds: sent with it; may be closed after the call.
            sent: called when the socket has taken it, perhaps in another thread.

        Blocks: no.
        """
        with self._changed:
            if self._closed:
                return
            if self._waiting or not self._try(message, fds):
                self._queue(message, fds, sent)
                return
            if self._closed:
                return
        if sent is not None:
            sent()

    def _try(self, message: Message, fds: tuple[int, ...]) -> bool:
        """Return False if the socket has no room."""
        try:
            protocol.send(self._end, message, fds, flags=socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            self._closed = True  # the keeper is gone
        return True

    def _queue(self, message: Message, fds: tuple[int, ...], sent: Callable[[], None] | None) -> None:
        if len(self._waiting) >= _MAX_WAITING and message.get("op") == "note":
            self.num_dropped += 1
            return
        self._waiting.append(_Waiting(message, tuple(map(os.dup, fds)), sent))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-outbox", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        room = select.poll()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                room.register(self._end, select.POLLOUT)
                room.poll(_LOOK_S * 1000)
            self._send_waiting()

    def _send_waiting(self) -> None:
        while True:
            with self._changed:
                if self._closed or not self._waiting:
                    return
                first = self._waiting[0]
                if not self._try(first.message, first.fds):
                    return
                if self._closed:
                    return  # the keeper is gone; `close` drops what is left
                self._waiting.popleft()
            _close(first.fds)
            if first.sent is not None:
                first.sent()

    def close(self) -> None:
        """Drop what is waiting and send nothing any more."""
        with self._changed:
            self._closed = True
            for one in self._waiting:
                _close(one.fds)
            self._waiting.clear()
            self._changed.notify_all()


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
