"""The drainer: has write-back directories sent after an attempt, and tells what is not in its place yet."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.documents import decode_dataclass
from holdfast.errors import Denied, HoldfastError, NotFound, RetryLater
from holdfast.jobs.node import locks
from holdfast.jobs.node.bell import ring
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.mounts.porter import hold_cache, say
from holdfast.jobs.node.mounts.supply import Supply, caches
from holdfast.jobs.node.plan import write_whole
from holdfast.jobs.node.spawning import look_after
from holdfast.jobs.place import database
from holdfast.jobs.records import Records
from holdfast.writeback import DirectoryStatus, Mount, status_of
from holdfast.writeback.status import STARTING

UNSENT = "unsent.json"
"""In the folder of the attempt: the newest word."""
_LOOK_S, _LONGEST_LOOK_S = 0.1, 2.0
_TALK_S = 5.0
_ALONE_LIMIT_S = 3600.0
"""How long it goes on for a job that has ended: what is not sent then waits for a person."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Unsent:
    """What of a job's write-back directories is not in its place.

    `is_settled` - nothing that could be sent is left. `is_hopeless` - nothing more will be sent. `told` - in
    words, a sentence for each directory of which something is missing; "" if nothing is.
    """

    is_settled: bool
    is_hopeless: bool
    told: str


def serve(path: Path) -> None:
    """Have all sent that a job wrote until an attempt had ended; the caller holds the drainer's lock.

    It works beside the controller, and when that dies it starts another. For a job that has ended it goes on
    for an hour more.

    Args:
        path: folder of the attempt.

    Blocks: until all is sent, or nothing more can be.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    folder = JobFolder(path.parents[1])
    with Records(database(folder.path.parents[1])) as records:
        owner = records.get(int(folder.path.name)).task_id

    talk = _Talk()

    def tell(unsent: Unsent) -> None:
        talk.tell(unsent)
        write_unsent(path / UNSENT, unsent)
        ring(folder.bell)

    drainer = Drainer(folder, owner, int(path.name), tell)
    try:
        drainer.run(_Wish(folder, int(path.name)).is_there)
    finally:
        drainer.close()


class _Talk:
    """What the job's log is told: how it stands every few seconds, and that all is sent if it was not."""

    def __init__(self) -> None:
        self._again_s = 0.0
        self._was_missing = False

    def tell(self, unsent: Unsent) -> None:
        if unsent.is_settled and self._was_missing:
            say(unsent.told or "all that the job wrote is in its bucket")
        elif not unsent.is_settled and time.monotonic() >= self._again_s:
            self._was_missing, self._again_s = True, time.monotonic() + _TALK_S
            say(unsent.told)


