"""Main loop of the uploader: queues changes that inotify reports, and exits after the last holder.

Source: inotify(7).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from holdfast.checkpoint.store import open_store
from holdfast.errors import Conflict, HoldfastError, Internal, RetryLater, Unsupported
from holdfast.jobs.writeback import files
from holdfast.jobs.writeback.config import OPEN_LIMIT_S, UploaderConfig
from holdfast.jobs.writeback.journal import FOLDER, JournaledQueue
from holdfast.jobs.writeback.reconciliation import reconcile, record_attempt
from holdfast.jobs.writeback.sender import Sender
from holdfast.jobs.writeback.status import ALIVE, ENDED, FAILED, FENCED, LOCK, STARTING
from holdfast.jobs.writeback.upload_queue import COPY, REJECTED, UploadProblem, Version
from holdfast.jobs.writeback.versions import KeptVersions
from holdfast.system.failpoint import failpoint
from holdfast.system.linux.locks import try_flock
from holdfast.system.log import get_logger

_log = get_logger("jobs.writeback")

HOLDERS_FIFO, LIFECYCLE_LOCK = "holders", "door"
"""FIFO whose writers keep the uploader alive, and lock under which uploaders start and exit."""
_TICK_S, _CLOSING_TICK_S = 0.25, 0.02
_RECHECK_S = 0.03  # after this time, any later write to a file changes its mtime
_OPEN_S = 1.0  # between two checks of a file that was open
_LIMIT_CHECK_S = 1.0  # between two checks of the space for kept versions
_LOCK_LIMIT_S = 5.0
_MAX_LOST_VERSIONS = 100
_LINGER_S = 60.0  # limit of waiting for open files after the last holder is gone
_GIVE_UP_S = 3600.0  # limit of retrying a failing place after the last holder is gone


class Uploader:
    """Uploader of one directory. One thread does everything except sending."""

    def __init__(self, config: UploaderConfig) -> None:
        self._config = config
        self._root = Path(config.directory)
        self._folder = self._root / FOLDER
        self._pending: deque[FileEvent] = deque()
        self._pending_closes: Counter[str] = Counter()  # number of close events in `_pending` by name
        self._lost_versions: Counter[str] = Counter()  # number of a name since its last kept one
        self._lost_open: dict[str, float] = {}  # ends of the wait for files that were open again, by name
        self._deferred: dict[str, None] = {}  # names to be removed later
        self._open: dict[str, float] = {}  # times of the next check of files that were open
        self._recheck: dict[str, float] = {}
        self._closing_since_s: float | None = None
        self._is_finishing = False
        self._touched: set[int] = set()
        self._next_limit_check_s = 0.0
        self._lock_fd = _lock(self._folder)
        facts = {"pid": str(os.getpid()), "place": config.place, "exclude": json.dumps(config.exclude)}
        self._queue = JournaledQueue(self._root, state=STARTING, **facts)
        self._versions = KeptVersions(self._root, config.copy_bytes)
        self._watch = TreeWatch(self._root, config.is_excluded)
        self._holders_fd = os.open(self._folder / HOLDERS_FIFO, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # Without a first writer, a FIFO does not report that it has none; the mounting process may be dead.
        os.close(os.open(self._folder / HOLDERS_FIFO, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def prepare(self) -> None:
        """Reconcile directory and bucket, and start watching."""
        store = open_store(self._config.place)
        reconcile(store, self._root, self._config, self._queue, self._versions)
        if self._config.owner:
            record_attempt(store, self._config.owner, self._config.attempt)
        self._touched = self._versions.sweep(set(self._queue.order.entries))
        self._watch.add_tree()
        self._scan_all()
        self._sender = Sender(store, self._queue, self._versions, self._config)
        self._queue.set(state=ALIVE)

    def finish(self) -> None:
        """Upload what is closed, and exit without waiting for open files."""
        self._is_finishing = True

    def run(self) -> bool:
        """Record and upload changes until the last holder is gone."""
        try:
            is_drained = self._run()
        except HoldfastError as error:
            _log.error(error)
            state = FENCED if isinstance(error, Conflict) else FAILED
            with suppress(HoldfastError):  # without the directory, the journal is gone too
                self._queue.set(state=state, trouble=str(error), trouble_unix_s=str(time.time()))
            return False
        self._queue.set(state=ENDED)
        return is_drained

    def _run(self) -> bool:
        while True:
            self._wait()
            self._read_events()
            while self._pending:
                self._handle_next()
            if _take_due(self._lost_open):
                self._remove_deferred()
            for times in (self._open, self._recheck):  # of files that were open, or too new to compare
                for name in _take_due(times):
                    self._capture(name, is_second_scan=True)
            self._enforce_limit()
            self._check_sender()
            if (is_drained := self._is_done()) is not None:
                self._sender.stop(timeout_s=10.0)
                return is_drained

    def _wait(self) -> None:
        due_s = min(self._recheck.values(), default=float("inf")) - time.monotonic()
        poll = select.poll()
        poll.register(self._watch.fileno(), select.POLLIN)
        is_closing = self._closing_since_s is not None
        if not is_closing:
            poll.register(self._holders_fd, 0)  # reports when the last holder is gone
        poll.poll(1000 * max(0.0, min(_CLOSING_TICK_S if is_closing else _TICK_S, due_s)))

    def _check_sender(self) -> None:
        if isinstance(error := self._sender.error, HoldfastError):
            raise error
        if error is not None:
            raise Internal(f"Uploading ended because of a bug in Holdfast: {error!r}.") from error
        if not (self._folder / LOCK).exists():
            raise RetryLater(f"{self._folder} was deleted, including the journal. Nothing more is uploaded.")

    def _is_done(self) -> bool | None:
        """Return True if everything is uploaded and nothing needs the uploader, None to continue."""
        if not (self._is_finishing or self._is_abandoned()):
            self._closing_since_s = None
            return None
        now_s = time.monotonic()
        self._closing_since_s = now_s if self._closing_since_s is None else self._closing_since_s
        waited_s = now_s - self._closing_since_s
        if self._queue.order.entries:
            return False if waited_s > _GIVE_UP_S else None
        found, _ = files.scan(self._root, self._config.is_excluded)
        is_open = any(files.is_open_now(self._root / one.name) for one in found)
        if is_open and not self._is_finishing and waited_s < _LINGER_S:
            return None
        has_work = self._recheck or (self._deferred and not self._lost_open)
        lock_fd = None if has_work else self._lock_out_holders()
        if lock_fd is None:
            return None
        self._read_events()
        if self._pending:
            os.close(lock_fd)
            return None
        return not (is_open or self._queue.order.problems)  # the lock is held until this process exits

    def _is_abandoned(self) -> bool:
        """Return True if no process holds the mount."""
        if self._config.until_signal:
            return False
        poll = select.poll()
        poll.register(self._holders_fd, select.POLLIN)
        return any(mask & select.POLLHUP for _, mask in poll.poll(0))

    def _lock_out_holders(self) -> int | None:
        """Lock out new holders until the returned descriptor is closed. Return None if one is arriving."""
        fd = os.open(self._folder / LIFECYCLE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if try_flock(fd) and (self._is_finishing or self._is_abandoned()):
            return fd
        os.close(fd)
        return None

    def _read_events(self) -> None:
        for event in self._watch.read():
            self._pending.append(event)
            if event.kind in (CLOSED, MOVED_TO):
                self._pending_closes[event.name] += 1

    def _handle_next(self) -> None:
        event = self._pending.popleft()
        if event.kind in (CLOSED, MOVED_TO):
            self._pending_closes[event.name] -= 1
            if not self._pending_closes[event.name]:
                del self._pending_closes[event.name]
        if event.kind == LOST:
            _log.info("file events were lost, scanning all files")
            self._scan_all()
        elif event.is_directory:
            self._handle_directory(event)
        elif event.kind == MOVED_FROM:
            self._handle_moved_from(event)
        elif event.kind == DELETED:
            self._remove(event.name)
        elif event.kind == CREATED:
            self._handle_created(event.name)
        else:
            self._capture(event.name)

    def _handle_directory(self, event: FileEvent) -> None:
        if event.kind == CREATED:
            self._watch.add_tree(event.name)
            self._scan_all(event.name)  # files that were created before the watch
        elif event.kind in (MOVED_FROM, MOVED_TO):
            target = self._take_rename_target(event) if event.kind == MOVED_FROM else None
            self._watch.forget_tree(event.name)
            self._scan_all(renamed=(event.name, target.name) if target else None)

    def _handle_moved_from(self, event: FileEvent) -> None:
        """Handle the first half of a rename: the file was moved or has left the directory."""
        if target := self._take_rename_target(event):
            entry = self._queue.do(lambda order: order.withdraw(event.name))
            if entry is not None:
                self._versions.drop(entry.number)
            self._capture(target.name, source=event.name)
        self._remove(event.name)  # after the new name is queued, so that one of them always exists

    def _take_rename_target(self, event: FileEvent) -> FileEvent | None:
        """Return the second half of a rename, without its own event, if the file stayed in the directory."""
        targets = (one for one in self._pending if one.kind == MOVED_TO and one.pair == event.pair)
        if (found := next(targets, None)) is not None:
            self._pending.remove(found)
            self._pending_closes[found.name] -= 1
        return found

    def _handle_created(self, name: str) -> None:
        """Handle a new file. It will be closed later, except for a hard link."""
        with suppress(FileNotFoundError, NotADirectoryError):
            info = (self._root / name).lstat()
            if files.type_problem(info.st_mode):
                self._remove(name)  # the file that it replaces; `status_of` reports the new one
            elif info.st_nlink > 1:
                self._capture(name)

    def _remove(self, name: str) -> None:
        """Remove a name from the bucket, later if a version of another file was lost.

        Such a file may be a marker: until its newest version is in the bucket, older files must stay.
        """
        self._recheck.pop(name, None)
        self._forget_lost(name)
        self._deferred[name] = None
        self._remove_deferred()

    def _remove_deferred(self) -> None:
        if self._lost_versions or self._lost_open:
            return
        for name in list(self._deferred):
            self._queue.do(lambda order, name=name: order.remove(name))
            del self._deferred[name]

    def _add_problem(self, name: str, why: str) -> None:
        with suppress(FileNotFoundError):
            problem = UploadProblem(REJECTED, why, files.Fingerprint.of((self._root / name).lstat()))
            self._queue.do(lambda order: (order.remove(name), order.add_problem(name, problem)))

    def _capture(self, name: str, *, source: str = "", is_second_scan: bool = False) -> None:
        """Keep the version of a file that was just closed, and queue it."""
        if files.name_problem(name) or self._is_closed_again(name):
            return
        try:
            fd = os.open(self._root / name, files.FOR_INSPECTION)
        except (FileNotFoundError, NotADirectoryError):
            return  # it was moved or deleted, which is another event
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._remove(name)
            else:
                self._add_problem(name, f"it cannot be read: {error.strerror}")
            return
        try:
            if files.type_problem(os.fstat(fd).st_mode):
                self._remove(name)
                return
            number = self._queue.order.last + 1
            is_closed_again = partial(self._is_closed_again, name, reads_events=True)
            version = self._versions.capture(number, name, fd, is_closed_again)
        finally:
            os.close(fd)
        if version is not None:
            self._enqueue(name, version, source, is_second_scan=is_second_scan)
            self._deferred.pop(name, None)  # it exists again
            self._forget_lost(name)
            self._remove_deferred()
            return
        if not is_second_scan:
            self._note_lost_open(name)
        if not self._pending_closes[name]:
            self._open[name] = time.monotonic() + _OPEN_S

    def _note_lost_open(self, name: str) -> None:
        """Record that a closed version was lost, as the file is open again."""
        with self._queue.changed:
            is_known = self._queue.order.fingerprint(name) is not None
        if is_known:  # nothing in the bucket refers to older files through a file that it does not have
            self._lost_open.setdefault(name, time.monotonic() + OPEN_LIMIT_S)

    def _forget_lost(self, name: str) -> None:
        for names in (self._lost_versions, self._lost_open, self._open):
            names.pop(name, None)

    def _enqueue(self, name: str, version: Version, source: str, *, is_second_scan: bool) -> None:
        with self._queue.changed:
            number = self._queue.order.last + 1
            if (
                is_second_scan
                and version.digest
                and self._queue.do(lambda order: order.confirm(name, version))
            ):
                self._versions.drop(number)
            else:
                self._queue.do(lambda order: order.put(name, version, source=source))
        failpoint("writeback.noted")
        if version.fingerprint.changed_ns == files.UNSETTLED and version.form == COPY:
            self._recheck[name] = time.monotonic() + _RECHECK_S
        else:
            self._recheck.pop(name, None)

    def _is_closed_again(self, name: str, *, reads_events: bool = False) -> bool:
        """Return True if a file has been closed again since the event."""
        if reads_events:
            self._read_events()
        if not self._pending_closes[name]:
            return False
        self._lost_versions[name] += 1
        return self._lost_versions[name] <= _MAX_LOST_VERSIONS

    def _scan_all(self, below: str = "", *, renamed: tuple[str, str] | None = None) -> None:
        """Queue all files that differ from the queue's newest version, oldest change first."""
        if not below:
            self._watch.add_tree()
        found, others = files.scan(self._root, self._config.is_excluded, below)
        inside = f"{below}/" if below else ""
        with self._queue.changed:
            known = {one.name: self._queue.order.fingerprint(one.name) for one in found}
            gone = [name for name in self._queue.order.newest_first() if name not in known]
        changed = [one for one in found if known[one.name] != one.fingerprint]
        for file in sorted(changed, key=lambda file: file.order(self._touched)):
            is_renamed = renamed is not None and file.name.startswith(f"{renamed[1]}/")
            source = renamed[0] + file.name.removeprefix(renamed[1]) if renamed and is_renamed else ""
            self._capture(file.name, source=source)
        for name in gone:
            if name.startswith(inside) and (name in others or not (self._root / name).is_file()):
                self._remove(name)

    def _enforce_limit(self) -> None:
        """Drop the oldest kept versions of replaced files when they exceed the limit."""
        if time.monotonic() < self._next_limit_check_s:
            return
        self._next_limit_check_s = time.monotonic() + _LIMIT_CHECK_S
        with self._queue.changed:
            entries = [entry for entry in self._queue.order.entries.values() if entry.version]
            begun = set(self._queue.order.begun)
        sizes = {entry.number: self._versions.exclusive_bytes(entry.number) for entry in entries}
        total = sum(sizes.values())
        for entry in entries:
            if total <= self._config.kept_bytes:
                return
            if sizes[entry.number] and entry.number not in begun:
                total -= sizes[entry.number]
                self._versions.drop(entry.number)  # the sender notices that the version is missing


