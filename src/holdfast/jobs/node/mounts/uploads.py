"""Write-back directories of a job: mounted, uploaded after the commands too, and removed when complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from holdfast.errors import Denied, HoldfastError, NotFound, RetryLater
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.attempt import UnsentFiles
from holdfast.jobs.node.mounts.mount_records import MountSpec, caches
from holdfast.jobs.node.roles import log_line
from holdfast.jobs.writeback import DirectoryStatus, Mount, remove_uploaded, status_of
from holdfast.jobs.writeback.config import UploaderConfig
from holdfast.jobs.writeback.journal import FOLDER, Journal
from holdfast.jobs.writeback.mount import hold_mount, resolve_place
from holdfast.jobs.writeback.reconciliation import ASIDE
from holdfast.jobs.writeback.status import STARTING, has_uploader
from holdfast.system import backoff
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_PATIENCE_S = 300.0  # time limit for uploads of an earlier attempt that fail, as for a mount
_CHECK_S, _LONGEST_CHECK_S = 0.1, 2.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_EXIT_S = 5.0  # time limit for an uploader to exit that has nothing left to do
_POLL_S = 0.05


class WriteBack:
    """Write-back directory of a job, mounted for an attempt. Its uploader continues when it is closed."""

    def __init__(self, spec: MountSpec, owner: str, attempt: int) -> None:
        self._spec, self._owner, self._attempt = spec, owner, attempt
        self._path = Path(spec.path)
        self._held: Mount | None = None
        self._again_s, self._num_failures = 0.0, 0
        self.error: HoldfastError | None = None
        """Error of the newest attempt to continue the uploads."""
        self.is_stuck = False
        """True if no upload was possible when the status was read: it fails, or all files are open."""

    @property
    def is_open(self) -> bool:
        """True if the directory is mounted, and its uploader is running."""
        return self._held is not None and has_uploader(self._path)

    def open(self, is_wanted: Callable[[], bool]) -> None:
        """Mount the directory, or join its uploader."""
        self._mount(self._attempt, is_wanted, fetch=True)
        if (aside := self._path / FOLDER / ASIDE).is_dir():
            log_line(f"files of earlier attempts that the bucket has newer versions of are in {aside}")

    def close(self) -> None:
        """Release the directory."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def send_leftovers(self, is_wanted: Callable[[float], bool]) -> None:
        """Upload what an earlier attempt has left in the directory, and end its uploader.

        It is uploaded in the name of that attempt. So if a newer one has mounted the place elsewhere, nothing
        is, and the next mount sets these files aside.
        """
        before = self._mounting_attempt()
        if before is None or before >= self._attempt:
            return
        status = status_of(self._path)
        if status.is_settled and not status.is_running:
            return
        log_line(f"uploading what attempt {before} has left in {self._path} to {self._spec.place}")
        left = WriteBack(self._spec, self._owner, before)
        stuck_s: float | None = None
        with closing(uploading([left], is_wanted)) as statuses:
            for unsent in statuses:
                if isinstance(left.error, Denied):
                    raise left.error
                if unsent.is_hopeless:
                    log_line(f"{left.error} What it has left stays in {self._path}.")
                    return
                stuck_s = (stuck_s or time.monotonic()) if left.is_stuck else None
                if stuck_s is not None and time.monotonic() > stuck_s + _PATIENCE_S:
                    raise RetryLater(f"{unsent.summary}, from attempt {before}.")
        while is_wanted(_POLL_S):
            if not has_uploader(self._path):  # the next mount must not join one of an earlier attempt
                return
        raise RetryLater(f"The upload to {self._spec.place} was stopped: no process waits for it any more.")

    def status(self) -> DirectoryStatus | None:
        """Return the status of the directory, or None if it was never mounted."""
        with suppress(NotFound):
            return status_of(self._path)
        return None

    def keep_uploading(self, is_wanted: Callable[[], bool]) -> None:
        """Start an uploader if files are missing and none is running."""
        try:
            status = self.status()
            if status is None or _is_settled(status):
                return
            if (status.is_running and self._held is not None) or time.monotonic() < self._again_s:
                return
            # A new attempt would set aside what an earlier one has left in a shared directory.
            found = self._mounting_attempt() if self._spec.is_shared else None
            self._mount(found or self._attempt, is_wanted, fetch=False)
            self.error, self._num_failures = None, 0
        except HoldfastError as error:
            self.error = error
            self._num_failures += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_failures, _PAUSE_S, _LONGEST_PAUSE_S)

    def unsent(self) -> UnsentFiles:
        """Return the status of the directory's uploads."""
        try:
            status = self.status()
        except HoldfastError as error:
            return UnsentFiles(is_settled=False, is_hopeless=_is_final(error), summary=str(error))
        if status is None or status.is_drained:
            return UnsentFiles(is_settled=True, is_hopeless=False, summary="")
        trouble = self.error or status.trouble
        self.is_stuck = bool(trouble) or not (status.waiting or status.unread)
        is_settled = _is_settled(status)
        summary = f"{status.summary()}{f': {trouble}' if trouble else ''}"
        return UnsentFiles(is_settled, _is_final(self.error) and not is_settled, summary)

    def _mounting_attempt(self) -> int | None:
        """Return the owner's newest attempt that has mounted the directory, or None."""
        with suppress(NotFound), closing(Journal(self._path)) as journal:
            if journal.get("owner") == self._owner:
                return int(journal.get("attempt", "0"))
        return None

    def _mount(self, attempt: int, is_wanted: Callable[[], bool], *, fetch: bool) -> None:
        spec = self._spec

        def check() -> None:
            if not is_wanted():
                raise RetryLater(f"Mounting {spec.place} was stopped: no process waits for it any more.")

        place = resolve_place(self._path, spec.place)
        config = UploaderConfig(
            spec.path,
            place,
            fetch,
            spec.fetch_bytes,
            owner=self._owner,
            attempt=attempt,
            is_shared=spec.is_shared,
        )
        held = hold_mount(config, check)
        self.close()  # not earlier: it keeps a running uploader alive
        self._held = held


