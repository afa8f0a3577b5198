"""Append-only logs for stores that cannot append: kept in memory, and rewritten as a whole now and then."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

from msgspec import Struct, field

from holdfast.errors import HoldfastError, RetryLater

PAUSE_S = 2.0
"""Pause before appended lines are sent, longer for long logs, because each write sends the whole log."""
BYTES_PER_PAUSE = 256 << 10
"""Log size that adds one more `PAUSE_S` to the pause, which bounds the bytes sent per second."""
MAX_BYTES = 64 << 20
"""Maximum size of a log."""
LIMIT_S = 10.0
"""Time limit of one write in the background or at exit."""

Load = Callable[[str, "float | None"], "bytes | None"]
Save = Callable[[str, bytes, "float | None"], None]


class _Log(Struct):
    tail: bytearray = field(default_factory=bytearray)  # bytes that this process has appended
    base: bytes | None = None  # earlier content of the log, once it is loaded
    saved: int = 0  # bytes of the tail that are in the store
    due_s: float = 0.0  # time of the next write, by the monotonic clock

    @property
    def is_dirty(self) -> bool:
        return self.saved < len(self.tail)


class AppendLogs:
    """The logs of one store that this process appends to.

    A thread writes appended data after a pause. `flush` writes it at once, and so does a normal exit.

    `load` returns an object's bytes, or None if it does not exist; it retries for so many seconds (None: the
    store's own limit). `save` writes an object, likewise.
    """

    def __init__(self, load: Load, save: Save) -> None:
        self._load = load
        self._save = save
        self._logs: dict[str, _Log] = {}
        self._lock = threading.RLock()  # taken directly: Ctrl+C in Condition.__enter__ leaves it locked
        self._changed = threading.Condition(self._lock)
        self._writing = threading.Lock()  # one write at a time: an older text must never replace a newer one
        self._thread: threading.Thread | None = None
        self._trouble: HoldfastError | None = None
        self._pid = os.getpid()

    def append(self, name: str, data: bytes) -> None:
        """Append `data` to a log, to be written soon."""
        with self._lock:
            log = self._logs.setdefault(name, _Log())
            if len(log.base or b"") + len(log.tail) + len(data) > MAX_BYTES:
                raise RetryLater(
                    f"The log {name} would exceed {MAX_BYTES} bytes; nothing was appended.", key=name
                )
            if not log.is_dirty:
                length = len(log.base or b"") + len(log.tail)
                log.due_s = time.monotonic() + PAUSE_S * (1 + length / BYTES_PER_PAUSE)
            log.tail += data
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
                self._thread.start()
                atexit.register(self._at_exit)
            self._changed.notify_all()
            trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise RetryLater(
                f"The log {name} could not be written yet, and is kept in memory: {trouble}", key=name
            )

    def flush(self, prefix: str = "", *, limit_s: float | None = None) -> None:
        """Write the changed logs whose names begin with `prefix`.

        Blocks: until they are written.
        """
        for name in self._dirty(prefix):
            self._write(name, limit_s)

    def forget(self, name: str) -> None:
        """Discard a log that was deleted or replaced."""
        if name in self._logs:
            with self._writing, self._lock:
                self._logs.pop(name, None)

    def _dirty(self, prefix: str = "", before_s: float | None = None) -> list[str]:
        with self._lock:
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
            with self._lock:
                text, length = log.base + bytes(log.tail), len(log.tail)
            self._save(name, text, limit_s)
            with self._lock:
                log.saved = length

    def _run(self) -> None:
        while True:
            with self._lock:
                due = [log.due_s for log in self._logs.values() if log.is_dirty]
                self._changed.wait(max(0.0, min(due) - time.monotonic()) if due else None)
            for name in self._dirty(before_s=time.monotonic()):
                try:
                    self._write(name, LIMIT_S)
                except HoldfastError as error:
                    with self._lock:
                        self._trouble = error
                        if name in self._logs:
                            self._logs[name].due_s = time.monotonic() + PAUSE_S

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has neither the thread nor the duty to write
        try:
            self.flush(limit_s=LIMIT_S)
        except HoldfastError as error:
            self._trouble = error  # too late to report it


_at: dict[str, AppendLogs] = {}
_at_lock = threading.Lock()


def shared_logs(url: str, load: Load, save: Save) -> AppendLogs:
    """Return the logs of a URL, shared by all its stores in this process."""
    with _at_lock:
        return _at.setdefault(url, AppendLogs(load, save))
