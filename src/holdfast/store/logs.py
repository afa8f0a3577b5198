"""Small logs for places that cannot append: kept in memory, and now and then rewritten whole."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError, RetryLater

PAUSE_S = 2.0
"""Appended lines wait this long for others, and longer in a long log: it is sent whole each time."""
BYTES_PER_PAUSE = 256 << 10
"""Each so many bytes of a log make it wait for one more `PAUSE_S`, which bounds what logs send per second."""
MAX_BYTES = 64 << 20
"""Longest log that is kept."""
LIMIT_S = 10.0
"""How long one write in the background, or at the end of the process, is tried."""

Load = Callable[[str, "float | None"], "bytes | None"]
Save = Callable[[str, bytes, "float | None"], None]


@dataclass(slots=True)
class _Log:
    tail: bytearray = field(default_factory=bytearray)  # what was appended by this process
    base: bytes | None = None  # what was there before; None while that is not known
    saved: int = 0  # bytes of the tail that the place holds
    due_s: float = 0.0  # when to write it, by the monotonic clock

    @property
    def is_dirty(self) -> bool:
        return self.saved < len(self.tail)


class Logs:
    """The logs of one place that this process appends to.

    A thread writes what was appended after a pause; `flush` writes it at once, and so does the end of the
    process, if it ends in order.

    Args:
        load: answers what an object holds, None if there is none, trying for so many seconds at most (None:
            the place's own limit); may raise HoldfastError.
        save: writes an object, likewise.
    """

    def __init__(self, load: Load, save: Save) -> None:
        self._load = load
        self._save = save
        self._logs: dict[str, _Log] = {}
        self._changed = threading.Condition()
        self._writing = threading.Lock()  # one write at a time: an older text must never replace a newer one
        self._thread: threading.Thread | None = None
        self._trouble: HoldfastError | None = None
        self._pid = os.getpid()

    def append(self, name: str, data: bytes) -> None:
        """Add `data` to a log; it is written soon.

        Raises:
            RetryLater: the last write failed (the data is kept and will be tried again), or the log is full
                (it is not).
        """
        with self._changed:
            log = self._logs.setdefault(name, _Log())
            if len(log.base or b"") + len(log.tail) + len(data) > MAX_BYTES:
                raise RetryLater(
                    f"The log {name} would exceed {MAX_BYTES} bytes; nothing was added.", key=name
                )
            if not log.is_dirty:
                length = len(log.base or b"") + len(log.tail)
                log.due_s = time.monotonic() + PAUSE_S * (1 + length / BYTES_PER_PAUSE)
            log.tail += data
            self._start()
            self._changed.notify_all()
            trouble, self._trouble = self._trouble, None
        if trouble is not None:
            message = f"The log {name} could not be written yet, and is kept in memory: {trouble}"
            raise RetryLater(message, key=name)

    def flush(self, prefix: str = "", *, limit_s: float | None = None) -> None:
        """Write the logs whose names begin with `prefix`, if they have changed.

        Raises:
            RetryLater: the place failed; what was appended is kept.

        Blocks: until they are written.
        """
        for name in self._dirty(prefix):
            self._write(name, limit_s)

    def forget(self, name: str) -> None:
        """Keep nothing of a log that was deleted or replaced."""
        if name in self._logs:
            with self._writing, self._changed:
                self._logs.pop(name, None)

    def _dirty(self, prefix: str = "", before_s: float | None = None) -> list[str]:
        with self._changed:
            return [
                name
                for name, log in self._logs.items()
                if log.is_dirty and name.startswith(prefix) and (before_s is None or log.due_s <= before_s)
            ]

    def _write(self, name: str, limit_s: float | None) -> None:
        with self._writing:
            log = self._logs.get(name)
            if log is None or not log.is_dirty:
                return
            if log.base is None:
                log.base = self._load(name, limit_s) or b""
            with self._changed:
                text, length = log.base + bytes(log.tail), len(log.tail)
            self._save(name, text, limit_s)
            with self._changed:
                log.saved = length

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
            self._thread.start()
            atexit.register(self._at_exit)

    def _run(self) -> None:
        while True:
            with self._changed:
                due = [log.due_s for log in self._logs.values() if log.is_dirty]
                self._changed.wait(max(0.0, min(due) - time.monotonic()) if due else None)
            for name in self._dirty(before_s=time.monotonic()):
                self._try_to_write(name)

    def _try_to_write(self, name: str) -> None:
        try:
            self._write(name, LIMIT_S)
        except HoldfastError as error:
            with self._changed:
                self._trouble = error
                if name in self._logs:
                    self._logs[name].due_s = time.monotonic() + PAUSE_S

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # the threads of a fork's parent are not here, and neither is its duty
        try:
            self.flush(limit_s=LIMIT_S)
        except HoldfastError as error:
            self._trouble = error  # nobody is left who could be told


_at: dict[str, Logs] = {}
_at_lock = threading.Lock()


def logs_at(url: str, load: Load, save: Save) -> Logs:
    """The logs of a place, the same for all stores of this process that lead there: each log has one text."""
    with _at_lock:
        return _at.setdefault(url, Logs(load, save))