def uploading(
    directories: Sequence[WriteBack], is_wanted: Callable[[float], bool]
) -> Generator[UnsentFiles, None, None]:
    """Upload write-back directories until that is complete, hopeless or not wanted, and yield their status.

    A directory whose uploader is dead is mounted again. `is_wanted` first waits some seconds.
    """
    pause_s = 0.0
    try:
        while is_wanted(pause_s):
            began_s = time.monotonic()
            for directory in directories:
                directory.keep_uploading(lambda: is_wanted(0.0))
            unsent = _sum(directories)
            yield unsent
            if unsent.is_settled or unsent.is_hopeless:
                return
            # A scan of very many files takes long, and must not use a whole core.
            pause_s = min(_LONGEST_CHECK_S, max(_CHECK_S, 5 * (time.monotonic() - began_s)))
    finally:
        for directory in directories:
            directory.close()


def upload_status(folder: JobFolder) -> UnsentFiles:
    """Return the status of a job's write-back directories, from a scan of all files."""
    return _sum([WriteBack(spec, "", 0) for spec in caches(folder)])


def _is_settled(status: DirectoryStatus) -> bool:
    return status.is_settled and status.uploader != STARTING


def _is_final(error: HoldfastError | None) -> bool:
    """Return True for an error that no other attempt to upload would change."""
    return error is not None and not isinstance(error, (Denied, RetryLater))


def _sum(directories: Sequence[WriteBack]) -> UnsentFiles:
    found = [directory.unsent() for directory in directories]
    is_settled = all(unsent.is_settled for unsent in found)
    return UnsentFiles(
        is_settled=is_settled,
        # A directory that cannot be uploaded does not end the uploads of the others.
        is_hopeless=not is_settled and all(unsent.is_settled or unsent.is_hopeless for unsent in found),
        summary="; ".join(unsent.summary for unsent in found if unsent.summary),
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
