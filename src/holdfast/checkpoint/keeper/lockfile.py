"""Keepers and trainers of a home on this host, found by the lock files of running keepers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.listing import LiveTrainer
from holdfast.checkpoint.store import open_store
from holdfast.errors import Corrupt, Denied, HoldfastError, RetryLater, Unsupported
from holdfast.system.documents import decode_as, to_plain
from holdfast.system.linux.locks import try_flock
from holdfast.system.linux.processes import start_time
from holdfast.system.log import get_logger
from holdfast.system.privacy import is_own, is_private, is_unshared, make_private

SUFFIX = ".lock"
SOCKET_SUFFIX = ".sock"
"""Suffix of the socket that serves the memory of a keeper, beside its lock file."""
_SIZE = 512


class KeeperInfo(Struct, frozen=True):
    """Contents of a lock file."""

    attempt: int
    rank: int
    trainer_pid: int
    trainer_start: int  # clock ticks since boot; distinguishes the trainer from a later process with its pid
    busy: bool  # has data that is not in the nearest store yet
    is_done: bool = False  # the nearest store has everything, so that no attempt needs to wait
    pulse_fd: int = -1  # the trainer's descriptor of its pulse; -1 without one
    held: str = ""  # name of the socket, beside the lock file, that serves the contents of its memory
    run: str = ""  # id of the run that it saves; a home that was deleted and made again has another one


class Lockfile:
    """Lock file of one keeper, locked as long as the keeper is running.

    The trainer creates it before it starts the keeper, and passes the locked descriptor on, so that no keeper
    runs without a lock file.
    """

    def __init__(self, path: Path, fd: int, info: KeeperInfo) -> None:
        self.path, self.fd, self.info = path, fd, info  # the descriptor holds the lock
        self._changing = threading.Lock()  # threads change what it records

    @classmethod
    def create(cls, home: str, info: KeeperInfo) -> Lockfile:
        """Create a lock file, locked by this process."""
        folder = runtime_dir(home)
        with runtime_dir_errors(folder):
            while True:
                fd, name = tempfile.mkstemp(SUFFIX, f"a{info.attempt:04d}-r{info.rank:05d}-", folder)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    break
                os.close(fd)  # another process removed it before it was locked, as that of a dead keeper
            lockfile = cls(Path(name), fd, info)
            lockfile._write()
            return lockfile

    @classmethod
    def inherit(cls, path: str, fd: int) -> Lockfile:
        """Return the lock file whose descriptor this process has inherited."""
        return cls(Path(path), fd, _read(fd))

    def close(self) -> None:
        """Close the descriptor. The keeper that has inherited it keeps the lock."""
        os.close(self.fd)

    def remove(self) -> None:
        """Delete the file, and release the lock."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)

    @property
    def is_done(self) -> bool:
        """True if no attempt needs to wait for the keeper, by its own record."""
        with contextlib.suppress(OSError, Corrupt):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read(fd).is_done
            finally:
                os.close(fd)
        return False

    def set_busy(self, busy: bool) -> None:
        """Record whether this keeper has data that is not in the nearest store yet."""
        if busy != self.info.busy:
            self._update(busy=busy)

    def set_done(self, *, held: str = "") -> None:
        """Record that no attempt needs to wait for this keeper, and the name of its socket, if it has one."""
        # With peers the memory is offered before the saves are given up: then the name stays (note 048).
        self._update(busy=False, is_done=True, held=held or self.info.held)

    def _update(self, **facts: Any) -> None:
        with self._changing:
            self.info = replace(self.info, **facts)
            # Outdated contents make a later attempt wait, and lose nothing.
            with contextlib.suppress(OSError):
                self._write()

    def _write(self) -> None:
        text = json.dumps(to_plain(self.info)).encode()
        os.pwrite(self.fd, text.ljust(_SIZE), 0)  # one write of a fixed size: readers never see a part of it


def _read(fd: int) -> KeeperInfo:
    info = decode_as(KeeperInfo, os.pread(fd, _SIZE, 0), "the lock file of a keeper")
    if "/" in info.held or "\0" in info.held:
        raise Corrupt("The lock file of a keeper names a socket outside its folder.")
    return info


def running_keepers(home: str) -> Iterator[tuple[Path, KeeperInfo]]:
    """Yield the lock files of all keepers of a home that run on this host. Deletes files of dead keepers."""
    for folder in runtime_dirs(home):
        with runtime_dir_errors(folder):
            yield from _running_in(folder)


def _running_in(folder: Path) -> Iterator[tuple[Path, KeeperInfo]]:
    for path in folder.iterdir():
        if not path.name.endswith(SUFFIX):
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if try_flock(fd):
                path.with_suffix(SOCKET_SUFFIX).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(Corrupt):  # not written yet, or by another program: nothing to wait for
                yield path, _read(fd)
        finally:
            os.close(fd)


def is_trainer_alive(info: KeeperInfo) -> bool:
    """Return True if the trainer of a keeper is running."""
    return start_time(info.trainer_pid) == info.trainer_start


_VARIABLE = "HOLDFAST_RUNTIME_DIR"


