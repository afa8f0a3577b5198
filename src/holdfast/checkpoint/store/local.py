"""Store in a directory tree: a host's fast disk, or a mounted shared file system.

An object is a file. A put writes a file `.unfinished-PID-RANDOM` beside the target, under an `flock` that
ends with the process, makes it durable, and then renames it with rename(2), or with link(2) if the name must
be free. `sweep` removes unfinished files whose lock is free.

The root may be reached through symbolic links, which are resolved once. Below the root no link is followed,
and only regular files are read or written, because a home may come from another user (docs/design/017).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from typing_extensions import override

from holdfast.checkpoint.format.names import check_size
from holdfast.checkpoint.store import contract, direct_io, lookup
from holdfast.checkpoint.store.contract import Buffer, ObjectInfo, Properties, Store
from holdfast.checkpoint.store.lookup import DurableNames
from holdfast.errors import Corrupt, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.system.failpoint import failpoint

_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_OTHER_NAMES = "the file has other names (hard links)."
_MAX_CREATE_TRIES = 16


class LocalStore(Store):
    """A directory tree; its URL is the absolute path of `root`.

    Nothing is created before the first put. A root that existed once is never created again: if it is gone,
    or on another file system than before (an unmounted disk leaves an empty mount point), every call raises
    `RetryLater` until it is back, so that nothing is written elsewhere or reported as lost.

    If the last step of a put fails, making its directory durable, the put raises `RetryLater` although the
    object may exist under its name; it is then complete.

    Args:
        root: directory; relative paths are resolved at this call.
        survives_host: True if the disk outlives the machine. A path does not show it, so the default is
            False.
    """

    def __init__(self, root: str | os.PathLike[str], *, survives_host: bool = False) -> None:
        given = Path(root).absolute()
        self._real = Path(os.path.realpath(given))  # later changes of links have no effect
        self.root = self._real if ".." in given.parts else given
        self.url = str(self.root)
        self.properties = Properties(survives_host=survives_host, read_bytes=direct_io.READ_BYTES)
        self._seen: tuple[int, int] | None = None  # device and inode of the root
        self._names = DurableNames(self._real)
        with lookup.translating(self.root, "open", ""), self._rooted():
            pass

    def path(self, name: str) -> Path:
        """Return the file of the object `name`, which need not exist."""
        return self.root / contract.check_name(name)

    @override
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write an object, as in `Store.put`."""
        view = contract.as_bytes(data)
        self._put(name, len(view), lambda fd: direct_io.write(fd, view), if_absent=if_absent)

    @override
    def put_parts(
        self, name: str, parts: Iterable[Buffer], num_bytes: int, *, if_absent: bool = False
    ) -> None:
        """Write an object through the page cache, one part at a time."""

        def write(fd: int) -> None:
            done = 0
            for part in parts:
                rest = contract.as_bytes(part)
                while rest:
                    written = os.write(fd, rest)
                    rest, done = rest[written:], done + written
            if done != num_bytes:
                raise contract.length_error(name, num_bytes, done)

        self._put(name, num_bytes, write, if_absent=if_absent)

    def _put(self, name: str, num_bytes: int, write: Callable[[int], None], *, if_absent: bool) -> None:
        target = self.path(name)
        folder = lookup.folder_of(name)
        with lookup.translating(self.root, "write", name, num_bytes), self._made_root() as root:
            if if_absent and _kind(root, name) is not None:  # avoids a useless write; link() decides
                raise contract.already_exists(target, name)
            with self._created(root, folder) as (folder_fd, temp, fd):
                write(fd)
                failpoint("store.written")
                os.fsync(fd)  # the data first: no name may lead to bytes that a power cut would lose
                failpoint("store.synced")
                _publish(folder_fd, temp, target, name, if_absent=if_absent)
                lookup.sync_names(folder_fd)  # then the name
            self._names.sync_up(root, folder)

    @override
    def link(self, source: str, name: str) -> None:
        """Make a hard link, so that both names share their bytes on the disk."""
        origin, target = self.path(source), self.path(name)
        folder, last = lookup.folder_of(name), target.name
        with lookup.translating(self.root, "link", name), self._rooted() as root:
            kind = None if root is None else _kind(root, source)
            if root is None or kind is None or stat.S_ISDIR(kind):
                raise NotFound(f"{origin} does not exist.", key=source)
            if not stat.S_ISREG(kind):
                raise lookup.refused(f"Cannot link {origin}", source, lookup.NOT_REGULAR)
            temp = _unfinished()
            with lookup.closing(self._enter(root, folder)) as folder_fd:
                with lookup.opened_folder(root, lookup.folder_of(source)) as source_fd:
                    _link(source_fd, origin.name, folder_fd, temp, target, name)
                try:
                    os.replace(temp, last, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
                finally:
                    with suppress(FileNotFoundError):  # renaming between two names of one file does nothing
                        os.unlink(temp, dir_fd=folder_fd)
                lookup.sync_names(folder_fd)
            self._names.sync_up(root, folder)

    @override
    def get(self, name: str) -> bytes:
        with lookup.translating(self.root, "read", name), self._opened(name) as fd:
            num_bytes = os.fstat(fd).st_size
            check_size(name, num_bytes)
            return direct_io.read_whole(fd, num_bytes)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with lookup.translating(self.root, "read", name, len(buffer)), self._opened(name) as fd:
            got = direct_io.read(fd, offset, buffer)
            if got < len(buffer):
                raise contract.ends_early(self.root / name, name, os.fstat(fd).st_size, offset, len(buffer))

    @override
    def append(self, name: str, data: bytes) -> None:
        contract.check_name(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with (
            lookup.translating(self.root, "append to", name, len(data)),
            self._made_root() as root,
            self._opened_in(root, lookup.folder_of(name), name.rpartition("/")[2], flags) as (_, fd),
        ):
            if os.fstat(fd).st_nlink != 1:
                raise lookup.refused(f"Cannot append to {self.root / name}", name, _OTHER_NAMES)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List objects. Symbolic links and special files are listed, and refused when read."""
        return self._list(contract.check_prefix(prefix))

    @override
    def size(self, name: str) -> int | None:
        with lookup.translating(self.root, "find", name), suppress(NotFound), self._opened(name) as fd:
            return os.fstat(fd).st_size
        return None

    @override
    def delete(self, name: str) -> None:
        """Remove an object, and directories that are empty afterwards."""
        contract.check_name(name)
        folder, last = lookup.folder_of(name), name.rpartition("/")[2]
        with lookup.translating(self.root, "delete", name), self._rooted() as root:
            if root is None:
                return
            gone = suppress(FileNotFoundError, NotADirectoryError)
            with gone, lookup.closing(lookup.open_for_sync(root, folder)) as folder_fd:
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(last, dir_fd=folder_fd)
                lookup.sync_names(folder_fd)
            self._remove_empty(root, folder)

    @override
    def sync(self, folder: str) -> None:
        """Make all names in a folder durable, even those that this process synced before."""
        # Another process may have removed the folder since, and made it again (note 015).
        with lookup.translating(self.root, "sync", folder), self._rooted() as root:
            if root is None:
                return
            with suppress(FileNotFoundError, NotADirectoryError):
                for level in (folder, *map(lookup.folder_of, lookup.levels(folder))):
                    with lookup.closing(lookup.open_for_sync(root, level)) as fd:
                        lookup.sync_names(fd)
            self._names.sync_up(root, "")

    @override
    def sweep(self, prefix: str = "") -> None:
        """Remove remains of unfinished puts, and directories that are empty afterwards."""
        with lookup.translating(self.root, "sweep", contract.check_prefix(prefix)), self._rooted() as root:
            if root is None:
                return
            for folder, folder_fd, entry in _walk(root, prefix):
                if entry.name.startswith(contract.UNFINISHED) and _remove_if_abandoned(folder_fd, entry.name):
                    self._remove_empty(root, folder)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        with lookup.translating(self.root, "list", prefix), self._rooted() as root:
            if root is None:
                return
            for folder, _, entry in _walk(root, prefix):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not name.startswith(prefix) or entry.name.startswith(contract.UNFINISHED):
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield ObjectInfo(name, entry.stat(follow_symlinks=False).st_size)

    @contextmanager
    def _rooted(self) -> Iterator[int | None]:
        """Open the root for the block; yield None if it never existed."""
        fd = self._open_root()
        with nullcontext() if fd is None else lookup.closing(fd):
            yield fd

    @contextmanager
    def _made_root(self) -> Iterator[int]:
        """Open the root for the block; create it if it never existed."""
        fd = self._open_root()
        if fd is None:
            for level in (*reversed(self._real.parents), self._real):
                if not level.is_dir():
                    level.mkdir(exist_ok=True)
                    lookup.sync_directory(level.parent)
            fd = self._open_root()
        if fd is None:
            raise RetryLater(self._vanished("is gone"))
        with lookup.closing(fd):
            yield fd

    def _open_root(self) -> int | None:
        seen = self._seen  # before opening: another thread may be making the root
        try:
            fd = os.open(self._real, lookup.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            if seen is None:
                return None
            raise RetryLater(self._vanished("is gone")) from None
        try:
            self._check_root(os.fstat(fd), seen)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_root(self, info: os.stat_result, seen: tuple[int, int] | None) -> None:
        if not stat.S_ISDIR(info.st_mode):
            raise InvalidInput(f"{self.root} is a file, so it cannot hold checkpoints. Use another path.")
        device, inode = seen or (info.st_dev, info.st_ino)
        if device != info.st_dev and inode != info.st_ino:  # a remount of the same disk keeps the inode
            raise RetryLater(self._vanished("is on another file system than before"))
        self._seen = info.st_dev, info.st_ino

    def _vanished(self, how: str) -> str:
        return (
            f"The home {self.root} vanished: the directory {how}, although it existed before. Was its disk "
            "unmounted, or the directory deleted? It was not created again, because that could write to the "
            "wrong disk. Restore it, or open the store again if the loss is intended."
        )

    def _enter(self, root: int, folder: str) -> int:
        """Open a folder below the root, creating it if missing; `DurableNames.sync_up` makes it durable."""
        for _ in range(_MAX_CREATE_TRIES):
            with suppress(FileNotFoundError):
                return lookup.open_for_sync(root, folder)
            with suppress(FileNotFoundError):  # deletes remove empty folders
                lookup.make_folders(root, folder)
        return lookup.open_for_sync(root, folder)

    @contextmanager
    def _opened_in(self, root: int, folder: str, name: str, flags: int) -> Iterator[tuple[int, int]]:
        """Open a file for the block, creating its folder if missing; yield the descriptors of both."""
        for tries in range(_MAX_CREATE_TRIES):
            with lookup.closing(self._enter(root, folder)) as folder_fd:
                try:
                    fd = lookup.open_regular(folder_fd, name, flags)
                except FileNotFoundError:  # the folder was empty and was removed meanwhile
                    if tries == _MAX_CREATE_TRIES - 1:
                        raise
                    continue
                with lookup.closing(fd):
                    yield folder_fd, fd
                return

    @contextmanager
    def _created(self, root: int, folder: str) -> Iterator[tuple[int, str, int]]:
        """Create an unfinished file, locked for the block, and remove it if the block raises.

        Yields the descriptor of its folder, its name, and its own descriptor.
        """
        while True:
            temp = _unfinished()
            with self._opened_in(root, folder, temp, os.O_RDWR | os.O_CREAT | os.O_EXCL) as (folder_fd, fd):
                try:
                    with lookup.ignoring(*_CANNOT_LOCK):  # without locks, sweep() removes nothing
                        fcntl.flock(fd, fcntl.LOCK_EX)
                    if not os.fstat(fd).st_nlink:
                        continue  # a sweep came between creation and lock, and removed it as abandoned
                    yield folder_fd, temp, fd
                except BaseException:
                    with suppress(OSError):  # the first error matters more; sweep() removes the file
                        os.unlink(temp, dir_fd=folder_fd)
                    raise
                return

    def _remove_empty(self, root: int, folder: str) -> None:
        with suppress(OSError):  # not empty, gone, or not ours: an empty directory does no harm
            for level in lookup.levels(folder):
                with lookup.opened_folder(root, lookup.folder_of(level)) as above:
                    os.rmdir(level.rpartition("/")[2], dir_fd=above)
                self._names.forget(level)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with self._rooted() as root:
            if root is None:
                raise NotFound(f"{self.path(name)} does not exist.", key=name)
            try:
                fd = lookup.open_regular(root, contract.check_name(name), os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"{self.path(name)} does not exist.", key=name) from None
            except IsADirectoryError:
                raise NotFound(f"{self.path(name)} is a directory, not an object.", key=name) from None
            except OSError as error:
                if not lookup.is_foreign(error):
                    raise
                raise Corrupt(
                    f"Cannot read {self.path(name)}: {lookup.why_foreign(error)}", key=name
                ) from None
            with lookup.closing(fd):
                yield fd


def _publish(folder_fd: int, temp: str, target: Path, name: str, *, if_absent: bool) -> None:
    if not if_absent:
        os.replace(temp, target.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        failpoint("store.linked")
        return
    try:
        _link(folder_fd, temp, folder_fd, target.name, target, name)  # refuses a name that is taken
    except FileExistsError:
        raise contract.already_exists(target, name) from None
    failpoint("store.linked")
    os.unlink(temp, dir_fd=folder_fd)


def _link(source_fd: int, source: str, folder_fd: int, last: str, target: Path, name: str) -> None:
    try:
        os.link(source, last, src_dir_fd=source_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        raise Unsupported(
            f"The file system of {target} does not support hard links ({error.strerror}), so a name cannot "
            "be claimed without a race. Nothing was changed. Use another place as home.",
            key=name,
        ) from error


def _unfinished() -> str:
    return f"{contract.UNFINISHED}{os.getpid()}-{os.urandom(8).hex()}"


def _kind(root: int, name: str) -> int | None:
    """Return the mode bits of a name, or None if it does not exist. Links are not followed."""
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        lookup.opened_folder(root, lookup.folder_of(name)) as folder_fd,
    ):
        return os.stat(name.rpartition("/")[2], dir_fd=folder_fd, follow_symlinks=False).st_mode
    return None


def _walk(root: int, prefix: str) -> Iterator[tuple[str, int, os.DirEntry[str]]]:
    """Yield the folder, its descriptor and the entry of all but folders, where names may have this prefix."""
    parent, _, start = prefix.rpartition("/")
    pending = [(parent, start)]
    while pending:
        folder, start = pending.pop()
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            lookup.opened_folder(root, folder, readable=True) as folder_fd,
            os.scandir(folder_fd) as entries,
        ):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield folder, folder_fd, entry
                elif entry.name.startswith(start):
                    pending.append((f"{folder}/{entry.name}" if folder else entry.name, ""))


def _remove_if_abandoned(folder_fd: int, temp: str) -> bool:
    """Remove an unfinished file if its lock is free: its writer is dead."""
    try:
        fd = lookup.open_regular(folder_fd, temp, os.O_RDWR)  # network file systems lock only writable files
    except (FileNotFoundError, PermissionError):  # finished meanwhile, or another user's
        return False
    except OSError as error:
        if not lookup.is_foreign(error):
            raise
        return False  # not made by a store
    with (
        lookup.closing(fd),
        lookup.ignoring(errno.EWOULDBLOCK, *_CANNOT_LOCK),
    ):  # without locks, its writer may be alive
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            os.unlink(temp, dir_fd=folder_fd)
        return True
    return False
