"""Mount of a write-back directory: starts or joins its uploader, and keeps it alive."""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from holdfast.checkpoint.store import open_store
from holdfast.errors import ERRORS, Conflict, Corrupt, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.jobs.writeback.config import EXCLUDED, UploaderConfig
from holdfast.jobs.writeback.files import scan
from holdfast.jobs.writeback.journal import FOLDER, Journal
from holdfast.jobs.writeback.reconciliation import ASIDE
from holdfast.jobs.writeback.status import ALIVE, DirectoryStatus, has_uploader, status_of, wait_until_settled
from holdfast.jobs.writeback.uploader import HOLDERS_FIFO, LIFECYCLE_LOCK
from holdfast.system.documents import decode_as, to_plain
from holdfast.system.entry import command
from holdfast.system.linux.files import opened
from holdfast.system.linux.locks import try_flock

LOG = "log"
_POLL_S, _LOOK_S = 0.02, 0.1


class Mount:
    """Handle that keeps a directory's uploader alive. Created by `mount`.

    The handle is a file descriptor. A process that inherits it keeps the uploader alive too: if a job
    inherits it (`pass_fds=(mount.fileno(),)`), its files are uploaded even after the mounting process was
    killed. When the last handle is closed, the uploader sends the remaining files and exits.
    """

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fd = fd

    def fileno(self) -> int:
        """Return the file descriptor. Child processes only inherit it if it is passed to them."""
        return self._fd

    def status(self) -> DirectoryStatus:
        """Return the current status; see `status_of`."""
        return status_of(self.directory)

    def drain(self, timeout_s: float | None = None) -> DirectoryStatus:
        """Wait until all closed files are in the bucket; see `wait_until_settled`."""
        return wait_until_settled(self.directory, timeout_s=timeout_s)

    def close(self, *, timeout_s: float | None = 0.0) -> DirectoryStatus:
        """Close the handle. The uploader exits when all handles are closed and all files are uploaded.

        Args:
            timeout_s: limit for waiting until the uploader exits. None: wait without limit.

        Returns:
            The status of the directory.

        Blocks: until the uploader has exited, at most `timeout_s`.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        began_s = time.monotonic()
        while has_uploader(self.directory) and (timeout_s is None or time.monotonic() - began_s < timeout_s):
            time.sleep(_POLL_S)
        return status_of(self.directory)

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def mount(
    directory: str | os.PathLike[str],
    place: str | os.PathLike[str],
    *,
    fetch: bool = True,
    fetch_bytes: int | None = None,
    exclude: Sequence[str] = EXCLUDED,
    owner: str = "",
    attempt: int = 0,
    is_shared: bool = False,
    copy_bytes: int = 4 << 20,
    kept_bytes: int = 16 << 30,
    timeout_s: float | None = None,
) -> Mount:
    """Mount a directory, and upload its files to a place in closing order.

    If the directory has a living uploader, joins it. If the uploader was killed, starts a new one that
    continues its work. So mount again whenever you find the uploader dead.

    Args:
        directory: local directory, created if needed. On a shared file system, changes by other hosts are not
            seen.
        place: path or URL, as accepted by `open_store`.
        fetch: download all that the place holds into the directory first.
        fetch_bytes: limit for that download. None: as much as the disk has room for.
        exclude: globs for names of files or directories that stay local.
        owner: owner of the mount, such as the id of a job. Mounts of other owners, or without one, do not
            affect each other.
        attempt: attempt of the owner, from 1. Mounts of the same attempt write side by side, as the nodes of
            a job do. A mount of a newer attempt takes over: older ones stop uploading, and a directory that
            was mounted for an older one receives the newer one's files.
        is_shared: other directories are mounted for the same attempts of the owner, as on several machines.
            In a directory of an earlier attempt, all files are then replaced by those of the place. First
            mount it as that attempt, to upload what is left in it.
        copy_bytes: files up to this size are copied when they are closed, so that every version is uploaded
            even if the file is overwritten soon.
        kept_bytes: limit for larger files that were deleted or replaced before they were uploaded.
        timeout_s: limit for the whole call. None: as long as the download takes.

    Raises:
        InvalidInput: `directory` is a file, `place` is invalid or inside `directory`, or more than
            `fetch_bytes` would be downloaded.
        Conflict: the uploader sends to another place, or a newer attempt has mounted the place.
        RetryLater: the place or the disk failed, or the time ran out. Mount again to continue.
        Unsupported: the system lacks a required feature.

    Blocks: until the place's files are downloaded, and every later change is recorded.
    """
    root = Path(directory).absolute()
    url = resolve_place(root, place)
    config = UploaderConfig(
        str(root), url, fetch, fetch_bytes, tuple(exclude), owner, attempt, is_shared, copy_bytes, kept_bytes
    )
    began_s = time.monotonic()

    def check() -> None:
        if timeout_s is not None and time.monotonic() - began_s > timeout_s:
            what = f"Mounting {root} timed out: not all of {url} is downloaded yet"
            raise RetryLater(f"{what}. Mount again to continue.")

    return hold_mount(config, check)


def hold_mount(config: UploaderConfig, on_look: Callable[[], object]) -> Mount:
    """Mount a directory. While that takes, `on_look` is called, which ends the wait if it raises."""
    root = Path(config.directory)
    folder = create_folder(root)
    with lifecycle_lock(folder, on_look):
        held = Mount(root, os.open(folder / HOLDERS_FIFO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            if not _join(config, on_look):
                _start(folder, config, on_look)
        except BaseException:
            os.close(held.fileno())
            raise
    return held


def resolve_place(root: Path, place: str | os.PathLike[str]) -> str:
    """Return the URL of a place, after checking that it can receive `root`'s files."""
    url = open_store(place).url
    if url.startswith("memory:"):
        raise InvalidInput(f"{url} is in the memory of this process, and the uploader is another process.")
    if url.startswith("/") and (Path(url).is_relative_to(root) or root.is_relative_to(url)):
        raise InvalidInput(f"{root} and {url}: neither may be inside the other.")
    return url