def runtime_dir(home: str) -> Path:
    """Return the runtime folder of a home, after creating it if necessary.

    It is below $HOLDFAST_RUNTIME_DIR, or below the first of a few fixed places that does not belong to
    another user. $TMPDIR and $XDG_RUNTIME_DIR are not used: all attempts of a run must choose the same
    folder, and those may differ between a login, a scheduler and a service.
    """
    name = _folder_name(home)
    for place in _places():
        if _is_usable(place) and make_private(place / name):
            return place / name
    first = _places()[0]
    with contextlib.suppress(FileExistsError), runtime_dir_errors(first):
        if not os.path.lexists(first) or is_own(first):
            (first / name).mkdir(mode=0o700, parents=True)
    tried = ", ".join(map(str, _places()))
    raise Unsupported(
        f"None of {tried} is, or can be made, a folder that only you can change. Another user may have "
        f"created it first. Set {_VARIABLE} to a folder of yours on this host."
    )


def runtime_dirs(home: str) -> Iterator[Path]:
    """Yield all existing runtime folders of a home, as attempts may have chosen different places."""
    for place in _places():
        folder = place / _folder_name(home)
        if is_own(place) and is_private(folder):
            yield folder


@contextlib.contextmanager
def runtime_dir_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the runtime folder as errors of Holdfast."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        kind = Denied if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else RetryLater
        raise kind(
            f"Cannot use {folder} for the lock files of keepers: {error.strerror}. Nothing was saved. Free "
            f"space or set permissions there, or set {_VARIABLE} to another folder on this host."
        ) from error


def _places() -> tuple[Path, ...]:
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return (Path(os.path.realpath(chosen)),)
    user = os.geteuid()
    return (
        Path(f"/tmp/holdfast-{user}"),
        Path(f"/run/user/{user}/holdfast"),
        Path(f"/dev/shm/holdfast-{user}"),
        Path(f"/var/tmp/holdfast-{user}"),
    )


def _is_usable(place: Path) -> bool:
    """Create a folder if necessary. Return True if it is this user's, and no other user can write to it."""
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=_VARIABLE in os.environ, exist_ok=True)
    return is_unshared(place)


def _folder_name(home: str) -> str:
    return hashlib.sha256(os.fsencode(home)).hexdigest()[:16]


_log = get_logger("checkpoint.keeper")
_POLL_S = 0.02
_EXIT_S = 2.0
"""Time that a trainer which was just killed may take to disappear."""
_NOTIFY_AFTER_S = 1.0
"""Wait after which the user is notified."""


def find_trainers(home: str) -> list[LiveTrainer]:
    """Return the trainers on this host that may still save to a home.

    Neither a process that has closed its Checkpointer counts, nor the keeper of a dead trainer.

    Blocks: at most 2 s, while another process is such a trainer.
    """
    deadline_s = time.monotonic() + _EXIT_S
    while True:
        found = [
            LiveTrainer(info.attempt, info.rank, info.trainer_pid)
            for _, info in running_keepers(home)
            if not info.is_done and is_trainer_alive(info)
        ]
        has_own = any(trainer.pid == os.getpid() for trainer in found)
        if not found or has_own or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def run_filter(home: str) -> Callable[[KeeperInfo], bool]:
    """Return a filter for keepers of the run that is in a home now.

    A home that was deleted and made again holds another run. Keepers of the one before are ignored.
    """

    @functools.cache
    def read() -> str | None:
        """Return the id of the run; "" without one; None if that cannot be read."""
        try:
            found = read_run(open_store(home))
        except HoldfastError:
            return None
        return "" if found is None else found.id

    def is_own(info: KeeperInfo) -> bool:
        if not info.run or read() in (None, info.run):
            return True
        _note_ignored(home, info.run)
        return False

    return is_own


@functools.cache  # one line for each run
def _note_ignored(home: str, run: str) -> None:
    _log.warning("A keeper on this host has a copy of another run, %s, which was in %s. Ignored.", run, home)


def wait_for_orphans(home: str, *, timeout_s: float, notify: Callable[[str], None]) -> bool:
    """Wait for keepers of dead trainers of a home on this host. They may be about to commit.

    Keepers of living trainers are not waited for: a newer attempt fences them. Neither are those that only
    drain, that only keep images in memory, or that save another run.

    Blocks: until they have exited, at most `timeout_s`; then it returns False.
    """
    is_own = run_filter(home)

    def find_orphans() -> str:
        found = [
            info
            for _, info in running_keepers(home)
            if not info.is_done and not is_trainer_alive(info) and is_own(info)
        ]
        if not found:
            return ""
        ranks = sorted({info.rank for info in found})
        return f"the keepers of ranks {ranks} of attempt {found[0].attempt} to complete their saves"

    return wait_while(find_orphans, timeout_s, notify)


def wait_while(waits_for: Callable[[], str], timeout_s: float, notify: Callable[[str], None]) -> bool:
    """Wait until `waits_for` returns "", and notify once, after a second. Return False after the timeout."""
    began, has_notified = time.monotonic(), False
    while text := waits_for():
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            return False
        if waited_s > _NOTIFY_AFTER_S and not has_notified:
            has_notified = True
            notify(f"waiting for {text}")
        time.sleep(_POLL_S)
    return True