class _Wish:
    """Whether an attempt's files are still waited for."""

    def __init__(self, folder: JobFolder, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._give_up_s = time.monotonic() + _ALONE_LIMIT_S

    def is_there(self, after_s: float) -> bool:
        time.sleep(after_s)
        if self._folder.attempt(self._attempt + 1).exists():
            return False  # its own porter sees to them now
        if locks.is_held(self._folder.lock):
            self._give_up_s = time.monotonic() + _ALONE_LIMIT_S
            return True
        with Records(database(self._folder.path.parents[1])) as records:
            if records.get(int(self._folder.path.name)).life.status.is_final:
                return time.monotonic() < self._give_up_s
        look_after(self._folder)
        return True


def write_unsent(path: Path, unsent: Unsent) -> None:
    """Leave word."""
    write_whole(path, json.dumps(asdict(unsent)))


def read_unsent(path: Path) -> Unsent | None:
    """Return what is not in the store yet; None if nothing was written about it.

    Raises:
        Corrupt: the document is damaged.
    """
    try:
        return decode_dataclass(Unsent, path.read_bytes(), str(path), any_text=True)
    except FileNotFoundError:
        return None


def look_at(folder: JobFolder) -> Unsent:
    """How a job's write-back directories stand, asked of nobody.

    Blocks: while it looks at every file.
    """
    return _sum([_Cache(supply, "", 0) for supply in caches(folder)])


class Drainer:
    """Has all write-back directories of a job sent.

    Args:
        folder: of the job.
        owner: id of the job.
        attempt: for which they are mounted where their uploader is dead.
        tell: is told each time something has changed.
    """

    def __init__(self, folder: JobFolder, owner: str, attempt: int, tell: Callable[[Unsent], None]) -> None:
        self._caches = [_Cache(supply, owner, attempt) for supply in caches(folder)]
        self._tell = tell

    def run(self, is_wanted: Callable[[float], bool]) -> Unsent:
        """Send until all is sent, nothing can be, or it is not wanted any more.

        Args:
            is_wanted: whether it still is, after so many seconds at most.

        Blocks: until then.
        """
        look_s = _LOOK_S
        unsent = Unsent(is_settled=False, is_hopeless=False, told="")
        while is_wanted(look_s if unsent.told else 0.0):
            began_s = time.monotonic()
            for cache in self._caches:
                cache.see_to(lambda: is_wanted(0.0))
            now = _sum(self._caches)
            if now != unsent:
                self._tell(now)
            unsent = now
            if unsent.is_settled or unsent.is_hopeless:
                break
            # Looking at very many files takes long, and must not take all of a core.
            look_s = min(_LONGEST_LOOK_S, max(_LOOK_S, 5 * (time.monotonic() - began_s)))
        return unsent

    def close(self) -> None:
        """Let go; uploaders end when all is sent."""
        for cache in self._caches:
            cache.close()


class _Cache:
    """One write-back directory."""

    def __init__(self, supply: Supply, owner: str, attempt: int) -> None:
        self._supply, self._owner, self._attempt = supply, owner, attempt
        self._held: Mount | None = None
        self._trouble = ""
        self._again_s, self._pause_s = 0.0, _PAUSE_S
        self._is_hopeless = False

    def see_to(self, is_wanted: Callable[[], bool]) -> None:
        """See that an uploader works on what is not sent."""
        try:
            status = self._status()
            if status is None or _is_settled(status):
                return
            if (status.is_running and self._held is not None) or time.monotonic() < self._again_s:
                return
            self.close()
            self._held = hold_cache(self._supply, self._owner, self._attempt, is_wanted, fetch=False)
            self._trouble, self._pause_s = "", _PAUSE_S
        except (Denied, RetryLater) as error:
            self._trouble = str(error)
            self._again_s = time.monotonic() + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        except HoldfastError as error:
            self._trouble, self._is_hopeless = str(error), True

    def look(self) -> Unsent:
        """How it stands."""
        try:
            status = self._status()
        except (Denied, RetryLater) as error:
            return Unsent(is_settled=False, is_hopeless=False, told=str(error))
        except HoldfastError as error:
            return Unsent(is_settled=False, is_hopeless=True, told=str(error))
        if status is None or status.is_drained:
            return Unsent(is_settled=True, is_hopeless=False, told="")
        trouble = self._trouble or status.trouble
        told = f"{status.summary()}{f': {trouble}' if trouble else ''}"
        is_settled = _is_settled(status)
        return Unsent(is_settled, self._is_hopeless and not is_settled, told)

    def close(self) -> None:
        """Let go."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _status(self) -> DirectoryStatus | None:
        """What the directory shows; None if it was never mounted, so that nothing can be missing."""
        with suppress(NotFound):
            return status_of(self._supply.path)
        return None


def _is_settled(status: DirectoryStatus) -> bool:
    return status.is_settled and status.uploader != STARTING


def _sum(found: list[_Cache]) -> Unsent:
    seen = [cache.look() for cache in found]
    return Unsent(
        is_settled=all(one.is_settled for one in seen),
        is_hopeless=any(one.is_hopeless for one in seen),
        told="; ".join(one.told for one in seen if one.told),
    )
