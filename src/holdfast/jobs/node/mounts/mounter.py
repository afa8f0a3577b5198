"""Mounter of an attempt: mounts what its nodes need, buckets by rclone, and uploads what they have left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.checkpoint.store.address import AZURE, GCS, S3, Address, parse_address
from holdfast.errors import HoldfastError, RetryLater, Unsupported
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node.mounts.attempt import HOLDERS, READY, UNSENT, UPLOADS, UnsentFiles
from holdfast.jobs.node.mounts.download import BucketCopy
from holdfast.jobs.node.mounts.mount_records import (
    MountSpec,
    caches,
    is_mounted,
    read_mount_specs,
    unmount_below,
    why_not_mountable,
)
from holdfast.jobs.node.mounts.scratch import read_scratch_owner
from holdfast.jobs.node.mounts.uploads import WriteBack, remove_copies, uploading
from holdfast.jobs.node.roles import log_line, start_controller
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.task.model import MountMode
from holdfast.system.linux import locks
from holdfast.system.linux.processes import dying_with_parent
from holdfast.system.linux.program_runs import end_program
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
            if spec.mode is MountMode.COPY:
                self._mounts[spec] = BucketCopy(spec)
            elif spec.mode is MountMode.MOUNT_CACHED:
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
            if spec.mode is not MountMode.COPY:  # a copy reports its own progress
                log_line(f"mounting {spec.place} at {spec.key}")
            self._patiently(lambda mount=mount: mount.open(self.is_wanted))
            if spec.mode is not MountMode.COPY:
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


_REMOTE = "HOLDFAST"
_PREFIX = f"RCLONE_CONFIG_{_REMOTE}_"
_START_LIMIT_S = 60.0
_END_LIMIT_S = 10.0
_POLL_S = 0.05
_TAIL_BYTES = 2000
_ENDPOINTS = {
    S3: ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    GCS: ("GOOGLE_BASE_URL",),
    AZURE: ("AZURE_STORAGE_ENDPOINT",),
}


class BucketMount:
    """Mounted bucket. The mount lasts until it is closed or this process dies.

    Nothing is cached on this machine: a file is uploaded while it is written, and closing it waits for the
    upload. So files must be written sequentially.
    """

    def __init__(self, spec: MountSpec, log: Path) -> None:
        self._spec, self._log = spec, log
        self._path = Path(spec.path)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_open(self) -> bool:
        """True if the bucket is mounted and rclone is running."""
        return self._process is not None and self._process.poll() is None and is_mounted(self._path)

    def open(self, is_wanted: Callable[[], bool]) -> None:
        """Mount the bucket, after unmounting what a dead rclone has left."""
        if why := why_not_mountable(self._spec.place):
            raise Unsupported(f"{self._spec.key}: {why}")
        self.close()
        unmount_below(self._path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._path.chmod(0o500)  # files written here without a mount would be hidden by it
        address = parse_address(self._spec.place)
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self._words(address),
                    env=rclone_environment(address, os.environ),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise Unsupported("rclone is no longer installed. Install it again.") from error
        if not self._wait_until(lambda: is_mounted(self._path), is_wanted):
            status = self._process.poll()
            how = "is not ready" if status is None else f"ended with status {status}"
            raise self._failure(f"Cannot mount {self._spec.place} at {self._path}: rclone {how}.")
        if why := self._why_not_readable(is_wanted):
            raise self._failure(f"{self._spec.place} was mounted at {self._path} but cannot be read: {why}.")

    def close(self) -> None:
        """Unmount, and end rclone.

        Blocks: until rclone has sent what is being written, at most 10 s.
        """
        if self._process is not None:
            end_program(self._process, limit_s=_END_LIMIT_S)
            self._process = None
        unmount_below(self._path)

    def _words(self, address: Address) -> list[str]:
        words = ["rclone", "mount", f"{_REMOTE}:{address.bucket}/{address.prefix}", str(self._path)]
        options = ["--config", os.devnull, "--vfs-cache-mode", "off", "--dir-cache-time", "10s"]
        read_only = ["--read-only"] if self._spec.is_read_only else []
        # It unmounts when it receives the signal.
        return dying_with_parent([*words, *options, *read_only], signal.SIGTERM)

    def _wait_until(self, is_ready: Callable[[], bool], is_wanted: Callable[[], bool]) -> bool:
        """Return True once the mount is ready; False if rclone or the attempt ends, or after the limit."""
        assert self._process is not None
        give_up_s = time.monotonic() + _START_LIMIT_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > give_up_s or not is_wanted():
                return False
            time.sleep(_POLL_S)
        return True

    def _why_not_readable(self, is_wanted: Callable[[], bool]) -> str:
        """Return why the mount cannot be read. rclone contacts the bucket only then."""
        found = ["no answer"]

        def read() -> None:
            try:
                next(self._path.iterdir(), None)
                found[0] = ""
            except OSError as error:
                found[0] = error.strerror or str(error)

        # In a thread: a read cannot be interrupted while rclone retries.
        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        self._wait_until(lambda: not reading.is_alive(), is_wanted)
        return found[0]

    def _failure(self, what: str) -> RetryLater:
        """Close the mount, and return the error with what rclone has printed."""
        self.close()
        output = self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return RetryLater(f"{what} rclone's output: {output}")


def rclone_environment(address: Address, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an rclone for a store."""
    found = {**environment, **settings(address, environment)}
    if bundle := found.pop("AWS_CA_BUNDLE", None):
        # rclone fails with this variable, and has another one for the same purpose.
        found.setdefault("RCLONE_CA_CERT", bundle)
    return found


