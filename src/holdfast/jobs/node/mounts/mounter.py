"""Mounter of an attempt: mounts what its nodes need until they end, or uploads what they have left."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.errors import HoldfastError, RetryLater
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node.mounts.attempt import HOLDERS, READY, UNSENT, UPLOADS, UnsentFiles
from holdfast.jobs.node.mounts.download import BucketCopy
from holdfast.jobs.node.mounts.mount_records import MountKind, MountSpec, caches, read_mount_specs
from holdfast.jobs.node.mounts.rclone import BucketMount
from holdfast.jobs.node.mounts.scratch import read_scratch_owner
from holdfast.jobs.node.mounts.uploads import WriteBack, remove_copies, uploading
from holdfast.jobs.node.roles import log_line, start_controller
from holdfast.jobs.records import JobRecord, Records
from holdfast.system.linux import locks
from holdfast.system.linux.wakeup_pipe import wake
from holdfast.system.units import format_duration

_END_S = 0.5  # time in which the last holder of a mount ends after the mount itself
_CHECK_S = 1.0  # between two checks of the mounts
_PATIENCE_S = 300.0  # time limit for retrying a failing store, in addition to the store's own retries
_PAUSE_S = 2.0
_OPEN_S = 0.1
_LOG_PAUSE_S = 5.0
_ALONE_LIMIT_S = 3600.0  # time limit for the uploads of a job that has ended. After it, a person must act
SENT, OPEN = "sent", "open"
"""Files of a mounter with a scratch folder: leftovers are uploaded; those of all machines are."""


def serve(folder: Path) -> None:
    """Run the mounter. The caller holds its lock."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    job, attempt = JobFolder(folder.parents[2]), int(folder.parent.name)
    scratch = read_scratch_owner(job)
    owner = scratch.task_id if scratch else _record(job).job.task_id
    if (folder / UPLOADS).exists():
        _upload(job, attempt, owner, is_scratch=scratch is not None)
        return
    mounter = Mounter(folder, read_mount_specs(job), attempt, owner)
    try:
        if scratch is not None:
            mounter.send_leftovers()
            mounter.wait_for_others()
        mounter.mount_all()
        mounter.keep()
    except HoldfastError as error:
        log_line(str(error))
        write_document(folder / READY, str(error))
    finally:
        mounter.close()
        wake(job.wakeup)


def _upload(job: JobFolder, attempt: int, owner: str, *, is_scratch: bool) -> None:
    """Upload what a job has written until the end of an attempt."""
    is_needed = _runner_need() if is_scratch else _job_need(job, attempt)
    shown_s: float | None = None  # time of the last line about missing files
    newest = UnsentFiles(is_settled=False, is_hopeless=False, summary="")
    for unsent in uploading([WriteBack(spec, owner, attempt) for spec in caches(job)], is_needed):
        if unsent == newest:
            continue
        newest = unsent
        if unsent.is_settled and shown_s is not None:
            log_line(unsent.summary or "all files of the job are in its bucket")
        elif not unsent.is_settled and (shown_s is None or time.monotonic() >= shown_s + _LOG_PAUSE_S):
            shown_s = time.monotonic()
            log_line(unsent.summary)
        write_document(job.attempt(attempt) / UNSENT, unsent)
        wake(job.wakeup)
    if not is_scratch and _record(job).state.job_state.status.is_final:
        remove_copies(job)


def _runner_need() -> Callable[[float], bool]:
    """Return a function that waits, and returns True while the process that started this one is running."""
    runner = os.getppid()

    def is_needed(after_s: float) -> bool:
        time.sleep(after_s)
        return os.getppid() == runner

    return is_needed