def _take_due(times: dict[str, float]) -> list[str]:
    """Remove the names whose time has come, and return them."""
    now_s = time.monotonic()
    due = [name for name, due_s in times.items() if due_s <= now_s]
    for name in due:
        del times[name]
    return due


def _lock(folder: Path) -> int:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up_s = time.monotonic() + _LOCK_LIMIT_S
    while not try_flock(fd):  # a process that checks for an uploader also holds it for a moment
        if time.monotonic() > give_up_s:
            os.close(fd)
            raise Conflict(f"{folder.parent} already has an uploader.")
        time.sleep(0.01)
    return fd


CLOSED, CREATED, DELETED, MOVED_FROM, MOVED_TO, LOST = 0x8, 0x100, 0x200, 0x40, 0x80, 0x4000
"""Kinds of events: closed after writing, created, deleted, moved away, moved here, events lost."""
_IGNORED, _IS_DIRECTORY = 0x8000, 0x40000000
_ONLY_DIRECTORIES, _NO_LINKS, _NOT_AFTER_UNLINK = 0x01000000, 0x02000000, 0x04000000
_KINDS = CLOSED | CREATED | DELETED | MOVED_FROM | MOVED_TO
_WATCHED = _KINDS | _ONLY_DIRECTORIES | _NO_LINKS | _NOT_AFTER_UNLINK
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 20