def settings(address: Address, environment: Mapping[str, str]) -> dict[str, str]:
    """Return rclone's settings for a store, as variables; see `rclone_environment`."""
    endpoint = address.option("endpoint_url")
    endpoint = endpoint or next(
        (environment[name] for name in _ENDPOINTS[address.protocol] if environment.get(name)), None
    )
    own = {S3: _s3, GCS: _gcs, AZURE: _azure}[address.protocol](address, environment, endpoint)
    return {f"{_PREFIX}{name}": value for name, value in own.items() if value}


def _s3(address: Address, environment: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
    known = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return {
        "TYPE": "s3",
        "PROVIDER": "Other" if endpoint else "AWS",
        "ENV_AUTH": "false" if address.is_on("anonymous") else "true",
        "ENDPOINT": endpoint or "",
        "REGION": address.option("region") or known or "us-east-1",
        "PROFILE": address.option("profile") or "",
        "FORCE_PATH_STYLE": "false" if address.is_on("virtual_hosted") or not endpoint else "true",
        "SERVER_SIDE_ENCRYPTION": address.option("sse") or "",
        "SSE_KMS_KEY_ID": address.option("sse_kms_key_id") or "",
        "REQUESTER_PAYS": "true" if address.is_on("requester_pays") else "",
        "NO_CHECK_BUCKET": "true",  # it exists, and write access need not include creating buckets
    }


def _gcs(address: Address, environment: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
    file = environment.get("GOOGLE_SERVICE_ACCOUNT") or environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    return {
        "TYPE": "google cloud storage",
        "SERVICE_ACCOUNT_FILE": file or "",
        "ENV_AUTH": "" if file else "true",
        "ANONYMOUS": "true" if address.is_on("anonymous") else "",
        "ENDPOINT": endpoint or "",
        "BUCKET_POLICY_ONLY": "true",
    }


def _azure(address: Address, environment: Mapping[str, str], endpoint: str | None) -> dict[str, str]:
    account = address.option("account") or environment.get("AZURE_STORAGE_ACCOUNT_NAME")
    key = environment.get("AZURE_STORAGE_ACCOUNT_KEY")
    return {
        "TYPE": "azureblob",
        "ACCOUNT": account or "",
        "KEY": key or "",
        "ENV_AUTH": "" if key else "true",
        "ENDPOINT": endpoint or "",
    }
