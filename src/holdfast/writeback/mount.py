"""Mounts a write-back directory: starts its uploader, or joins the one that lives, and holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from holdfast import errors
from holdfast.documents import decode_object
from holdfast.entry import command
from holdfast.errors import Conflict, Corrupt, HoldfastError, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.store import open_store
from holdfast.writeback.journal import FOLDER, Journal
from holdfast.writeback.status import ALIVE, Status, is_locked, status_of, wait_until_settled
from holdfast.writeback.terms import EXCLUDED, Terms
from holdfast.writeback.uploader import DOOR, LIFE

LOG = "log"
_POLL_S = 0.02
_LATE = "{} could not be mounted in time: not all of {} is fetched yet. Mount again to go on."


class Mount:
    """A hold on a directory's uploader, which lives as long as anybody has one. Made by `mount`.

    The hold is a descriptor. A process that inherits it holds the uploader too, so a job that is given it
    (`pass_fds=(mount.fileno(),)`) keeps its files going to the bucket when the process that mounted is
    killed. When the last holder is gone, the uploader sends what is left and ends.
    """

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor; not inherited unless it is passed on."""
        return self._fd

    def status(self) -> Status:
        """What is not in the bucket; see `status_of`."""
        return status_of(self.directory)

    def drain(self, timeout_s: float | None = None) -> Status:
        """Wait until all that is closed is in the bucket; see `wait_until_settled`."""
        return wait_until_settled(self.directory, timeout_s=timeout_s)

    def close(self, *, timeout_s: float | None = 0.0) -> Status:
        """Let go. The uploader goes on while others hold it, and then until all is sent.

        Args:
            timeout_s: how long its end is waited for; None for as long as it takes.

        Returns:
            How the directory stands.

        Blocks: until the uploader is gone, at most `timeout_s`.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        began_s = time.monotonic()
        while is_locked(self.directory) and (timeout_s is None or time.monotonic() - began_s < timeout_s):
            time.sleep(_POLL_S)
        return status_of(self.directory)

    def __enter__(self) -> Mount:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def mount(
    directory: str | os.PathLike[str],
    place: str | os.PathLike[str],
    *,
    fetch: bool = True,
    exclude: Sequence[str] = EXCLUDED,
    owner: str = "",
    attempt: int = 0,
    copy_bytes: int = 4 << 20,
    kept_bytes: int = 16 << 30,
    timeout_s: float | None = None,
) -> Mount:
    """Make a directory whose files go to a place, in the order in which they are closed.

    If its uploader lives, this joins it; if it was killed, a new one goes on where it was. So a caller that
    finds the uploader dead mounts again.

    Args:
        directory: made if it is not there. On a local disk: changes that other hosts make to a shared one
            are not seen.
        place: path or URL, as `open_store` takes it.
        fetch: bring what the place holds into the directory first, all of it. False leaves it where it is.
        exclude: globs of names, of files or directories, that stay local.
        owner: whose mount it is, such as the id of a job. Mounts of other owners, or of none, do not concern
            each other.
        attempt: of the owner, from 1. Mounts of the same attempt write beside each other, as the nodes
            of a job do. A mount of a newer attempt takes over: earlier ones send no more, and a directory
            that was mounted for one of them takes what the newer one has put.
        copy_bytes: files up to this size are copied when they are closed, so that each version arrives,
            however soon it is overwritten.
        kept_bytes: limit on what is kept of larger files that were deleted or replaced before they were sent.
        timeout_s: the longest wait; None for as long as fetching takes.

    Raises:
        InvalidInput: `directory` is a file, or `place` cannot be one, or is in `directory`.
        Conflict: its uploader sends to another place, or a newer attempt has mounted the place.
        RetryLater: place or disk failed, or time ran out; mount again, and it goes on.
        Unsupported: the system lacks what is needed.

    Blocks: until what the place holds is here and every change from now on is seen.
    """
    root = Path(directory).absolute()
    url = checked_place(root, place)
    folder = made(root)
    with _door(folder):
        fd = os.open(folder / LIFE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        held = Mount(root, fd)
        try:
            if not _joined(root, url, timeout_s):
                terms = Terms(str(root), url, fetch, tuple(exclude), owner, attempt, copy_bytes, kept_bytes)
                _start(folder, terms, timeout_s)
        except BaseException:
            os.close(fd)
            raise
    return held


def checked_place(root: Path, place: str | os.PathLike[str]) -> str:
    """The URL of a place that files of `root` can go to.

    Raises:
        InvalidInput: it is in `root`, or the other way round, or dies with this process.
    """
    url = open_store(place).url
    if url.startswith("memory:"):
        raise InvalidInput(f"{url} is in the memory of one process, and the uploader is another.")
    if url.startswith("/") and (Path(url).is_relative_to(root) or root.is_relative_to(url)):
        raise InvalidInput(f"{root} and {url}: neither may be inside the other.")
    return url


def made(root: Path) -> Path:
    """The uploader's own folder in a directory; both are there then.

    Raises:
        InvalidInput: `root`, or a part of its path, is a file.
        Unsupported: its file system has no named pipes.
        RetryLater: it cannot be made now.
    """
    folder = root / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(folder / LIFE, 0o600)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise InvalidInput(f"{root} cannot be mounted: it, or a part of its path, is a file.") from error
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
            raise Unsupported(
                f"{root} is on a file system without named pipes; take a local disk."
            ) from error
        raise RetryLater(f"{root} cannot be mounted: {error.strerror}.") from error
    return folder


@contextmanager
def _door(folder: Path) -> Iterator[None]:
    """Hold the lock for coming and going: no uploader ends meanwhile, and nobody else starts one."""
    fd = os.open(folder / DOOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _joined(root: Path, url: str, timeout_s: float | None) -> bool:
    """Whether there is an uploader that is ready; waits for one that is starting.

    Raises:
        Conflict: it sends elsewhere.
        RetryLater: it was not ready in time.
    """
    began_s = time.monotonic()
    while is_locked(root):
        with suppress(NotFound):  # it has only just begun
            place, state = _facts(root)
            if state == ALIVE and place != url:
                raise Conflict(f"{root} is mounted already, and its files go to {place}, not to {url}.")
            if state == ALIVE:
                return True
        if timeout_s is not None and time.monotonic() - began_s > timeout_s:
            raise RetryLater(_LATE.format(root, url))
        time.sleep(_POLL_S)
    return False


def _facts(root: Path) -> tuple[str, str]:
    journal = Journal(root, is_reader=True)
    try:
        return journal.fact("place"), journal.fact("state")
    finally:
        journal.close()


def _start(folder: Path, terms: Terms, timeout_s: float | None) -> None:
    """Start an uploader and wait until it says that it is ready, or why it cannot be."""
    reading, writing = os.pipe()
    try:
        with (folder / LOG).open("ab") as log:
            subprocess.run(  # returns when the uploader has left it: it is nobody's child
                command("holdfast.writeback", "--terms", terms.text(), "--ready", str(writing)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,
                check=False,
            )
        os.close(writing)
        writing = -1
        said = _heard(reading, timeout_s)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if said != b"ready\n":
        raise _error(said, folder, terms)


def _heard(fd: int, timeout_s: float | None) -> bytes | None:
    """What the uploader says; b"" if it ended in silence, None if time ran out."""
    if not select.select([fd], [], [], timeout_s)[0]:
        return None
    said = bytearray()
    while data := os.read(fd, 1 << 16):
        said += data
    return bytes(said)


def _error(said: bytes | None, folder: Path, terms: Terms) -> HoldfastError:
    if said is None:
        return RetryLater(_LATE.format(terms.directory, terms.place))
    with suppress(Corrupt):
        facts = decode_object(said, "what the uploader said", any_text=True)
        kinds = {kind.kind: kind for kind in vars(errors).values() if _is_error(kind)}
        return kinds[facts.choice("kind", kinds)](facts.text("message"))
    tail = (folder / LOG).read_text(errors="replace")[-2000:]
    return RetryLater(f"The uploader of {terms.directory} died while it started. It said: {tail}")


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, HoldfastError)
