"""The uploader's main loop: takes note of what happens in the directory, and ends by itself."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import signal
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from holdfast.errors import Conflict, HoldfastError, Internal, RetryLater
from holdfast.killpoint import kill_point
from holdfast.store import open_store
from holdfast.writeback.book import Book
from holdfast.writeback.capture import Captures
from holdfast.writeback.claim import claim
from holdfast.writeback.files import (
    UNSETTLED,
    Fingerprint,
    is_open_now,
    look,
    open_file,
    why_no_name,
    why_no_object,
)
from holdfast.writeback.journal import FOLDER, Journal
from holdfast.writeback.log import say
from holdfast.writeback.order import COPY, REFUSED, Deeds, Order, Problem, Version
from holdfast.writeback.reconcile import reconcile
from holdfast.writeback.sender import Sender
from holdfast.writeback.status import ALIVE, ENDED, FAILED, FENCED, LOCK, STARTING
from holdfast.writeback.terms import Terms
from holdfast.writeback.watch import CLOSED, CREATED, DELETED, LOST, MOVED_FROM, MOVED_TO, Event, Watch

LIFE, DOOR = "holders", "door"
"""A pipe that keeps the uploader alive while anybody holds its writing end; a lock for coming and going."""
_TICK_S, _CLOSING_TICK_S = 0.25, 0.02
_RECHECK_S = 0.03  # after this long, any later write to a file shows in its time
_OPEN_S = 1.0  # between two looks at a file that was open
_LET_GO_S = 1.0  # between two looks at how much is kept
_LOCK_LIMIT_S = 5.0
_MAX_OVERTAKEN = 100


class Uploader:
    """One directory's uploader. Everything but sending is done by one thread.

    Args:
        terms: of its work.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._root = Path(terms.directory)
        self._folder = self._root / FOLDER
        self._later: deque[Event] = deque()
        self._closed_later: Counter[str] = Counter()  # how often each name stands in `_later` as closed
        self._overtaken: Counter[str] = Counter()  # how many versions of a name were lost since its last one
        self._deferred: dict[str, None] = {}  # names that are gone
        self._open: dict[str, float] = {}  # when to look again at files that were open
        self._recheck: dict[str, float] = {}
        self._closing_since_s: float | None = None
        self._hurries = False
        self._touched: set[int] = set()
        self._let_go_s = 0.0
        self._lock_fd = _lock(self._folder)
        self._journal = Journal(self._root)
        facts = {"state": STARTING, "pid": str(os.getpid()), "place": terms.place}
        self._journal.state(**facts, exclude=json.dumps(terms.exclude), trouble="")
        self._book = Book(self._journal)
        self._captures = Captures(self._root, terms.copy_bytes)
        self._watch = Watch(self._root, terms.skips)
        self._life_fd = os.open(self._folder / LIFE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A pipe that never had a writer does not tell that it has none, and the mounter may be dead already.
        os.close(os.open(self._folder / LIFE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def prepare(self) -> None:
        """Bring directory and bucket together, and begin to watch.

        Raises:
            HoldfastError: the bucket, the disk or the system refuses.

        Blocks: until everything that the bucket holds is here, if that was asked for.
        """
        store = open_store(self._terms.place)
        reconcile(store, self._root, self._terms, self._book, self._captures)
        if self._terms.owner:
            claim(store, self._terms.owner, self._terms.attempt)
        self._touched = self._captures.sweep(set(self._book.order.entries))
        self._watch.add_tree()
        self._look_at_all()
        self._sender = Sender(store, self._book, self._captures, self._terms)
        self._sender.start()
        self._journal.state(state=ALIVE)

    def hurry(self) -> None:
        """Send what is closed, and end without waiting for files that are open."""
        self._hurries = True

    def run(self) -> bool:
        """Take note of what happens until nobody needs it any more.

        Returns:
            Whether all is in the bucket.
        """
        try:
            is_drained = self._run()
        except Conflict as error:
            return self._end(FENCED, str(error))
        except HoldfastError as error:
            return self._end(FAILED, str(error))
        self._journal.state(state=ENDED)
        return is_drained

    def _end(self, state: str, why: str) -> bool:
        say(why)
        with suppress(HoldfastError):  # where the directory is gone, so is the journal
            self._journal.state(state=state, trouble=why, trouble_unix_s=str(time.time()))
        return False

    def _run(self) -> bool:
        while True:
            self._wait()
            self._take()
            while self._later:
                self._handle(self._pop())
            self._look_again()
            self._let_go()
            self._check_sender()
            if (is_drained := self._is_over()) is not None:
                self._sender.stop(timeout_s=10.0)
                return is_drained

    def _wait(self) -> None:
        """Wait until something happens, or is due."""
        due_s = min(self._recheck.values(), default=float("inf")) - time.monotonic()
        poll = select.poll()
        poll.register(self._watch.fileno(), select.POLLIN)
        is_closing = self._closing_since_s is not None
        if not is_closing:
            poll.register(self._life_fd, 0)  # tells when the last holder has gone
        poll.poll(1000 * max(0.0, min(_CLOSING_TICK_S if is_closing else _TICK_S, due_s)))

    def _check_sender(self) -> None:
        if isinstance(self._sender.error, HoldfastError):
            raise self._sender.error
        if self._sender.error is not None:
            error = self._sender.error
            raise Internal(f"Sending ended by a bug of Holdfast's: {error!r}.") from error
        if not (self._folder / LOCK).exists():
            raise RetryLater(
                f"{self._folder} was deleted, and with it the journal. Nothing is sent any more."
            )

    # -- ending ----------------------------------------------------------------------------------------------

    def _is_over(self) -> bool | None:
        """Whether all is sent, if there is no reason to stay; None to go on."""
        if not (self._hurries or self._is_left()):
            self._closing_since_s = None
            return None
        now_s = time.monotonic()
        if self._closing_since_s is None:
            self._closing_since_s = now_s
        waited_s = now_s - self._closing_since_s
        if self._book.order.entries:
            return False if waited_s > self._terms.give_up_s else None
        is_open = self._has_open_files()
        if is_open and not self._hurries and waited_s < self._terms.linger_s:
            return None
        door_fd = None if self._recheck or self._deferred else self._close_door()
        if door_fd is None:
            return None
        self._take()
        if self._later:
            os.close(door_fd)
            return None
        return not (is_open or self._book.order.problems)  # the door stays closed until this process is gone

    def _is_left(self) -> bool:
        """Whether nobody holds the other end any more."""
        if self._terms.until_signal:
            return False
        poll = select.poll()
        poll.register(self._life_fd, select.POLLIN)
        return any(mask & select.POLLHUP for _, mask in poll.poll(0))

    def _close_door(self) -> int | None:
        """Keep new holders out while the descriptor is open; None if one is just coming in, or has come."""
        fd = os.open(self._folder / DOOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._hurries or self._is_left():
                return fd
        os.close(fd)
        return None

    def _has_open_files(self) -> bool:
        found, _ = look(self._root, self._terms.skips)
        return any(is_open_now(self._root / one.name) for one in found)

    # -- events ----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Read what has happened, behind what is still to be handled."""
        for event in self._watch.read():
            self._later.append(event)
            if event.kind in (CLOSED, MOVED_TO):
                self._closed_later[event.name] += 1

    def _pop(self) -> Event:
        event = self._later.popleft()
        if event.kind in (CLOSED, MOVED_TO):
            self._closed_later[event.name] -= 1
            if not self._closed_later[event.name]:
                del self._closed_later[event.name]
        return event

    def _handle(self, event: Event) -> None:
        if event.kind == LOST:
            say("events were lost; looking at every file")
            self._look_at_all()
        elif event.is_directory:
            self._handle_directory(event)
        elif event.kind == MOVED_FROM:
            self._handle_leaving(event)
        elif event.kind == DELETED:
            self._remove(event.name)
        elif event.kind == CREATED:
            self._handle_new_name(event.name)
        else:
            self._capture(event.name)

    def _handle_directory(self, event: Event) -> None:
        if event.kind == CREATED:
            self._watch.add_tree(event.name)
            self._look_at_all(event.name)  # files that were made before the watch
        elif event.kind in (MOVED_FROM, MOVED_TO):
            arrival = self._arrival(event) if event.kind == MOVED_FROM else None
            if arrival is not None:
                self._later.remove(arrival)
                self._closed_later[arrival.name] -= 1
            self._watch.forget_tree(event.name)
            self._look_at_all(renamed=(event.name, arrival.name) if arrival else None)

    def _handle_leaving(self, event: Event) -> None:
        """A file's name was taken away: it has another one, or has left the directory."""
        arrival = self._arrival(event)
        if arrival is None:
            self._remove(event.name)
            return
        self._later.remove(arrival)
        self._closed_later[arrival.name] -= 1
        withdrawn = []

        def withdraw(order: Order) -> Deeds:
            entry, deeds = order.withdraw(event.name)
            withdrawn.append(entry)
            return deeds

        self._book.do(withdraw)
        if withdrawn[0] is not None:
            self._captures.drop(withdrawn[0].number)
        self._capture(arrival.name, source=event.name)
        self._remove(event.name)  # after the new name is there, so that one of them always is

    def _arrival(self, event: Event) -> Event | None:
        """The other half of a rename, if it stayed within the directory."""
        return next((one for one in self._later if one.kind == MOVED_TO and one.pair == event.pair), None)

    def _handle_new_name(self, name: str) -> None:
        """A file is new, and will be closed; unless it is a link, which nobody closes."""
        with suppress(FileNotFoundError, NotADirectoryError):
            info = (self._root / name).lstat()
            if why_no_object(info.st_mode):
                self._remove(name)  # what it replaces; `status_of` sees it by itself
            elif info.st_nlink > 1:
                self._capture(name)

    def _remove(self, name: str) -> None:
        """A name is gone. That waits while the version of another file was lost.

        A marker that is rewritten in place says which older file may go; while its newest version has not
        taken the place of the lost one, the older file has to stay.
        """
        self._recheck.pop(name, None)
        self._open.pop(name, None)
        self._overtaken.pop(name, None)
        self._deferred[name] = None
        self._remove_deferred()

    def _remove_deferred(self) -> None:
        if self._overtaken:
            return
        for name in list(self._deferred):
            self._book.do(lambda order, name=name: order.remove(name))
            del self._deferred[name]

    def _object_to(self, name: str, why: str) -> None:
        with suppress(FileNotFoundError):
            problem = Problem(REFUSED, why, Fingerprint.of((self._root / name).lstat()))
            self._book.do(lambda order: [*order.remove(name), *order.object_to(name, problem)])

    # -- versions --------------------------------------------------------------------------------------------

    def _capture(self, name: str, *, source: str = "", is_second_look: bool = False) -> None:
        """A file was closed: keep this version of it, and put it at the end of the order."""
        if why_no_name(name) or self._is_overtaken(name):
            return
        try:
            fd = open_file(self._root / name)
        except (FileNotFoundError, NotADirectoryError):
            return  # it has gone on, and that is told by another event
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._remove(name)
            else:
                self._object_to(name, f"it cannot be read: {error.strerror}")
            return
        try:
            if why_no_object(os.fstat(fd).st_mode):
                self._remove(name)
                return
            number = self._book.order.next_number()
            version = self._captures.take(number, name, fd, lambda: self._is_overtaken(name, take=True))
        finally:
            os.close(fd)
        if version is not None:
            self._note(name, version, source, is_second_look=is_second_look)
            self._deferred.pop(name, None)  # it is there again
            self._open.pop(name, None)
            self._overtaken.pop(name, None)
            self._remove_deferred()
        elif not self._closed_later[name]:
            self._open[name] = time.monotonic() + _OPEN_S

    def _note(self, name: str, version: Version, source: str, *, is_second_look: bool) -> None:
        is_settled = []

        def settle_or_put(order: Order) -> Deeds:
            deeds = order.settle(name, version) if is_second_look and version.digest else None
            is_settled.append(deeds is not None)
            return order.put(name, version, source=source) if deeds is None else deeds

        number = self._book.order.next_number()
        self._book.do(settle_or_put)
        if is_settled[0]:
            self._captures.drop(number)
        kill_point("writeback.noted")
        if version.fingerprint.changed_ns == UNSETTLED and version.form == COPY:
            self._recheck[name] = time.monotonic() + _RECHECK_S
        else:
            self._recheck.pop(name, None)

    def _is_overtaken(self, name: str, *, take: bool = False) -> bool:
        """Whether a file has been closed again, so that what is, or was, read may be of then."""
        if take:
            self._take()
        if not self._closed_later[name]:
            return False
        self._overtaken[name] += 1
        return self._overtaken[name] <= _MAX_OVERTAKEN

    def _look_again(self) -> None:
        """Look at files that were too fresh to tell them from the next version by their time, or were open.

        What is open will be told when it is closed; this is for what nobody would tell.
        """
        now_s = time.monotonic()
        for name in [name for name, due_s in self._open.items() if due_s <= now_s]:
            del self._open[name]
            self._capture(name, is_second_look=True)
        for name in [name for name, due_s in self._recheck.items() if due_s <= now_s]:
            del self._recheck[name]
            self._capture(name, is_second_look=True)

    def _look_at_all(self, below: str = "", *, renamed: tuple[str, str] | None = None) -> None:
        """Put everything into the order that is not as the order has it; files nobody saw closed, by time.

        Args:
            below: only what is in this directory.
            renamed: the earlier and the present name of a directory.
        """
        if not below:
            self._watch.add_tree()
        found, others = look(self._root, self._terms.skips, below)
        inside = f"{below}/" if below else ""
        with self._book.changed:
            known = {one.name: self._book.order.known(one.name) for one in found}
            gone = [name for name in self._book.order.newest_first() if name not in known]
        changed = [one for one in found if known[one.name] != one.fingerprint]
        for one in sorted(changed, key=lambda one: one.order(self._touched)):
            self._capture(one.name, source=_earlier_name(one.name, renamed))
        for name in gone:
            if name.startswith(inside) and (name in others or not (self._root / name).is_file()):
                self._remove(name)

    def _let_go(self) -> None:
        """Drop the oldest versions that only we keep, where they fill the disk."""
        if time.monotonic() < self._let_go_s:
            return
        self._let_go_s = time.monotonic() + _LET_GO_S
        with self._book.changed:
            entries = [entry for entry in self._book.order.entries.values() if entry.version]
            begun = self._book.order.begun
        sizes = {entry.number: self._captures.only_kept_bytes(entry.number) for entry in entries}
        total = sum(sizes.values())
        for entry in entries:
            if total <= self._terms.kept_bytes:
                return
            if sizes[entry.number] and entry.number != begun:
                total -= sizes[entry.number]
                self._captures.drop(entry.number)  # the sender finds it gone, and passes it over


def _earlier_name(name: str, renamed: tuple[str, str] | None) -> str:
    """What a file in a renamed directory was called."""
    if renamed is None or not name.startswith(f"{renamed[1]}/"):
        return ""
    return renamed[0] + name[len(renamed[1]) :]


def _lock(folder: Path) -> int:
    """The lock that tells that an uploader lives.

    Raises:
        Conflict: another one does.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    give_up_s = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # also for a moment by somebody who looks whether one lives
            if time.monotonic() > give_up_s:
                os.close(fd)
                raise Conflict(f"{folder.parent} has an uploader already.") from None
            time.sleep(0.01)
        else:
            return fd


def ignore_signals() -> None:
    """Leave the signals that are meant for the job to the job."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
