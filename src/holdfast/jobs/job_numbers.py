"""Numbers of jobs: each belongs to one folder, and none is used twice, not even after its job was removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_LAST = "last-number"
"""File with the greatest number so far. If it is lost, the folders that exist still count."""
_REMOVED = ".removing-"
_MAX_DIGITS = 15
_MAX_FOLDER = 10**12  # number from which on a folder is a stray one, which new numbers do not follow
_MAX_WRITTEN = 10**14  # number from which on the file with the greatest number is damaged


def reserve_number(jobs: Path) -> int:
    """Create the folder of a new job, and return its number."""
    with _locked(jobs) as fd:
        number = _last_number(jobs, fd) + 1
        _write(fd, number)
        # Fails if there is anything of this name: only a folder that was created here may ever be removed.
        (jobs / str(number)).mkdir(mode=0o700)
        return number


def job_numbers(jobs: Path) -> list[int]:
    """Return the numbers of all folders of jobs, in order."""
    try:
        names = [entry.name for entry in os.scandir(jobs)]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if _is_number(name))


def set_aside(jobs: Path, number: int) -> Path:
    """Rename the folder of a job before its removal, and return the new path."""
    path = removed_folder(jobs, number)
    (jobs / str(number)).rename(path)
    return path


def removed_folder(jobs: Path, number: int) -> Path:
    """Return the path of a folder that is being removed."""
    return jobs / f"{_REMOVED}{number}"


def numbers_set_aside(jobs: Path) -> list[int]:
    """Return the numbers of jobs whose folders are not completely removed yet."""
    found = [path.name.removeprefix(_REMOVED) for path in jobs.glob(f"{_REMOVED}*")]
    return sorted(int(name) for name in found if _is_number(name))


@contextlib.contextmanager
def _locked(jobs: Path) -> Iterator[int]:
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(jobs / _LAST, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _last_number(jobs: Path, fd: int) -> int:
    text = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
    written = int(text) if _is_number(text) and int(text) < _MAX_WRITTEN else 0
    folders = (*job_numbers(jobs), *numbers_set_aside(jobs))
    return max(written, *(number for number in folders if number < _MAX_FOLDER), 0)


def _write(fd: int, number: int) -> None:
    text = f"{number}\n".encode()
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))
    os.fsync(fd)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= _MAX_DIGITS
