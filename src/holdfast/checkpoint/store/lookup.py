"""Path lookup below a directory, without following symbolic links.

The kernel resolves the whole path in one call (openat2, Linux 5.6). Where that call is missing or a sandbox
forbids it, each part of the path is opened by itself with O_NOFOLLOW, with the same result.

Source: openat2(2). A directory that cannot be escaped is the idea of Go's `os.Root`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

O_PATH = getattr(os, "O_PATH", os.O_RDONLY)
"""Flag for a descriptor that only identifies a file. Falls back to O_RDONLY where it does not exist."""
_SYS_OPENAT2 = 437  # the same number on every architecture that Linux numbers uniformly
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_MAX_TRIES = 100  # EAGAIN: a rename elsewhere interfered


class NotRegular(OSError):
    """Error for opening a FIFO, socket or device in place of a regular file."""


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def _load_syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_How), ctypes.c_size_t)
    call.restype = ctypes.c_long
    return call


_syscall = _load_syscall() if sys.platform == "linux" else None


def open_below(folder_fd: int, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a file or folder below an open folder; return its descriptor.

    Args:
        folder_fd: descriptor of the folder; O_PATH is enough.
        path: relative, without "." and ".." parts; "" is the folder itself.
        flags: as for `os.open`.
        mode: permissions of a created file.

    Raises:
        OSError: with errno ELOOP, a part of the path is a symbolic link.

    Blocks: on the file system; never on a FIFO, because files are opened without waiting for its other end.
    """
    flags |= os.O_CLOEXEC
    if not flags & O_PATH:
        flags |= os.O_NONBLOCK | os.O_NOCTTY
    fd = _open_whole(folder_fd, path or ".", flags, mode) if _has_openat2() else None
    if fd is None:
        fd = _open_by_parts(folder_fd, path or ".", flags, mode)
    return fd


@contextmanager
def opened_folder(folder_fd: int, path: str, *, readable: bool = False) -> Iterator[int]:
    """Open a folder below an open one for the block; use its descriptor as `dir_fd`.

    Args:
        readable: open it for listing and fsync as well.
    """
    fd = open_below(folder_fd, path, os.O_DIRECTORY | (os.O_RDONLY if readable else O_PATH))
    try:
        yield fd
    finally:
        os.close(fd)


def open_regular(folder_fd: int, path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file; refuse a FIFO, device, socket or folder.

    Raises:
        NotRegular: it is a FIFO, device or socket.
        OSError: as `open_below`; EISDIR for a folder.
    """
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


def make_folders(folder_fd: int, path: str) -> None:
    """Create a folder below an open one, with its parents."""
    above = os.dup(folder_fd)
    try:
        for part in filter(None, path.split("/")):
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=above)
            below = open_below(above, part, O_PATH | os.O_DIRECTORY)
            os.close(above)
            above = below
    finally:
        os.close(above)


def _check_regular(kind: int) -> None:
    if stat.S_ISDIR(kind):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise NotRegular(errno.ENXIO, os.strerror(errno.ENXIO))


def _open_whole(folder_fd: int, path: str, flags: int, mode: int) -> int | None:
    assert _syscall is not None
    how = _How(flags, mode if flags & os.O_CREAT else 0, _RESOLVE)
    name = os.fsencode(path)
    for _ in range(_MAX_TRIES):
        fd = _syscall(_SYS_OPENAT2, folder_fd, name, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            raise OSError(number, os.strerror(number), path)
    return None


def _open_by_parts(folder_fd: int, path: str, flags: int, mode: int) -> int:
    *folders, last = path.split("/")
    above = os.dup(folder_fd)
    try:
        for part in folders:
            below = _open_part(above, part, O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0)
            os.close(above)
            above = below
        return _open_part(above, last, flags, mode)
    finally:
        os.close(above)


def _open_part(folder_fd: int, name: str, flags: int, mode: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, mode, dir_fd=folder_fd)
    except NotADirectoryError:  # O_DIRECTORY also refuses a link with this error
        if stat.S_ISLNK(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


@cache
def _has_openat2() -> bool:
    """Return True if the kernel has openat2 and no sandbox forbids it."""
    if _syscall is None:
        return False
    how = _How(O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _RESOLVE)
    root = os.open("/", O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = _syscall(_SYS_OPENAT2, root, b".", ctypes.byref(how), ctypes.sizeof(how))
    finally:
        os.close(root)
    if fd < 0:
        return False
    os.close(fd)
    return True
