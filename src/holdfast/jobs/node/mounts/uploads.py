"""Write-back directories of a job: mounted, uploaded after the commands too, and removed when complete."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from holdfast.errors import Conflict, Denied, HoldfastError, NotFound, RetryLater
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.lease import UnsentFiles
from holdfast.jobs.node.mounts.mount_records import MountSpec, caches
from holdfast.jobs.node.roles import log_line
from holdfast.jobs.writeback import DirectoryStatus, Mount, mount, remove_uploaded, status_of
from holdfast.jobs.writeback.journal import Journal
from holdfast.jobs.writeback.status import FENCED, STARTING, has_uploader
from holdfast.system import backoff
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_SLICE_S = 0.2  # interval for checking whether a mount in progress is still wanted
_LOOK_S = 0.2
_SCAN_S = 2.0  # interval for scanning the directory, to find out whether its uploads fail
_PATIENCE_S = 300.0  # time limit for uploads that fail, as for a mount
_CHECK_S, _LONGEST_CHECK_S = 0.1, 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_EXIT_S = 5.0  # time limit for an uploader to exit that has nothing left to do
_POLL_S = 0.05


def mount_write_back(
    spec: MountSpec, owner: str, attempt: int, is_wanted: Callable[[], bool], *, fetch: bool = True
) -> Mount:
    """Mount a write-back directory, or join its uploader."""
    made: Future[Mount] = Future()

    def make() -> None:
        try:
            held = mount(
                spec.path,
                spec.place,
                fetch=fetch,
                fetch_bytes=spec.fetch_bytes,
                owner=owner,
                attempt=attempt,
                is_shared=spec.is_shared,
                timeout_s=None,
            )
            made.set_result(held)
        except HoldfastError as error:
            made.set_exception(error)

    # In a thread, as it may take as long as the bucket's retries, while this process may have to exit.
    making = threading.Thread(target=make, daemon=True)
    making.start()
    while making.is_alive():
        making.join(_SLICE_S)
        if making.is_alive() and not is_wanted():
            raise RetryLater(f"Mounting {spec.place} was stopped: no process waits for it any more.")
    return made.result(timeout=0)


def send_leftovers(spec: MountSpec, owner: str, attempt: int, is_wanted: Callable[[], bool]) -> None:
    """Upload what an earlier attempt has left in a write-back directory, and end its uploader.

    It is uploaded in the name of that attempt. So if a newer one has mounted the place elsewhere, nothing is,
    and the next mount sets these files aside.
    """
    path = Path(spec.path)
    before = mounting_attempt(path, owner)
    if before is None or before >= attempt:
        return
    status = status_of(path)
    if status.is_settled and not status.is_running:
        return
    log_line(f"uploading what attempt {before} has left in {path} to {spec.place}")
    try:
        held = mount_write_back(spec, owner, before, is_wanted, fetch=False)
    except Conflict as error:
        log_line(f"{error} What it has left stays in {path}.")
        return
    held.close()
    status = _wait_until_sent(spec, path, is_wanted)
    if not status.is_settled and status.uploader != FENCED:
        raise RetryLater(f"{status.summary()}, from attempt {before}: {status.trouble or status.uploader}.")


def mounting_attempt(path: Path, owner: str) -> int | None:
    """Return an owner's newest attempt that has mounted a directory, or None."""
    with suppress(NotFound):
        journal = Journal(path, is_reader=True)
        try:
            if journal.get("owner") == owner:
                return int(journal.get("attempt", "0"))
        finally:
            journal.close()
    return None


def _wait_until_sent(spec: MountSpec, path: Path, is_wanted: Callable[[], bool]) -> DirectoryStatus:
    failing_s: float | None = None
    scan_s = time.monotonic() + _SCAN_S
    while has_uploader(path):
        if not is_wanted():
            raise RetryLater(f"The upload to {spec.place} was stopped: no process waits for it any more.")
        time.sleep(_LOOK_S)
        if time.monotonic() < scan_s:
            continue
        status = status_of(path)
        scan_s = time.monotonic() + _SCAN_S
        failing_s = (failing_s or time.monotonic()) if status.trouble else None
        if failing_s is not None and time.monotonic() > failing_s + _PATIENCE_S:
            return status
    return status_of(path)


def upload_status(folder: JobFolder) -> UnsentFiles:
    """Return the status of a job's write-back directories, from a scan of all files."""
    return _sum([_Cache(spec, "", 0) for spec in caches(folder)])


