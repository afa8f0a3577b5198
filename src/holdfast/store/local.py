"""A store in a directory tree: the fast disk of a host, or a shared one that is mounted.

An object is a file. A put writes a file `.unfinished-PID-RANDOM` beside the target, under an `flock` that
ends with the process, makes it durable, and then gives it its name by rename(2), or by link(2) where the name
must be free. `sweep` removes unfinished files whose lock is free.

The root may be reached through symbolic links, which are resolved once. Below it no link is followed, and
only regular files are read or written: a home may come from a stranger (docs/design/017).
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.failpoint import failpoint
from holdfast.format.names import check_size
from holdfast.store import direct
from holdfast.store.contract import Buffer, Entry, Properties, Store, wrong_length
from holdfast.store.lookup import (
    O_PATH,
    NotRegular,
    make_folders,
    open_below,
    open_regular,
    opened_folder,
)
from holdfast.store.naming import UNFINISHED, check_name, check_prefix

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR)
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_CANNOT_FSYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EROFS)
_CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_LINK = (
    "it is a symbolic link or is reached through one, and links inside a home are not followed. If you made "
    "the link yourself, put the file or folder in its place."
)
_NOT_REGULAR = "it is not a regular file."
_OTHER_NAMES = "the file has other names (hard links) too."
_MAX_CREATE_TRIES = 16
_MAX_DURABLE = 64


class LocalStore(Store):
    """A directory tree; its URL is the absolute path of `root`.

    Nothing is created before the first put. A root that has once been seen is never created again: if it is
    gone, or is on another file system than before (an unmounted disk leaves its empty mount point behind),
    every call raises `RetryLater` until it is back, rather than write elsewhere or report that all is gone.

    When the last step of a put fails, making its directory durable, the put raises `RetryLater` although the
    object may stand under its name; it is then whole.

    Args:
        root: directory; relative paths are taken from the current directory at this call.
        survives_host: say True where the tree is on a disk that outlives the machine. A path does not tell,
            so the default is the careful answer.

    Raises:
        InvalidInput: `root` is a file.
        RetryLater: the file system does not answer.
    """

    def __init__(self, root: str | os.PathLike[str], *, survives_host: bool = False) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._real = Path(os.path.realpath(self.root))  # a link that is changed later leads nowhere else
        self.properties = Properties(survives_host=survives_host, read_align_bytes=direct.ALIGN_BYTES)
        self._seen: tuple[int, int] | None = None  # device and inode of the root
        self._durable: dict[str, tuple[int, int]] = {}  # directories whose names we know to be durable
        with self._refusing("open", ""), self._rooted():
            pass

    def path(self, name: str) -> Path:
        """File that holds the object `name`, whether it exists or not.

        Raises:
            InvalidInput: no object can have this name.
        """
        return self.root / check_name(name)

    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`.

        Raises:
            InvalidInput: a part of `name` is an object, or `name` is a directory.
            Unsupported: `if_absent` on a file system without hard links.
        """
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._put(name, len(view), lambda fd: direct.write(fd, view), if_absent=if_absent)

    def put_parts(
        self, name: str, parts: Iterable[Buffer], num_bytes: int, *, if_absent: bool = False
    ) -> None:
        """See `Store.put_parts`; goes through the page cache, one part at a time."""

        def write(fd: int) -> None:
            done = 0
            for part in parts:
                view = memoryview(part)
                rest = view.cast("B") if view.nbytes else memoryview(b"")
                while rest:
                    written = os.write(fd, rest)
                    rest, done = rest[written:], done + written
            if done != num_bytes:
                raise wrong_length(name, num_bytes, done)

        self._put(name, num_bytes, write, if_absent=if_absent)

    def _put(self, name: str, num_bytes: int, write: Callable[[int], None], *, if_absent: bool) -> None:
        target = self.path(name)
        folder = _folder_of(name)
        with self._refusing("write", name, num_bytes), self._made_root() as root:
            if if_absent and _kind(root, name) is not None:  # spares writing what is lost; link() decides
                raise _taken(target, name)
            folder_fd, temp, fd = self._create(root, folder)
            try:
                try:
                    write(fd)
                    failpoint("store.written")
                    os.fsync(fd)  # the data first: a name must never lead to bytes that a power cut takes
                    failpoint("store.synced")
                    _publish(folder_fd, temp, target, name, if_absent=if_absent)
                except BaseException:
                    with suppress(OSError):  # what brought us here says more; sweep() gets the file
                        os.unlink(temp, dir_fd=folder_fd)
                    raise
                finally:
                    os.close(fd)  # gives up the lock
                _sync(folder_fd)  # then the name
            finally:
                os.close(folder_fd)
            self._sync_up(root, folder)

    def link(self, source: str, name: str) -> None:
        """See `Store.link`: a hard link, so the two names share their bytes on the disk."""
        origin, target = self.path(source), self.path(name)
        folder, last = _folder_of(name), target.name
        with self._refusing("link", name), self._rooted() as root:
            kind = None if root is None else _kind(root, source)
            if root is None or kind is None or stat.S_ISDIR(kind):
                raise NotFound(f"{origin} does not exist.", key=source)
            if not stat.S_ISREG(kind):
                raise _refused(f"Cannot link {origin}", source, _NOT_REGULAR)
            temp = _unfinished()
            folder_fd = self._enter(root, folder)
            try:
                with opened_folder(root, _folder_of(source)) as source_fd:
                    _link(source_fd, origin.name, folder_fd, temp, target, name)
                try:
                    os.replace(temp, last, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
                finally:
                    with suppress(FileNotFoundError):  # a rename between two names of one file does nothing
                        os.unlink(temp, dir_fd=folder_fd)
                _sync(folder_fd)
            finally:
                os.close(folder_fd)
            self._sync_up(root, folder)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        with self._refusing("read", name), self._opened(name) as fd:
            num_bytes = os.fstat(fd).st_size
            check_size(name, num_bytes)
            data = bytearray(num_bytes)
            got = direct.read(fd, 0, memoryview(data))
            return bytes(memoryview(data)[:got])

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        with self._refusing("read", name, len(buffer)), self._opened(name) as fd:
            got = direct.read(fd, offset, buffer)
            if got < len(buffer):
                raise Corrupt(
                    f"{self.root / name} ends at byte {os.fstat(fd).st_size}; {len(buffer)} bytes at {offset}"
                    f" were wanted, {got} are there. The file is not the one that was written.",
                    key=name,
                )

    def append(self, name: str, data: bytes) -> None:
        """See `Store.append`."""
        check_name(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with self._refusing("append to", name, len(data)), self._made_root() as root:
            folder_fd, fd = self._open_in(root, _folder_of(name), name.rpartition("/")[2], flags)
            os.close(folder_fd)
            try:
                if os.fstat(fd).st_nlink != 1:
                    raise _refused(f"Cannot append to {self.root / name}", name, _OTHER_NAMES)
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            finally:
                os.close(fd)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`. Symbolic links and special files are listed, and refused when they are read.

        Raises:
            RetryLater: the store failed; raised while iterating.
        """
        return self._list(check_prefix(prefix))

    def size(self, name: str) -> int | None:
        """See `Store.size`.

        Raises:
            RetryLater: the store failed.
        """
        with self._refusing("look at", name):
            try:
                with self._opened(name) as fd:
                    return os.fstat(fd).st_size
            except NotFound:
                return None

    def delete(self, name: str) -> None:
        """See `Store.delete`; directories that are empty then are removed too.

        Raises:
            RetryLater: the store failed; the object may be there or not.
        """
        check_name(name)
        folder, last = _folder_of(name), name.rpartition("/")[2]
        with self._refusing("delete", name), self._rooted() as root:
            if root is None:
                return
            with suppress(FileNotFoundError, NotADirectoryError), _opened_for_sync(root, folder) as folder_fd:
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(last, dir_fd=folder_fd)
                _sync(folder_fd)
            self._remove_empty(root, folder)

    def sync(self, folder: str) -> None:
        """See `Store.sync`; what this process has made durable before is made so again.

        Another process may have removed the folder since and made it anew.
        """
        with self._refusing("sync", folder), self._rooted() as root:
            if root is None:
                return
            with suppress(FileNotFoundError, NotADirectoryError):
                for level in (folder, *map(_folder_of, _levels(folder))):
                    with _opened_for_sync(root, level) as fd:
                        _sync(fd)
            self._sync_up(root, "")

    def sweep(self, prefix: str = "") -> None:
        """See `Store.sweep`; also removes directories left empty.

        Raises:
            RetryLater: the store failed.
        """
        with self._refusing("sweep", check_prefix(prefix)), self._rooted() as root:
            if root is None:
                return
            for folder, folder_fd, entry in _walk(root, prefix):
                if entry.name.startswith(UNFINISHED) and _remove_if_abandoned(folder_fd, entry.name):
                    self._remove_empty(root, folder)

    def _list(self, prefix: str) -> Iterator[Entry]:
        with self._refusing("list", prefix), self._rooted() as root:
            if root is None:
                return
            for folder, _, entry in _walk(root, prefix):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if not name.startswith(prefix) or entry.name.startswith(UNFINISHED):
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    yield Entry(name, entry.stat(follow_symlinks=False).st_size)

    @contextmanager
    def _rooted(self) -> Iterator[int | None]:
        """Open the root for the block; None if it never was there.

        Raises:
            RetryLater: it was there before.
            InvalidInput: it is not a directory.
        """
        fd = self._open_root()
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    @contextmanager
    def _made_root(self) -> Iterator[int]:
        """Open the root for the block, made if it never was there."""
        fd = self._open_root()
        if fd is None:
            for level in (*reversed(self._real.parents), self._real):
                if not level.is_dir():
                    level.mkdir(exist_ok=True)
                    _sync_directory(level.parent)
            fd = self._open_root()
        if fd is None:
            raise RetryLater(self._vanished("is gone"))
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_root(self) -> int | None:
        seen = self._seen  # before looking: another thread may be making the root
        try:
            fd = os.open(self._real, O_PATH | os.O_CLOEXEC)
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
            raise InvalidInput(f"{self.root} is a file, so it cannot hold checkpoints; give another place.")
        device, inode = seen or (info.st_dev, info.st_ino)
        if device != info.st_dev and inode != info.st_ino:  # a remount of the same disk keeps the inode
            raise RetryLater(self._vanished("is on another file system than before"))
        self._seen = info.st_dev, info.st_ino

    def _vanished(self, how: str) -> str:
        return (
            f"The home {self.root} vanished: the directory {how}, though this process has seen it. Was its "
            "disk unmounted, or the directory deleted? It was not made anew, since that might write to the "
            "wrong disk. Bring it back, or open the store again if the loss is meant."
        )

    def _enter(self, root: int, folder: str) -> int:
        """Open a folder below the root, made if it is missing; `_sync_up` makes it durable."""
        for _ in range(_MAX_CREATE_TRIES):
            with suppress(FileNotFoundError):
                return _open_for_sync(root, folder)
            with suppress(FileNotFoundError):  # deletes remove folders that are empty
                make_folders(root, folder)
        return _open_for_sync(root, folder)

    def _open_in(self, root: int, folder: str, name: str, flags: int) -> tuple[int, int]:
        """Open a file whose folder may have to be made; return the folder's descriptor and the file's."""
        for tries in range(_MAX_CREATE_TRIES):
            folder_fd = self._enter(root, folder)
            try:
                return folder_fd, open_regular(folder_fd, name, flags)
            except FileNotFoundError:  # the folder was empty and has been removed
                os.close(folder_fd)
                if tries == _MAX_CREATE_TRIES - 1:
                    raise
            except BaseException:
                os.close(folder_fd)
                raise
        raise AssertionError

    def _create(self, root: int, folder: str) -> tuple[int, str, int]:
        """Make a new unfinished file, locked; return its folder's descriptor, its name and its own."""
        while True:
            temp = _unfinished()
            folder_fd, fd = self._open_in(root, folder, temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                with _ignoring(*_CANNOT_LOCK):  # without locks, sweep() removes nothing
                    fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return folder_fd, temp, fd
            except BaseException:
                os.close(fd)
                with suppress(FileNotFoundError):
                    os.unlink(temp, dir_fd=folder_fd)
                os.close(folder_fd)
                raise
            os.close(fd)  # a sweep got in between creation and lock, and took it for abandoned
            os.close(folder_fd)

    def _sync_up(self, root: int, folder: str) -> None:
        """Make the names of a folder, of those that lead to it and of the root durable.

        Each level once, whoever made it: another process may have, and not yet come to its fsync. Twice would
        double the time of a small put, since an fsync without changes still flushes the disk's cache.
        """
        for level in _levels(folder):
            info = os.stat(level, dir_fd=root, follow_symlinks=False)
            if self._durable.get(level) != (info.st_dev, info.st_ino):
                with _opened_for_sync(root, _folder_of(level)) as above:
                    _sync(above)
                self._remember(level, info)
        info = os.fstat(root)
        if self._durable.get("") != (info.st_dev, info.st_ino):
            for level in self._real.parents:  # whoever made them; above a mount point nothing is ours
                if level.stat().st_dev != info.st_dev and level != self._real.parent:
                    break
                _sync_directory(level)
            self._remember("", info)

    def _remember(self, level: str, info: os.stat_result) -> None:
        if len(self._durable) >= _MAX_DURABLE:
            self._durable.clear()
        self._durable[level] = info.st_dev, info.st_ino

    def _remove_empty(self, root: int, folder: str) -> None:
        with suppress(OSError):  # not empty, gone, or not ours: an empty directory does no harm
            for level in _levels(folder):
                with opened_folder(root, _folder_of(level)) as above:
                    os.rmdir(level.rpartition("/")[2], dir_fd=above)
                self._durable.pop(level, None)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self.path(name)
        with self._rooted() as root:
            if root is None:
                raise NotFound(f"{path} does not exist.", key=name)
            try:
                fd = open_regular(root, name, os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                raise NotFound(f"{path} does not exist.", key=name) from None
            except IsADirectoryError:
                raise NotFound(f"{path} is a directory, not an object.", key=name) from None
            except OSError as error:
                if not _is_foreign(error):
                    raise
                raise Corrupt(f"{path} was not read: {_why_foreign(error)}", key=name) from None
            try:
                yield fd
            finally:
                os.close(fd)

    @contextmanager
    def _refusing(self, verb: str, name: str, num_bytes: int | None = None) -> Iterator[None]:
        """Turn the operating system's errors into ours."""
        try:
            yield
        except (Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported):
            raise
        except OSError as error:
            path = self.root / name
            if _is_foreign(error):
                raise _refused(f"Cannot {verb} {path}", name, _why_foreign(error)) from None
            if error.errno in _IN_THE_WAY:
                raise InvalidInput(
                    f"Cannot {verb} {path}: a directory has this name, or a part of the path is a file "
                    f"({error.strerror}). Nothing was changed.",
                    key=name,
                ) from error
            kind = Denied if error.errno in _DENIED else RetryLater
            raise kind(_refusal(verb, path, error, num_bytes), key=name) from error


def _refusal(verb: str, path: Path, error: OSError, num_bytes: int | None) -> str:
    amount = "" if num_bytes is None else f" ({num_bytes} bytes)"
    space = ""
    if error.errno in _FULL:
        space = f" {_free_space(path)} Delete something there, or keep fewer checkpoints."
    if error.errno in _DENIED:
        space = " Set the permissions of this place, or give one that this user may write to."
    changed = " What was there before is unchanged." if verb == "write" else ""
    return f"Could not {verb} {path}{amount}: {error.strerror} (errno {error.errno}).{space}{changed}"


def _free_space(path: Path) -> str:
    for place in path.parents:
        with suppress(OSError):
            info = os.statvfs(place)
            return f"Its file system has {info.f_bavail * info.f_frsize} bytes free (a quota may allow less)."
    return "Its free space could not be read."


def _is_foreign(error: OSError) -> bool:
    """Return True if the error says that no store has made what has the name."""
    return isinstance(error, NotRegular) or error.errno == errno.ELOOP


def _why_foreign(error: OSError) -> str:
    return _NOT_REGULAR if isinstance(error, NotRegular) else _LINK


def _refused(cannot: str, name: str, why: str) -> InvalidInput:
    return InvalidInput(f"{cannot}: {why} Nothing was changed.", key=name)


def _publish(folder_fd: int, temp: str, target: Path, name: str, *, if_absent: bool) -> None:
    if not if_absent:
        os.replace(temp, target.name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        failpoint("store.linked")
        return
    try:
        _link(folder_fd, temp, folder_fd, target.name, target, name)  # refuses a name that is taken
    except FileExistsError:
        raise _taken(target, name) from None
    failpoint("store.linked")
    os.unlink(temp, dir_fd=folder_fd)


def _link(source_fd: int, source: str, folder_fd: int, last: str, target: Path, name: str) -> None:
    try:
        os.link(source, last, src_dir_fd=source_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        raise Unsupported(
            f"The file system of {target} has no hard links ({error.strerror}), so a name cannot be taken "
            "there without a race. Nothing was changed. Use another place as home.",
            key=name,
        ) from error


def _taken(target: Path, name: str) -> Conflict:
    return Conflict(f"{target} exists already; it was left alone.", key=name)


def _unfinished() -> str:
    return f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"


def _folder_of(name: str) -> str:
    """Return the part of a name before its last slash; "" for the root."""
    return name.rpartition("/")[0]


def _levels(folder: str) -> Iterator[str]:
    """Yield a folder and those that lead to it, without the root."""
    while folder:
        yield folder
        folder = _folder_of(folder)


def _kind(root: int, name: str) -> int | None:
    """Return the mode bits of anything that has this name, a link's own; None if nothing has it."""
    with suppress(FileNotFoundError, NotADirectoryError), opened_folder(root, _folder_of(name)) as folder_fd:
        return os.stat(name.rpartition("/")[2], dir_fd=folder_fd, follow_symlinks=False).st_mode
    return None


def _walk(root: int, prefix: str) -> Iterator[tuple[str, int, os.DirEntry[str]]]:
    """Yield all but folders, from the folders that can hold names with this prefix.

    Yields:
        the folder's path, its descriptor, and the entry.
    """
    parent, _, start = prefix.rpartition("/")
    pending = [(parent, start)]
    while pending:
        folder, start = pending.pop()
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            opened_folder(root, folder, readable=True) as folder_fd,
            os.scandir(folder_fd) as entries,
        ):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield folder, folder_fd, entry
                elif entry.name.startswith(start):
                    pending.append((f"{folder}/{entry.name}" if folder else entry.name, ""))


def _open_for_sync(root: int, folder: str) -> int:
    try:
        return open_below(root, folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # it may be entered but not read; there is no other way to sync it
        return open_below(root, folder, O_PATH | os.O_DIRECTORY)


@contextmanager
def _opened_for_sync(root: int, folder: str) -> Iterator[int]:
    fd = _open_for_sync(root, folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync(folder_fd: int) -> None:
    with _ignoring(*_CANNOT_FSYNC):  # some FUSE file systems have no fsync for directories
        os.fsync(folder_fd)


def _sync_directory(directory: Path) -> None:
    """Make the names in a directory above the root durable."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        _sync(fd)
    finally:
        os.close(fd)


def _remove_if_abandoned(folder_fd: int, temp: str) -> bool:
    """Remove an unfinished file if its lock is free, that is, if its writer is dead."""
    try:
        fd = open_regular(folder_fd, temp, os.O_RDWR)  # network file systems lock only what can be written
    except (FileNotFoundError, PermissionError):  # finished meanwhile, or somebody else's
        return False
    except OSError as error:
        if not _is_foreign(error):
            raise
        return False  # no store made it
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            os.unlink(temp, dir_fd=folder_fd)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:  # nobody can tell whether its writer lives
            raise
        return False
    finally:
        os.close(fd)
    return True


@contextmanager
def _ignoring(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
