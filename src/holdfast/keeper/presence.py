"""The traces that living keepers leave on their host, so that the next attempt can wait for their work."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.documents import decode_dataclass
from holdfast.errors import Corrupt, Denied, RetryLater, Unsupported
from holdfast.home.writer import LiveTrainer
from holdfast.privacy import is_own, is_private, make_private

_POLL_S = 0.02
_DEPARTURE_S = 2.0  # a trainer that was just killed may take a moment to be gone
_TRACE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """What a keeper's trace says."""

    attempt: int
    rank: int
    trainer_pid: int
    trainer_start: int  # clock ticks since boot: tells a reused pid from the trainer
    busy: bool  # has data that is not yet in the nearest store
    is_done: bool = False  # nobody need wait for it: the nearest tier has all, and no more will come
    held: str = ""  # name of the socket, beside the trace, where it offers what it still has in memory


def home_dir(home: str) -> Path:
    """Return a private folder on this host for the traces of one home, made if it is missing.

    It is below $HOLDFAST_RUNTIME_DIR, else below the first of a few fixed places that another user has not
    taken. Not $TMPDIR and not $XDG_RUNTIME_DIR: two attempts of one run must agree on it, and those may
    differ between a login, a scheduler and a service.

    Raises:
        Unsupported: none of these can be a private folder.
    """
    for folder in _runtime_dirs():
        if _is_usable(folder) and make_private(folder / _name_of(home)):
            return folder / _name_of(home)
    first = _runtime_dirs()[0]
    with contextlib.suppress(FileExistsError), _usable(first):
        if not os.path.lexists(first) or is_own(first):
            (first / _name_of(home)).mkdir(mode=0o700, parents=True)
    tried = ", ".join(map(str, _runtime_dirs()))
    raise Unsupported(
        f"None of {tried} is, or can be made, a folder that only you can change. Another user may have made "
        "it first. Set HOLDFAST_RUNTIME_DIR to a folder of yours on this host."
    )


def _runtime_dirs() -> tuple[Path, ...]:
    named = os.environ.get("HOLDFAST_RUNTIME_DIR")
    if named:
        return (Path(os.path.realpath(named)),)
    user = os.geteuid()
    return (
        Path(f"/tmp/holdfast-{user}"),
        Path(f"/run/user/{user}/holdfast"),
        Path(f"/dev/shm/holdfast-{user}"),
        Path(f"/var/tmp/holdfast-{user}"),
    )


def _is_usable(folder: Path) -> bool:
    """Return True for a folder of this user, made if it is missing, in which no other user can write."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents="HOLDFAST_RUNTIME_DIR" in os.environ, exist_ok=True)
    return is_own(folder) and not folder.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _name_of(home: str) -> str:
    return hashlib.sha256(os.fsencode(home)).hexdigest()[:16]


def _traces(home: str) -> Iterator[Path]:
    """Yield the files of all traces: which place is taken may differ from attempt to attempt."""
    for folder in _runtime_dirs():
        mine = folder / _name_of(home)
        if is_own(folder) and is_private(mine):
            yield from mine.glob("*.trace")


@contextlib.contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Turn errors of the folder for traces into ours.

    Raises:
        Denied: it may not be written to.
        RetryLater: it is full, or failed.
    """
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        kind = Denied if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else RetryLater
        raise kind(
            f"{folder}, where keepers leave their traces, cannot be used: {error.strerror}. Nothing was "
            "saved. Make room or set permissions there, or set HOLDFAST_RUNTIME_DIR to another folder of "
            "this host."
        ) from error


