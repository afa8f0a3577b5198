"""Upload watcher: keeps uploading write-back directories after an attempt, and records what is missing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.errors import Denied, HoldfastError, NotFound, RetryLater
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.cache_mount import mount_write_back
from holdfast.jobs.node.mounts.leftovers import log_line, mounting_attempt
from holdfast.jobs.node.mounts.mount_spec import MountSpec, caches
from holdfast.jobs.node.mounts.scratch import read_scratch_owner
from holdfast.jobs.node.mounts.unsent_files import UNSENT, UnsentFiles, remove_copies, write_unsent
from holdfast.jobs.node.spawn import start_controller
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.writeback import DirectoryStatus, Mount, status_of
from holdfast.jobs.writeback.status import STARTING
from holdfast.system import backoff
from holdfast.system.linux import locks
from holdfast.system.linux.wakeup_pipe import wake

_CHECK_S, _LONGEST_CHECK_S = 0.1, 2.0
_LOG_PAUSE_S = 5.0
_ALONE_LIMIT_S = 3600.0
"""Time limit for a job that has ended. After it, a person must act."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


def serve(path: Path) -> None:
    """Upload what a job has written until an attempt's end. The caller holds the watcher's lock.

    Runs beside the controller, and restarts it if it dies. For a job that has ended, continues for an hour.
    With a scratch folder, it runs as long as the process that started it.

    Args:
        path: folder of the attempt.

    Blocks: until everything is uploaded, or nothing more can be.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    folder = JobFolder(path.parents[1])
    scratch = read_scratch_owner(folder)
    owner = scratch.task_id if scratch else _record(folder).task_id
    need = _RunnerNeed() if scratch else _UploadNeed(folder, int(path.name))
    status_log = _StatusLog()

    def notify(unsent: UnsentFiles) -> None:
        status_log.log(unsent)
        write_unsent(path / UNSENT, unsent)
        wake(folder.wakeup)

    upload_watcher = UploadWatcher(folder, owner, int(path.name), notify)
    try:
        upload_watcher.run(need.is_needed)
    finally:
        upload_watcher.close()
    if not scratch and _record(folder).job_state.status.is_final:
        remove_copies(folder)


def _record(folder: JobFolder) -> JobRecord:
    return Records(folder.path.parents[1]).get(int(folder.path.name))


class _StatusLog:
    """Reporter in the job's log: every few seconds while files are missing, and when all are uploaded."""

    def __init__(self) -> None:
        self._again_s = 0.0
        self._was_missing = False

    def log(self, unsent: UnsentFiles) -> None:
        if unsent.is_settled and self._was_missing:
            log_line(unsent.summary or "all files of the job are in its bucket")
        elif not unsent.is_settled and time.monotonic() >= self._again_s:
            self._was_missing, self._again_s = True, time.monotonic() + _LOG_PAUSE_S
            log_line(unsent.summary)


class _UploadNeed:
    """Check whether an attempt's uploads are still needed."""

    def __init__(self, folder: JobFolder, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._give_up_s = time.monotonic() + _ALONE_LIMIT_S

    def is_needed(self, after_s: float) -> bool:
        time.sleep(after_s)
        if self._folder.attempt(self._attempt + 1).exists():
            return False  # the next attempt's mounter takes over
        if locks.is_held(self._folder.lock):
            self._give_up_s = time.monotonic() + _ALONE_LIMIT_S
            return True
        if _record(self._folder).job_state.status.is_final:
            return time.monotonic() < self._give_up_s
        start_controller(self._folder)
        return True


class _RunnerNeed:
    """Check whether the process that started this one is still running."""

    def __init__(self) -> None:
        self._runner = os.getppid()

    def is_needed(self, after_s: float) -> bool:
        time.sleep(after_s)
        return os.getppid() == self._runner


def upload_status(folder: JobFolder) -> UnsentFiles:
    """Return the status of a job's write-back directories, from a scan.

    Blocks: for a scan of all files.
    """
    return _sum([_Cache(spec, "", 0) for spec in caches(folder)])


class UploadWatcher:
    """Upload of all write-back directories of a job.

    Args:
        attempt: attempt for which a directory is mounted if its uploader is dead.
        on_status: called with each new status.
    """

    def __init__(
        self, folder: JobFolder, owner: str, attempt: int, on_status: Callable[[UnsentFiles], None]
    ) -> None:
        self._caches = [_Cache(spec, owner, attempt) for spec in caches(folder)]
        self._on_status = on_status

    def run(self, is_wanted: Callable[[float], bool]) -> UnsentFiles:
        """Upload until everything is uploaded, uploads cannot succeed, or the attempt is obsolete.

        Args:
            is_wanted: waits for at most the given seconds, and returns False to stop.

        Blocks: until then.
        """
        pause_s = _CHECK_S
        unsent = UnsentFiles(is_settled=False, is_hopeless=False, summary="")
        while is_wanted(pause_s if unsent.summary else 0.0):
            began_s = time.monotonic()
            for cache in self._caches:
                cache.keep_uploading(lambda: is_wanted(0.0))
            now = _sum(self._caches)
            if now != unsent:
                self._on_status(now)
            unsent = now
            if unsent.is_settled or unsent.is_hopeless:
                break
            # A scan of very many files takes long, and must not use a whole core.
            pause_s = min(_LONGEST_CHECK_S, max(_CHECK_S, 5 * (time.monotonic() - began_s)))
        return unsent

    def close(self) -> None:
        """Release the directories. Their uploaders exit when everything is uploaded."""
        for cache in self._caches:
            cache.close()


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
            self._held = mount_write_back(
                self._spec, self._owner, self._attempt_of_files(), is_wanted, fetch=False
            )
            self._trouble, self._num_failures = "", 0
        except (Denied, RetryLater) as error:
            self._trouble = str(error)
            self._num_failures += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_failures, _PAUSE_S, _LONGEST_PAUSE_S)
        except HoldfastError as error:
            self._trouble, self._is_hopeless = str(error), True

    def _attempt_of_files(self) -> int:
        """Return the attempt to mount the directory for.

        A new attempt would set aside what an earlier one has left in a shared directory.
        """
        found = mounting_attempt(Path(self._spec.path), self._owner) if self._spec.is_shared else None
        return found or self._attempt

    def poll(self) -> UnsentFiles:
        """Return the status of the directory's uploads."""
        try:
            status = self._status()
        except (Denied, RetryLater) as error:
            return UnsentFiles(is_settled=False, is_hopeless=False, summary=str(error))
        except HoldfastError as error:
            return UnsentFiles(is_settled=False, is_hopeless=True, summary=str(error))
        if status is None or status.is_drained:
            return UnsentFiles(is_settled=True, is_hopeless=False, summary="")
        trouble = self._trouble or status.trouble
        summary = f"{status.summary()}{f': {trouble}' if trouble else ''}"
        is_settled = _is_settled(status)
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
