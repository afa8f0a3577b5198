"""A store in a directory tree: the fast disk of a host, or a shared one that is mounted.

An object is a file. A put writes a file `.unfinished-PID-RANDOM` beside the target, under an `flock` that
ends with the process, makes it durable, and then gives it its name by rename(2), or by link(2) where the name
must be free. `sweep` removes unfinished files whose lock is free.
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

from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.killpoint import kill_point
from holdfast.store import direct
from holdfast.store.contract import Buffer, Entry, Properties, Store, wrong_length
from holdfast.store.naming import UNFINISHED, check_name, check_prefix

_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR)
_CANNOT_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_CANNOT_FSYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
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
        self.properties = Properties(survives_host=survives_host, read_align_bytes=direct.ALIGN_BYTES)
        self._seen: tuple[int, int] | None = None  # device and inode of the root
        self._durable: dict[Path, tuple[int, int]] = {}  # directories whose names we know to be durable
        with self._refusing("open", ""):
            self._check_root()

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
        with self._refusing("write", name, num_bytes):
            if if_absent and os.path.lexists(target):  # spares writing what cannot be kept; link() decides
                raise _taken(target, name)
            temp, fd = self._create(target.parent)
            try:
                try:
                    write(fd)
                    kill_point("store.written")
                    os.fsync(fd)  # the data first: a name must never lead to bytes that a power cut takes
                    kill_point("store.synced")
                    _publish(temp, target, name, if_absent=if_absent)
                except BaseException:
                    with suppress(OSError):  # what brought us here says more; sweep() gets the file
                        temp.unlink()
                    raise
            finally:
                os.close(fd)  # gives up the lock
            self._sync_up(target.parent)  # then the name

    def link(self, source: str, name: str) -> None:
        """See `Store.link`: a hard link, so the two names share their bytes on the disk."""
        origin, target = self.path(source), self.path(name)
        with self._refusing("link", name):
            if not origin.is_file():
                raise NotFound(f"{origin} does not exist.", key=source)
            self._check_root()
            self._make_directories(target.parent)
            temp = target.parent / f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
            _link(origin, temp, name)
            try:
                temp.replace(target)
            finally:
                temp.unlink(missing_ok=True)  # a rename between two names of one file does nothing
            self._sync_up(target.parent)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        with self._refusing("read", name), self._opened(name) as fd:
            data = bytearray(os.fstat(fd).st_size)
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
        target = self.path(name)
        with self._refusing("append to", name, len(data)):
            fd = self._open_in(target.parent, target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            finally:
                os.close(fd)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`. Links to files are followed, links to directories are not.

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
        target = self.path(name)
        with self._refusing("delete", name):
            self._check_root()
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            with suppress(FileNotFoundError, NotADirectoryError):
                _sync_directory(target.parent)
            self._remove_empty(target.parent)

    def sweep(self, prefix: str = "") -> None:
        """See `Store.sweep`; also removes directories left empty.

        Raises:
            RetryLater: the store failed.
        """
        with self._refusing("sweep", check_prefix(prefix)):
            for entry in self._walk(prefix):
                if entry.name.startswith(UNFINISHED) and _remove_if_abandoned(Path(entry.path)):
                    self._remove_empty(Path(entry.path).parent)

    def _list(self, prefix: str) -> Iterator[Entry]:
        skip = len(self.url.rstrip("/")) + 1
        with self._refusing("list", prefix):
            for entry in self._walk(prefix):
                name = entry.path[skip:]
                if not name.startswith(prefix) or entry.name.startswith(UNFINISHED):
                    continue
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_file():
                        yield Entry(name, entry.stat().st_size)

    def _walk(self, prefix: str) -> Iterator[os.DirEntry[str]]:
        """Everything that is no directory, in the directories that can hold names with this prefix."""
        if not self._check_root():
            return
        parent, _, start = prefix.rpartition("/")
        pending = [(self.root / parent, start)]
        while pending:
            directory, start = pending.pop()
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        yield entry
                    elif entry.name.startswith(start):
                        pending.append((Path(entry.path), ""))

    def _check_root(self) -> bool:
        """True if the root is there, False if it never was.

        Raises:
            RetryLater: it was there before.
            InvalidInput: it is not a directory.
        """
        seen = self._seen  # before looking: another thread may be making the root
        try:
            info = self.root.stat()
        except (FileNotFoundError, NotADirectoryError):
            if seen is None:
                return False
            raise RetryLater(self._vanished("is gone")) from None
        if not stat.S_ISDIR(info.st_mode):
            raise InvalidInput(f"{self.root} is a file, so it cannot hold checkpoints; give another place.")
        device, inode = seen or (info.st_dev, info.st_ino)
        if device != info.st_dev and inode != info.st_ino:  # a remount of the same disk keeps the inode
            raise RetryLater(self._vanished("is on another file system than before"))
        self._seen = info.st_dev, info.st_ino
        return True

    def _vanished(self, how: str) -> str:
        return (
            f"The home {self.root} vanished: the directory {how}, though this process has seen it. Was its "
            "disk unmounted, or the directory deleted? It was not made anew, since that might write to the "
            "wrong disk. Bring it back, or open the store again if the loss is meant."
        )

    def _make_directories(self, directory: Path) -> None:
        """Make `directory` and what leads to it; what is below the root is made durable by `_sync_up`."""
        if not self._check_root():
            for level in (*reversed(self.root.parents), self.root):
                if not level.is_dir():
                    level.mkdir(exist_ok=True)
                    _sync_directory(level.parent)
            self._check_root()
        for level in reversed(_below(self.root, directory)):
            level.mkdir(exist_ok=True)

    def _open_in(self, directory: Path, path: Path, flags: int) -> int:
        """Open a file that may need its directory made, though deletes remove directories that are empty."""
        for _ in range(_MAX_CREATE_TRIES):
            with suppress(FileNotFoundError):
                return os.open(path, flags | os.O_CLOEXEC, 0o666)
            with suppress(FileNotFoundError):
                self._make_directories(directory)
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def _create(self, directory: Path) -> tuple[Path, int]:
        """A new unfinished file, locked."""
        self._check_root()
        while True:
            temp = directory / f"{UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
            fd = self._open_in(directory, temp, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                with _ignoring(*_CANNOT_LOCK):  # without locks, sweep() removes nothing
                    fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return temp, fd
            except BaseException:
                os.close(fd)
                temp.unlink(missing_ok=True)
                raise
            os.close(fd)  # a sweep got in between creation and lock, and took it for abandoned

    def _sync_up(self, directory: Path) -> None:
        """Make every name from the root's own down to what is in `directory` durable.

        Each level once, whoever made it: another process may have, and not yet come to its fsync. Twice would
        double the time of a small put, since an fsync without changes still flushes the disk's cache.
        """
        _sync_directory(directory)
        for level in (*_below(self.root, directory), self.root):
            info = level.stat()
            if self._durable.get(level) != (info.st_dev, info.st_ino):
                _sync_directory(level.parent)
                if len(self._durable) >= _MAX_DURABLE:
                    self._durable.clear()
                self._durable[level] = info.st_dev, info.st_ino

    def _remove_empty(self, directory: Path) -> None:
        with suppress(OSError):  # not empty, gone, or not ours: an empty directory does no harm
            for level in _below(self.root, directory):
                level.rmdir()
                self._durable.pop(level, None)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self.path(name)
        try:
            self._check_root()
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{path} does not exist.", key=name) from None
        try:
            if path.is_dir():
                raise NotFound(f"{path} is a directory, not an object.", key=name)
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _refusing(self, verb: str, name: str, num_bytes: int | None = None) -> Iterator[None]:
        """Turn the operating system's errors into ours."""
        try:
            yield
        except (Conflict, Corrupt, InvalidInput, NotFound, RetryLater, Unsupported):
            raise
        except OSError as error:
            path = self.root / name
            if error.errno in _IN_THE_WAY:
                raise InvalidInput(
                    f"Cannot {verb} {path}: a directory has this name, or a part of the path is a file "
                    f"({error.strerror}). Nothing was changed.",
                    key=name,
                ) from error
            raise RetryLater(_refusal(verb, path, error, num_bytes), key=name) from error