class FileEvent(Struct, frozen=True):
    """Event of one name. Both events of a rename have the same `pair`."""

    kind: int
    name: str
    is_directory: bool = False
    pair: int = 0


class TreeWatch:
    """Watch of a directory and everything below it."""

    def __init__(self, root: Path, is_excluded: Callable[[str], bool]) -> None:
        self._root, self._is_excluded = root, is_excluded
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            reason = f"{os.strerror(ctypes.get_errno())}. You may have to raise fs.inotify.max_user_instances"
            raise Unsupported(f"Cannot watch {root}: {reason}.")
        self._names: dict[int, str] = {}

    def fileno(self) -> int:
        """Return the descriptor, which is readable when events are pending."""
        return self._fd

    def add_tree(self, name: str = "") -> None:
        """Watch a directory and everything below it. Renews the names of directories already watched."""
        pending = [name]
        while pending:
            below = pending.pop()
            if not self._add(below):
                continue
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / below) as entries:
                for entry in entries:
                    inner = f"{below}/{entry.name}" if below else entry.name
                    if entry.is_dir(follow_symlinks=False) and not self._is_excluded(inner):
                        pending.append(inner)

    def forget_tree(self, name: str) -> None:
        """Stop watching a directory that left the tree, and everything below it."""
        for number, known in list(self._names.items()):
            if known == name or known.startswith(f"{name}/"):
                self._libc.inotify_rm_watch(self._fd, number)
                del self._names[number]

    def read(self) -> list[FileEvent]:
        """Return the events since the last call, in order."""
        events: list[FileEvent] = []
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _READ_BYTES):
                events += self._parse(data)
        return events

    def _add(self, name: str) -> bool:
        """Watch one directory. Return False if it no longer exists."""
        path = os.fsencode(self._root / name)
        number = self._libc.inotify_add_watch(self._fd, path, _WATCHED)
        if number >= 0:
            self._names[number] = name
            return True
        reason = ctypes.get_errno()
        if reason in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            return False
        if reason == errno.ENOSPC:
            what = f"{self._root} has more directories than one user may watch"
            raise Unsupported(f"{what}. Raise fs.inotify.max_user_watches.")
        raise RetryLater(f"Cannot watch {self._root / name}: {os.strerror(reason)}.")

    def _parse(self, data: bytes) -> list[FileEvent]:
        events, at = [], 0
        while at < len(data):
            number, mask, pair, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size + length
            if mask & LOST:
                events.append(FileEvent(LOST, ""))
            elif mask & _IGNORED:
                self._names.pop(number, None)
            elif number in self._names:
                own = os.fsdecode(data[at - length : at].rstrip(b"\0"))
                folder = self._names[number]
                name = f"{folder}/{own}" if folder else own
                if own and not self._is_excluded(name):
                    kind = mask & _KINDS
                    events.append(FileEvent(kind, name, bool(mask & _IS_DIRECTORY), pair))
        return events