def process_start(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


class Presence:
    """A keeper's trace: a locked file that says what it is doing. The lock ends with its last holder.

    The trainer makes it before it starts the keeper and hands the locked descriptor over, so that at no
    moment a keeper is alive without a trace.
    """

    def __init__(self, path: Path, fd: int, trace: Trace) -> None:
        self.path = path
        self.fd = fd
        self._trace = trace

    @classmethod
    def claim(cls, home: str, trace: Trace) -> Presence:
        """A new trace, locked by this process.

        Raises:
            Denied: the folder for traces may not be written to.
            RetryLater: it is full, or failed.
            Unsupported: it belongs to somebody else.
        """
        folder = home_dir(home)
        with _usable(folder):
            return cls._claim(folder, trace)

    @classmethod
    def _claim(cls, folder: Path, trace: Trace) -> Presence:
        while True:
            fd, name = tempfile.mkstemp(".trace", f"a{trace.attempt:04d}-r{trace.rank:05d}-", folder)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # somebody took it for a dead one's before it was locked
        presence = cls(Path(name), fd, trace)
        presence._write()
        return presence

    @classmethod
    def adopt(cls, path: str, fd: int) -> Presence:
        """The trace that was handed to this process."""
        return cls(Path(path), fd, _read(fd))

    @property
    def trainer_pid(self) -> int:
        """The trainer that the keeper serves."""
        return self._trace.trainer_pid

    def let_go(self) -> None:
        """Leave the trace to the process it was handed to."""
        os.close(self.fd)

    def set_busy(self, busy: bool) -> None:
        """Say whether this keeper still has data that is not in the store."""
        if busy != self._trace.busy:
            self._trace = dataclasses.replace(self._trace, busy=busy)
            with contextlib.suppress(OSError):  # a stale trace makes a successor wait, and loses nothing
                self._write()

    def set_done(self, *, held: str = "") -> None:
        """Say that the next attempt need not wait for this keeper, and where to ask for what it holds."""
        self._trace = dataclasses.replace(self._trace, busy=False, is_done=True, held=held)
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        text = json.dumps(asdict(self._trace)).encode()
        os.pwrite(self.fd, text.ljust(_TRACE_BYTES), 0)  # one write of fixed size: no reader sees half of it

    def leave(self) -> None:
        """Remove the trace: the work is done."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def _read(fd: int) -> Trace:
    trace = decode_dataclass(Trace, os.pread(fd, _TRACE_BYTES, 0), "the trace of a keeper")
    if "/" in trace.held or "\0" in trace.held:
        message = "The trace of a keeper names a socket outside its folder."
        raise Corrupt(message)
    return trace


def living(home: str) -> Iterator[tuple[Path, Trace]]:
    """The traces, with their files, of keepers that live on this host and serve `home`; removes dead ones."""
    for path in _traces(home):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if not os.fstat(fd).st_size:
                continue  # it is just being made, and locked perhaps, but not yet written
            if _is_locked(fd):
                with contextlib.suppress(Corrupt):  # no keeper wrote it, so nobody need wait for it
                    yield path, _read(fd)
            else:
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def find_writers(home: str) -> list[LiveTrainer]:
    """Return the trainers on this host that may still save to a home.

    A process that has closed its Checkpointer is none of them, and neither is a keeper that is left of a dead
    trainer.

    Blocks: for as long as there are any, at most 2 s; not for those of this process.
    """
    deadline_s = time.monotonic() + _DEPARTURE_S
    while True:
        found = [
            LiveTrainer(trace.attempt, trace.rank, trace.trainer_pid)
            for _, trace in living(home)
            if not trace.is_done and process_start(trace.trainer_pid) == trace.trainer_start
        ]
        is_hopeless = any(writer.pid == os.getpid() for writer in found)
        if not found or is_hopeless or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def wait_for_orphans(home: str, *, timeout_s: float, say: Callable[[str], None]) -> bool:
    """Wait for keepers of `home` on this host whose trainer is gone: they may be about to commit.

    Keepers whose trainer lives are not waited for; a newer attempt fences them. Neither are those that only
    drain, or hold what they have in memory.

    Args:
        say: told in one line when the wait is long enough for a person to wonder.

    Returns:
        True if none is left.

    Blocks: until they have ended, at most `timeout_s`.
    """
    began, told = time.monotonic(), False
    while orphans := [
        trace
        for _, trace in living(home)
        if not trace.is_done and process_start(trace.trainer_pid) != trace.trainer_start
    ]:
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            return False
        if waited_s > 1 and not told:
            told = True
            ranks = sorted({trace.rank for trace in orphans})
            say(
                f"waiting for the keepers of ranks {ranks} of attempt {orphans[0].attempt} to finish their "
                "saves"
            )
        time.sleep(_POLL_S)
    return True