def _job_need(job: JobFolder, attempt: int) -> Callable[[float], bool]:
    """Return a function that waits, and returns True while a job needs the uploads of an attempt."""
    give_up_s = time.monotonic() + _ALONE_LIMIT_S

    def is_needed(after_s: float) -> bool:
        nonlocal give_up_s
        time.sleep(after_s)
        if job.attempt(attempt + 1).exists():
            return False  # the next attempt's mounter takes over
        if locks.is_held(job.lock):
            give_up_s = time.monotonic() + _ALONE_LIMIT_S
            return True
        if _record(job).state.job_state.status.is_final:
            return time.monotonic() < give_up_s
        start_controller(job)  # it has died
        return True

    return is_needed


def _record(folder: JobFolder) -> JobRecord:
    return Records(folder.path.parents[1]).get(int(folder.path.name))


class Mounter:
    """Mounter, which holds the mounter's lock."""

    def __init__(self, folder: Path, specs: list[MountSpec], attempt: int, owner: str) -> None:
        self._folder = folder
        self._mounts: dict[MountSpec, BucketCopy | BucketMount | WriteBack] = {}
        for spec in specs:
            if spec.kind is MountKind.COPY:
                self._mounts[spec] = BucketCopy(spec)
            elif spec.kind is MountKind.CACHE:
                self._mounts[spec] = WriteBack(spec, owner, attempt)
            else:
                self._mounts[spec] = BucketMount(spec, folder / f"rclone-{Path(spec.path).name}.log")
        self._holders_fd = os.open(folder / HOLDERS, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        # A FIFO that never had a writer does not report that it has none.
        os.close(os.open(folder / HOLDERS, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))

    def send_leftovers(self) -> None:
        """Upload what earlier attempts have left on this machine, and record that."""
        for mount in self._mounts.values():
            if isinstance(mount, WriteBack):
                self._patiently(lambda mount=mount: mount.send_leftovers(self.is_wanted))
        (self._folder / SENT).touch()

    def wait_for_others(self) -> None:
        """Wait until all machines have sent their leftovers."""
        # Otherwise an old file of one could replace a new one of another.
        while not (self._folder / OPEN).exists():
            if not self.is_wanted(_OPEN_S):
                raise RetryLater("the attempt was ended while it waited for the other nodes")

    def mount_all(self) -> None:
        """Mount everything, and record that it is ready."""
        for spec, mount in self._mounts.items():
            began_s = time.monotonic()
            if spec.kind is not MountKind.COPY:  # a copy reports its own progress
                log_line(f"mounting {spec.place} at {spec.key}")
            self._patiently(lambda mount=mount: mount.open(self.is_wanted))
            if spec.kind is not MountKind.COPY:
                took = format_duration(time.monotonic() - began_s)
                log_line(f"mounted {spec.place} at {spec.key} in {took}")
        write_document(self._folder / READY, "")

    def keep(self) -> None:
        """Replace mounts that disappear until the last node has released them."""
        troubles: dict[MountSpec, str] = {}
        while self.is_wanted(_CHECK_S):
            for spec, mount in self._mounts.items():
                if mount.is_open:
                    troubles.pop(spec, None)
                    continue
                if not self.is_wanted(_END_S):
                    return  # the processes of the attempt, whose mount it was, have just ended
                try:
                    log_line(f"{spec.place} is no longer mounted at {spec.key}, mounting it again")
                    mount.open(self.is_wanted)
                except HoldfastError as error:
                    if troubles.get(spec) != str(error):
                        log_line(str(error))
                    troubles[spec] = str(error)

    def close(self) -> None:
        """Unmount everything. Uploaders continue until all files are uploaded."""
        for mount in self._mounts.values():
            mount.close()
        os.close(self._holders_fd)

    def is_wanted(self, timeout_s: float = 0.0) -> bool:
        """Return True if a node still holds the mounts after `timeout_s`."""
        poll = select.poll()
        poll.register(self._holders_fd, 0)  # reports only the end of the last holder
        return not poll.poll(timeout_s * 1000)

    def _patiently(self, action: Callable[[], None]) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return action()
            except RetryLater as error:
                if not self.is_wanted() or time.monotonic() > give_up_s:
                    raise
                log_line(f"{error} Trying again.")
                self.is_wanted(_PAUSE_S)
