"""Paths below a directory: lookup without following symbolic links, names made durable, and errors.

Each part of a path is opened by itself with O_NOFOLLOW, in the folder that was opened before it. So no part
can become a link between a check and its use.

Source: a directory that cannot be escaped is the idea of Go's `os.Root`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported

O_PATH = getattr(os, "O_PATH", os.O_RDONLY)
"""Flag for a descriptor that only identifies a file. Falls back to O_RDONLY where it does not exist."""


class NotRegular(OSError):
    """Error for opening a FIFO, socket or device in place of a regular file."""


def open_below(folder_fd: int, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file or folder below an open folder; return its descriptor. ELOOP: a part is a symbolic link.

    The path is relative, without "." parts; "" is the folder itself. A FIFO does not block. A path with ".."
    is refused: it could lead out of the folder.
    """
    if not flags & O_PATH:
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    *folders, last = parts = path.split("/")
    if ".." in parts:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    with _descended(folder_fd, folders, _open_part) as above:
        return _open_part(above, last or ".", flags, mode)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor after the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def opened_folder(
    folder_fd: int, path: str, *, readable: bool = False
) -> contextlib.AbstractContextManager[int]:
    """Open a folder below an open one for the block: as a `dir_fd`, and if readable to list and sync it."""
    return closing(open_below(folder_fd, path, os.O_DIRECTORY | (os.O_RDONLY if readable else O_PATH)))


def open_regular(folder_fd: int, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file; refuse a FIFO, device, socket or folder."""
    try:
        fd = open_below(folder_fd, path, flags, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO without a reader
            raise NotRegular(*error.args) from None
        raise
    try:
        _check_regular(os.fstat(fd).st_mode)
        os.set_blocking(fd, True)  # file systems in user space receive the flag with every read
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(kind: int) -> None:
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise NotRegular(errno.ENXIO, os.strerror(errno.ENXIO))


def make_folders(folder_fd: int, path: str) -> None:
    """Create a folder below an open one, with its parents."""

    def make(above: int, part: str) -> int:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=above)
        return _open_part(above, part)

    with _descended(folder_fd, filter(None, path.split("/")), make):
        return


@contextmanager
def _descended(folder_fd: int, parts: Iterable[str], enter: Callable[[int, str], int]) -> Iterator[int]:
    """Enter folders one below the other, and yield a descriptor of the last."""
    above = os.dup(folder_fd)
    try:
        for part in parts:
            below = enter(above, part)
            os.close(above)
            above = below
        yield above
    finally:
        os.close(above)


def _open_part(folder_fd: int, name: str, flags: int = O_PATH | os.O_DIRECTORY, mode: int = 0) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder_fd)
    except NotADirectoryError:  # O_DIRECTORY also refuses a link with this error
        if stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR)
_LINK = (
    "it is a symbolic link or below one, and links inside a home are not followed. If you made the link "
    "yourself, replace it with the file or folder."
)
NOT_REGULAR = "it is not a regular file."


@contextmanager
def translating(root: Path, verb: str, name: str, num_bytes: int | None = None) -> Iterator[None]:
    """Translate errors of the operating system in the block into ours, which name the failed action."""
    try:
        yield
    except (Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported):
        raise
    except OSError as error:
        path = root / name
        if is_foreign(error):
            raise refused(f"Cannot {verb} {path}", name, why_foreign(error)) from None
        if error.errno in _IN_THE_WAY:
            raise InvalidInput(
                f"Cannot {verb} {path}: the name belongs to a directory, or a part of the path is a file "
                f"({error.strerror}). Nothing was changed.",
                key=name,
            ) from error
        kind = Denied if error.errno in _DENIED else RetryLater
        raise kind(_failure(verb, path, error, num_bytes), key=name) from error


def _failure(verb: str, path: Path, error: OSError, num_bytes: int | None) -> str:
    amount = "" if num_bytes is None else f" ({num_bytes} bytes)"
    space = ""
    if error.errno in _FULL:
        space = f" {_free_space(path)} Free some space, or keep fewer checkpoints."
    elif error.errno in _DENIED:
        space = " Change its permissions, or use a place that this user may write to."
    changed = " Earlier data is unchanged." if verb == "write" else ""
    return f"Could not {verb} {path}{amount}: {error.strerror} (errno {error.errno}).{space}{changed}"


def _free_space(path: Path) -> str:
    for place in path.parents:
        with suppress(OSError):
            info = os.statvfs(place)
            return f"Its file system has {info.f_bavail * info.f_frsize} bytes free (a quota may allow less)."
    return "Its free space is unknown."


def is_foreign(error: OSError) -> bool:
    """Return True if the error is about a file that a store did not create."""
    return isinstance(error, NotRegular) or error.errno == errno.ELOOP


def why_foreign(error: OSError) -> str:
    """Return why a store does not use such a file."""
    return NOT_REGULAR if isinstance(error, NotRegular) else _LINK


def refused(cannot: str, name: str, why: str) -> InvalidInput:
    """Return the error for a file that a store did not create."""
    return InvalidInput(f"{cannot}: {why} Nothing was changed.", key=name)


_CANNOT_FSYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EROFS)
_MAX_DURABLE = 64


class DurableNames:
    """Directories of one store, whose root has no symbolic links, with durable names."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._durable: dict[str, tuple[int, int]] = {}  # device and inode by folder

    def forget(self, level: str) -> None:
        """Forget a folder that was removed."""
        self._durable.pop(level, None)

    def sync_up(self, root: int, folder: str) -> None:
        """Make the names of a folder, of its parents and of the root durable, each once."""
        # Whoever created it: another process may have, without having reached its fsync (note 015). Twice
        # would double the time of a small put, as even an fsync without changes flushes the disk's cache.
        for level in levels(folder):
            info = os.stat(level, dir_fd=root, follow_symlinks=False)
            if self._durable.get(level) != (info.st_dev, info.st_ino):
                with closing(open_for_sync(root, folder_of(level))) as above:
                    sync_names(above)
                self._remember(level, info)
        info = os.fstat(root)
        if self._durable.get("") != (info.st_dev, info.st_ino):
            for level in self._root.parents:  # whoever created them; above a mount point nothing is ours
                if level.stat().st_dev != info.st_dev and level != self._root.parent:
                    break
                sync_directory(level)
            self._remember("", info)

    def _remember(self, level: str, info: os.stat_result) -> None:
        if len(self._durable) >= _MAX_DURABLE:
            self._durable.clear()
        self._durable[level] = info.st_dev, info.st_ino


def folder_of(name: str) -> str:
    """Return the part of a name before its last slash, or "" for the root."""
    return name.rpartition("/")[0]


def levels(folder: str) -> Iterator[str]:
    """Yield a folder and its parents, without the root."""
    while folder:
        yield folder
        folder = folder_of(folder)


def open_for_sync(root: int, folder: str) -> int:
    """Open a folder below the root, for an fsync of its names."""
    try:
        return open_below(root, folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be entered but not read; this is the only way to sync it
        return open_below(root, folder, O_PATH | os.O_DIRECTORY)


def sync_names(folder_fd: int) -> None:
    """Make the names in an open folder durable."""
    with ignoring(*_CANNOT_FSYNC):  # some FUSE file systems have no fsync for directories
        os.fsync(folder_fd)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory above the root durable."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    with closing(fd):
        sync_names(fd)


@contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """Ignore errors of the operating system with these numbers in the block."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