def create_folder(root: Path) -> Path:
    """Create a directory and the uploader's folder in it, and return the folder."""
    folder = root / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(folder / HOLDERS_FIFO, 0o600)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise InvalidInput(f"Cannot mount {root}: it, or a part of its path, is a file.") from error
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
            raise Unsupported(f"{root} is on a file system without named pipes. Use a local disk.") from error
        raise RetryLater(f"Cannot mount {root}: {error.strerror}.") from error
    return folder


@contextmanager
def lifecycle_lock(folder: Path, on_look: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock under which uploaders start and exit."""
    with opened(folder / LIFECYCLE_LOCK, os.O_RDWR | os.O_CREAT) as fd:
        while not try_flock(fd):
            on_look()
            time.sleep(_POLL_S)
        yield


def _join(config: UploaderConfig, on_look: Callable[[], object]) -> bool:
    """Return True if an uploader is ready, after waiting for one that is starting."""
    root = Path(config.directory)
    while has_uploader(root):
        with suppress(NotFound), closing(Journal(root)) as journal:  # not found: it is just starting
            place, state = journal.get("place"), journal.get("state")
            if state == ALIVE and place != config.place:
                raise Conflict(
                    f"{root} is already mounted, and its files go to {place}, not to {config.place}."
                )
            if state == ALIVE:
                return True
        on_look()
        time.sleep(_POLL_S)
    return False


def _start(folder: Path, config: UploaderConfig, on_look: Callable[[], object]) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as replies:
        try:
            with (folder / LOG).open("ab") as log:
                words = ("--config", json.dumps(to_plain(config)), "--ready", str(writing))
                # Returns when the uploader has forked, so that it is not a child of this process.
                subprocess.run(
                    command("holdfast.jobs.writeback", *words),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(writing,),
                    start_new_session=True,
                    check=False,
                )
        finally:
            os.close(writing)
        answered = select.poll()  # unlike select(), it takes descriptors of 1024 and more
        answered.register(replies, select.POLLIN)
        while not answered.poll(_LOOK_S * 1000):
            on_look()
        reply = replies.read()  # empty if the uploader has exited without one
    try:
        error, message = decode_as(tuple[str, str], reply, "the uploader's reply", any_text=True)
    except Corrupt:
        tail = (folder / LOG).read_text(errors="replace")[-2000:]
        what = f"The uploader of {config.directory} died while it started. Its log: {tail}"
        raise RetryLater(what) from None
    if error:
        raise ERRORS.get(error, RetryLater)(message)


def remove_uploaded(directory: str | os.PathLike[str]) -> bool:
    """Remove a write-back directory from this machine, if its bucket has everything in it.

    The files of the bucket stay. A directory that has any other file stays too, for example an unfinished
    one, or one that was set aside.

    Returns:
        False if the directory has an uploader, or another file.

    Raises:
        RetryLater: the journal cannot be read now.
        Corrupt: the journal is damaged.
        OSError: the directory cannot be removed.

    Blocks: for a scan of all files.
    """
    root = Path(directory).absolute()
    folder, removed = root / FOLDER, root.with_name(f".{root.name}.removed")
    if removed.exists():  # left by a kill
        shutil.rmtree(removed)
    if not folder.is_dir():
        return not root.exists()
    with lifecycle_lock(folder):
        if has_uploader(root) or not _is_all_sent(root):
            return False
        # At once: to an uploader, a missing file of which the journal lists an upload is a deleted one.
        root.rename(removed)
    shutil.rmtree(removed)
    return True


def _is_all_sent(root: Path) -> bool:
    try:
        if not status_of(root).is_drained or (root / FOLDER / ASIDE).exists():
            return False
    except NotFound:
        return False
    with closing(Journal(root)) as journal:
        sent = journal.load().sent
    found, others = scan(root, lambda name: name.split("/")[0] == FOLDER)
    return not others and all(one.name in sent for one in found)
