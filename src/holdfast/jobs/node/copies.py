"""Copies of files for jobs: limited in size, with holes kept, and blocks shared where possible."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from holdfast.errors import Denied, InvalidInput
from holdfast.jobs.folder import JobFolder
from holdfast.system.log import get_logger
from holdfast.system.units import format_bytes, parse_bytes, plural

LIMIT = "HOLDFAST_COPY_LIMIT"
"""Variable of the task or the shell with the most bytes that one copy may take on all nodes, or `none`."""
_DEFAULT = "10GiB"
_SHOWN_BYTES = 1 << 30  # size from which a copy is announced before it begins
_NUM_SHOWN = 3
_FICLONE = 0x40049409  # of ioctl_ficlone(2)
_CHUNK_BYTES = 8 << 20

Ignore = Callable[[str, list[str]], Iterable[str]]

_log = get_logger("jobs")


def check_copy(
    source: Path, ignore: Ignore, envs: Mapping[str, str], *, num_copies: int, what: str, way_out: str
) -> None:
    """Check that a file or folder can be copied, and announce a long copy.

    Messages call it `what`, and end with `way_out`, how to copy less.
    """
    num_files = total = most = 0
    largest, unreadable = source, list[str]()
    for path in _files(source, ignore, unreadable):
        status = path.lstat()
        if not path.is_symlink() and not os.access(path, os.R_OK):
            unreadable.append(str(path))
        num_bytes = min(status.st_size, status.st_blocks * 512)  # without holes
        num_files, total = num_files + 1, total + num_bytes
        if num_bytes > most:
            largest, most = path, num_bytes
    if unreadable:
        raise Denied(
            f"{what}: this user cannot read {_listed(unreadable)}. Change the permissions. {way_out} "
            "Nothing was started."
        )
    copies = f"{format_bytes(total)} in {plural(num_files, 'file')}"
    copies += f", copied {num_copies} times" if num_copies > 1 else ""
    text = envs.get(LIMIT) or os.environ.get(LIMIT) or _DEFAULT
    limit = None if text.strip().lower() == "none" else parse_bytes(text, LIMIT)
    size = f"{what}: {source} has {copies}. The largest file is {largest} ({format_bytes(most)})."
    if limit is not None and total * num_copies > limit:
        raise InvalidInput(
            f"{size} The limit is {format_bytes(limit)}. {way_out} Or set {LIMIT} in `envs` to another "
            "limit, or to none. Nothing was started."
        )
    if total * num_copies >= _SHOWN_BYTES:
        _log.info("%s This may take minutes. %s", size, way_out)


def left_out(job: JobFolder) -> Callable[[str, list[str]], list[str]]:
    """Return a function for `shutil.copytree` that names what no copy for a job contains.

    That is sockets, pipes and devices, and the state of all jobs: the copy is in there, and would contain
    itself, and the secrets of other jobs.
    """
    own = {path.resolve() for path in (job.path, job.path.parent, job.path.parent.parent)}
    own_names = {path.name for path in own}

    def ignore(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name) for name in names}
        return [
            name
            for name, path in paths.items()
            if not (path.is_symlink() or path.is_dir() or path.is_file())
            or (name in own_names and path.resolve() in own)
        ]

    return ignore


def copy_tree(source: Path, to: Path, ignore: Ignore | None = None) -> None:
    """Copy a folder with symbolic links as they are."""
    try:
        shutil.copytree(source, to, symlinks=True, ignore=ignore, copy_function=copy_file)
    except shutil.Error as error:
        failed = [f"{one[0]}: {one[2]}" for one in error.args[0]]
        raise OSError(errno.EIO, f"could not copy {_listed(failed)}") from None


def copy_file(source: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Copy a regular file with its permissions and times. Its blocks are shared if possible."""
    if not stat.S_ISREG(Path(source).stat().st_mode):  # `is_file` is False also for what has vanished
        _log.info("%s is a socket, a pipe or a device, and was not copied.", source)
        return
    with Path(source).open("rb") as read, Path(to).open("wb") as written:
        try:
            fcntl.ioctl(written.fileno(), _FICLONE, read.fileno())
        except OSError:
            _copy_data(read.fileno(), written.fileno())
    shutil.copystat(source, to)


def _copy_data(read: int, written: int) -> None:
    """Copy what is not a hole."""
    end = os.fstat(read).st_size
    os.ftruncate(written, end)
    offset = 0
    while offset < end:
        try:
            offset = os.lseek(read, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # the rest is a hole
                return
            raise
        data_end = min(os.lseek(read, offset, os.SEEK_HOLE), end)
        while offset < data_end:
            num_bytes = _copy_some(read, written, offset, data_end - offset)
            if not num_bytes:  # it was shortened meanwhile
                os.ftruncate(written, offset)
                return
            offset += num_bytes


def _copy_some(read: int, written: int, offset: int, most: int) -> int:
    """Copy some bytes, and return their number."""
    with contextlib.suppress(OSError, AttributeError):  # between file systems, or on an old C library
        if num_bytes := os.copy_file_range(read, written, most, offset, offset):
            return num_bytes
    return os.pwrite(written, os.pread(read, min(most, _CHUNK_BYTES), offset), offset)


def _files(source: Path, ignore: Ignore, unreadable: list[str]) -> Iterator[Path]:
    """Yield the files of a copy. Folders that cannot be read are appended to `unreadable`."""
    if not source.is_dir():
        yield source
        return
    for folder, folders, names in os.walk(source, onerror=lambda error: unreadable.append(error.filename)):
        left_out = set(ignore(folder, [*folders, *names]))
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(folder, name) for name in names if name not in left_out)


def _listed(found: list[str]) -> str:
    left = len(found) - _NUM_SHOWN
    return ", ".join(found[:_NUM_SHOWN]) + (f" and {left} more" if left > 0 else "")