def upload_all(
    folder: JobFolder,
    owner: str,
    attempt: int,
    *,
    on_status: Callable[[UnsentFiles], None],
    is_wanted: Callable[[float], bool],
) -> None:
    """Upload all write-back directories of a job, until that is complete, hopeless or not wanted.

    A directory whose uploader is dead is mounted for the attempt. `is_wanted` first waits some seconds.
    """
    unsent = UnsentFiles(is_settled=False, is_hopeless=False, summary="")
    pause_s = 0.0
    with ExitStack() as stack:
        found = [stack.enter_context(closing(_Cache(spec, owner, attempt))) for spec in caches(folder)]
        while not (unsent.is_settled or unsent.is_hopeless) and is_wanted(pause_s):
            began_s = time.monotonic()
            for cache in found:
                cache.keep_uploading(lambda: is_wanted(0.0))
            if (now := _sum(found)) != unsent:
                on_status(now)
            unsent = now
            # A scan of very many files takes long, and must not use a whole core.
            pause_s = min(_LONGEST_CHECK_S, max(_CHECK_S, 5 * (time.monotonic() - began_s)))


class _Cache:
    """Write-back directory of a job."""

    def __init__(self, spec: MountSpec, owner: str, attempt: int) -> None:
        self._spec, self._owner, self._attempt = spec, owner, attempt
        self._held: Mount | None = None
        self._trouble = ""
        self._again_s, self._num_failures = 0.0, 0
        self._is_hopeless = False

    def keep_uploading(self, is_wanted: Callable[[], bool]) -> None:
        """Start an uploader if files are missing and none is running."""
        try:
            status = self._status()
            if status is None or _is_settled(status):
                return
            if (status.is_running and self._held is not None) or time.monotonic() < self._again_s:
                return
            self.close()
            # A new attempt would set aside what an earlier one has left in a shared directory.
            found = mounting_attempt(Path(self._spec.path), self._owner) if self._spec.is_shared else None
            attempt = found or self._attempt
            self._held = mount_write_back(self._spec, self._owner, attempt, is_wanted, fetch=False)
            self._trouble, self._num_failures = "", 0
        except (Denied, RetryLater) as error:
            self._trouble = str(error)
            self._num_failures += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_failures, _PAUSE_S, _LONGEST_PAUSE_S)
        except HoldfastError as error:
            self._trouble, self._is_hopeless = str(error), True

    def poll(self) -> UnsentFiles:
        """Return the status of the directory's uploads."""
        try:
            status = self._status()
        except HoldfastError as error:
            is_hopeless = not isinstance(error, (Denied, RetryLater))
            return UnsentFiles(is_settled=False, is_hopeless=is_hopeless, summary=str(error))
        if status is None or status.is_drained:
            return UnsentFiles(is_settled=True, is_hopeless=False, summary="")
        trouble = self._trouble or status.trouble
        is_settled = _is_settled(status)
        summary = f"{status.summary()}{f': {trouble}' if trouble else ''}"
        return UnsentFiles(is_settled, self._is_hopeless and not is_settled, summary)

    def close(self) -> None:
        """Release the directory."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def _status(self) -> DirectoryStatus | None:
        """Return the status of the directory, or None if it was never mounted."""
        with suppress(NotFound):
            return status_of(self._spec.path)
        return None


def _is_settled(status: DirectoryStatus) -> bool:
    return status.is_settled and status.uploader != STARTING


def _sum(found: list[_Cache]) -> UnsentFiles:
    seen = [cache.poll() for cache in found]
    return UnsentFiles(
        is_settled=all(one.is_settled for one in seen),
        is_hopeless=any(one.is_hopeless for one in seen),
        summary="; ".join(one.summary for one in seen if one.summary),
    )


def remove_copies(folder: JobFolder) -> None:
    """Remove an ended job's write-back directories that are uploaded completely.

    Others stay until the job is removed. An error is only logged: it costs disk space.
    """
    for spec in caches(folder):
        path = Path(spec.path)
        wait_without_uploader(path)
        try:
            remove_uploaded(path)
        except (HoldfastError, OSError) as error:
            _log.warning("the copies of %s in %s were not removed: %s", spec.place, path, error)


def wait_without_uploader(path: Path) -> None:
    """Wait some seconds until the uploader of a directory has exited, which has nothing left to do."""
    give_up_s = time.monotonic() + _EXIT_S
    while has_uploader(path) and time.monotonic() < give_up_s:
        time.sleep(_POLL_S)