def _refusal(verb: str, path: Path, error: OSError, num_bytes: int | None) -> str:
    amount = "" if num_bytes is None else f" ({num_bytes} bytes)"
    space = ""
    if error.errno in _FULL:
        space = f" {_free_space(path)} Delete something there, or keep fewer checkpoints."
    changed = " What was there before is unchanged." if verb == "write" else ""
    return f"Could not {verb} {path}{amount}: {error.strerror} (errno {error.errno}).{space}{changed}"


def _free_space(path: Path) -> str:
    for place in path.parents:
        with suppress(OSError):
            info = os.statvfs(place)
            return f"Its file system has {info.f_bavail * info.f_frsize} bytes free (a quota may allow less)."
    return "Its free space could not be read."


def _publish(temp: Path, target: Path, name: str, *, if_absent: bool) -> None:
    if not if_absent:
        temp.replace(target)
        kill_point("store.linked")
        return
    try:
        _link(temp, target, name)  # unlike rename, refuses a name that is taken
    except FileExistsError:
        raise _taken(target, name) from None
    kill_point("store.linked")
    temp.unlink()


def _link(source: Path, target: Path, name: str) -> None:
    try:
        target.hardlink_to(source)
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


def _below(root: Path, directory: Path) -> list[Path]:
    """`directory` and its parents up to `root`, which is left out."""
    levels = []
    while directory != root:
        levels.append(directory)
        directory = directory.parent
    return levels


def _sync_directory(directory: Path) -> None:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a directory that may be entered but not read; there is no other way to sync it
        return
    try:
        with _ignoring(*_CANNOT_FSYNC):  # some FUSE file systems have no fsync for directories
            os.fsync(fd)
    finally:
        os.close(fd)


def _remove_if_abandoned(temp: Path) -> bool:
    """Remove an unfinished file if its lock is free, that is, if its writer is dead."""
    try:
        fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC)  # network file systems lock only what can be written
    except (FileNotFoundError, PermissionError):  # finished meanwhile, or somebody else's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temp.unlink(missing_ok=True)
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
