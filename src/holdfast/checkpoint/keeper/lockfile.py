"""Lock files of running keepers, so that later attempts on this host find them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.checkpoint.keeper.runtime_dir import runtime_dir, runtime_dir_errors, runtime_dirs
from holdfast.errors import Corrupt
from holdfast.system.documents import decode_dataclass
from holdfast.system.linux.locks import try_flock
from holdfast.system.linux.processes import start_time

SUFFIX = ".lock"
SOCKET_SUFFIX = ".sock"
"""Suffix of the socket that serves the memory of a keeper, beside its lock file."""
_SIZE = 512


@dataclass(frozen=True, slots=True)
class KeeperInfo:
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

    Attributes:
        path: path of the file.
        fd: descriptor that holds the lock.
        info: contents of the file.
    """

    def __init__(self, path: Path, fd: int, info: KeeperInfo) -> None:
        self.path = path
        self.fd = fd
        self.info = info

    @classmethod
    def create(cls, home: str, info: KeeperInfo) -> Lockfile:
        """Create a lock file, locked by this process."""
        folder = runtime_dir(home)
        with runtime_dir_errors(folder):
            return cls._create(folder, info)

    @classmethod
    def _create(cls, folder: Path, info: KeeperInfo) -> Lockfile:
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
            self._update(dataclasses.replace(self.info, busy=busy))

    def set_done(self, *, held: str = "") -> None:
        """Record that no attempt needs to wait for this keeper.

        Args:
            held: name of the socket that serves the contents of its memory, if any.
        """
        self._update(dataclasses.replace(self.info, busy=False, is_done=True, held=held))

    def _update(self, info: KeeperInfo) -> None:
        self.info = info
        with contextlib.suppress(OSError):  # outdated contents make a later attempt wait, and lose nothing
            self._write()

    def _write(self) -> None:
        text = json.dumps(asdict(self.info)).encode()
        os.pwrite(self.fd, text.ljust(_SIZE), 0)  # one write of a fixed size: readers never see a part of it


def _read(fd: int) -> KeeperInfo:
    info = decode_dataclass(KeeperInfo, os.pread(fd, _SIZE, 0), "the lock file of a keeper")
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
