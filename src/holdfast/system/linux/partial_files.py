"""Temporary files and folders that the next start removes if their writer was killed."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast.system.linux.locks import try_flock

_NAME = re.compile(r"\..{1,50}\.[0-9a-f]{16}\.partial")
_NAME_CHARS = 50  # of at most four bytes each, so that a suffix fits behind a long name
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def partial_file(path: Path, *, mode: int = 0o600, is_folder: bool = False) -> Iterator[Path]:
    """Yield the path of a new file beside another, which may be renamed. It is removed at the end.

    Its name is random and new, so that a link that another user has left is never followed. This process
    holds its lock. Those of `path` whose lock is free were left by killed processes, and are removed first.
    """
    partial, fd = _make(path, mode, is_folder=is_folder)
    try:
        for old in path.parent.glob(f".{glob.escape(path.name[:_NAME_CHARS])}.*.partial"):
            with contextlib.suppress(OSError):  # perhaps another user's
                _remove_if_abandoned(old)
        yield partial
    finally:
        _remove(partial)
        os.close(fd)


def temporary_folder(name: str) -> contextlib.AbstractContextManager[Path]:
    """Return a private folder in TMPDIR for a block, as `partial_file` does; `name` is that of its use."""
    return partial_file(Path(tempfile.gettempdir(), f"holdfast-{name}"), mode=0o700, is_folder=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists. A killed process leaves a partial one, not a part of the folder."""
    if folder.is_symlink():
        return  # to something of the user's
    partial = _new_name(folder)
    with contextlib.suppress(OSError):
        folder.rename(partial)
        shutil.rmtree(partial, ignore_errors=True)


def remove_partial_files(folder: Path) -> None:
    """Remove all partial files and folders that killed processes have left in a folder."""
    for path in folder.glob(".*.partial"):
        _remove_if_abandoned(path)


def _make(path: Path, mode: int, *, is_folder: bool) -> tuple[Path, int]:
    """Make a file or folder; return its path and the descriptor that holds its lock."""
    while True:
        made = _new_name(path)
        if is_folder:
            made.mkdir(mode)
        else:
            os.close(os.open(made, _NEW, mode))
        with contextlib.suppress(FileNotFoundError):  # taken for abandoned, before it was locked
            fd = _open(made)
            if _try_lock(fd) is not False and made.exists():
                return made, fd
            os.close(fd)


def _new_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:_NAME_CHARS]}.{secrets.token_hex(8)}.partial")


def _remove_if_abandoned(partial: Path) -> None:
    if not _NAME.fullmatch(partial.name) or partial.is_symlink():
        return
    with contextlib.suppress(FileNotFoundError):
        fd = _open(partial)
        try:
            if _try_lock(fd):
                _remove(partial)
        finally:
            os.close(fd)


def _open(partial: Path) -> int:
    access = os.O_RDONLY if partial.is_dir() else os.O_RDWR  # network file systems lock only writable files
    return os.open(partial, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _try_lock(fd: int) -> bool | None:
    """Return True if locked now, False if another process holds it, None without locks."""
    try:
        return try_flock(fd)
    except OSError:
        return None


def _remove(partial: Path) -> None:
    if partial.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.unlink(missing_ok=True)
