"""Records of all jobs, each in its own folder: what was submitted, the state, and open requests.

No number is used twice, not even after its job was removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from holdfast.errors import Conflict, Corrupt, Internal, NotFound, RetryLater
from holdfast.jobs.folder import JobFolder, job_folder, jobs_folder
from holdfast.jobs.history import read_changes
from holdfast.jobs.journal import append_value, encode, lines, read_values
from holdfast.jobs.node_spec import NodeSpec, read_outcome
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import ClockReading, Timers
from holdfast.system.documents import MAX_BYTES, decode_as
from holdfast.system.linux.files import open_regular, opened, write_atomic

VERSION = 1
ENGINE_NAMES = ("local", "slurm", "sky", "k8s", "kubeflow")  # names of engines, as in `--on`
_TAIL_BYTES = 4 << 20  # part of a journal that is searched for its last valid lines
_MAX_NODES = 1_000_000
_MAX_UNIX_S = 253_402_300_799.0  # end of the year 9999
_NO_RECORD = frozenset(
    {errno.EACCES, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EPERM}
)
"""Errors of a job's files that only a person can mend. They cost no other job."""
_LAST = "last-number"  # file with the greatest number so far. Without it, the folders that exist count.
_REMOVED = ".removing-"
_MAX_DIGITS = 15
_MAX_FOLDER = 10**12  # number from which on a folder is a stray one, which new numbers do not follow
_MAX_WRITTEN = 10**14  # number from which on the file with the greatest number is damaged
_HERE = "local"  # engine whose states are recorded by a controller on this machine; others have their own
_REASON = "the record of this job was lost, and rebuilt from its folder"


_EngineName = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(ENGINE_NAMES)})\Z")]


class JobSpec(Struct, frozen=True):
    """Shape of a submitted job."""

    num_nodes: Annotated[int, Meta(ge=1, le=_MAX_NODES)]
    num_gpus: int
    has_setup: bool
    user: str
    after: int | None = None  # job that must succeed before this one starts, in a pipeline
    devices: tuple[str, ...] = ()  # GPUs of which each node is given `num_gpus`; none: they are not divided
    cpus: float = 0.0  # per node; 0: not asked for
    memory_mib: int = 0  # per node; 0: not asked for
    priority: int = 0  # among jobs that wait
    ports: tuple[int, ...] = ()  # that its commands name
    needs_port: bool = False  # one more is chosen for it
    image: str = ""  # container image of its commands; empty: they run on the machines as they are
    exclude: str = ""  # machines that its user leaves out, separated by commas
    is_pinned: bool = False  # its user has named its machines

    @property
    def num_claimed_gpus(self) -> int:
        """GPUs of all nodes that no other job may have; 0 on a machine whose GPUs are not divided."""
        return self.num_nodes * self.num_gpus if self.devices else 0

    @property
    def needs_claim(self) -> bool:
        """True if the job needs something that is divided among jobs."""
        return bool(self.num_claimed_gpus or self.cpus or self.memory_mib or self.ports or self.needs_port)


class Submission(Struct, frozen=True):
    """Submitted job. Never changes."""

    number: int
    name: str
    task_id: str
    engine: _EngineName
    spec: JobSpec
    policy: RestartPolicy
    submitted_unix_s: Annotated[float, Meta(ge=0, le=_MAX_UNIX_S)]
    version: int = VERSION


class StoredState(Struct, frozen=True):
    """State of a job from a moment on: an entry of its journal."""

    unix_s: float
    job_state: JobState = field(default_factory=JobState)
    due: Timers = field(default_factory=Timers)
    step_before: int | None = None  # newest checkpoint when the attempt began
    started_unix_s: float | None = None
    ended_unix_s: float | None = None
    engine_job_id: str | None = None  # the engine's own id of the job
    answered: tuple[str, ...] = ()  # ids of the requests that were applied
    gpus: tuple[tuple[str, ...], ...] = ()  # GPUs given to each node
    port: int | None = None  # port chosen for the job
    clock: ClockReading | None = None  # the job's clock at this entry


class JobRequest(Struct, frozen=True):
    """Request of a command to a job."""

    kind: str  # cancel or preempt
    lead_s: float | None = None
    id: str = ""


class JobRecord(Struct, frozen=True):
    """Record of one job: its submission and newest state."""

    job: Submission
    state: StoredState

    def with_state(self, **changes: Any) -> JobRecord:
        """Return a copy with changes of the state."""
        return JobRecord(self.job, replace(self.state, **changes))


class Records:
    """Records of this user's jobs, each in its own folder. A damaged one costs only itself."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._jobs = jobs_folder(state)

    def reserve(self) -> int:
        """Reserve a number for a job, and create its folder. The job is not listed before `complete`."""
        with self._translate_errors():
            self._jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
            with opened(self._jobs / _LAST, os.O_RDWR | os.O_CREAT) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)
                number = self._last_number(fd) + 1
                text = f"{number}\n".encode()
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))
                os.fsync(fd)
                # Fails if there is anything of this name: only a folder that was created here may be removed.
                self._folder(number).path.mkdir(mode=0o700)
            return number

    def _last_number(self, fd: int) -> int:
        text = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
        written = int(text) if _is_number(text) and int(text) < _MAX_WRITTEN else 0
        removed = [int(path.name.removeprefix(_REMOVED)) for path in self.folders_set_aside()]
        return max(written, *(number for number in self.numbers() + removed if number < _MAX_FOLDER), 0)

    def numbers(self) -> list[int]:
        """Return the numbers of all folders of jobs, in order."""
        try:
            return sorted(int(entry.name) for entry in os.scandir(self._jobs) if _is_number(entry.name))
        except FileNotFoundError:
            return []

    def complete(self, submission: Submission) -> None:
        """Record a job, which makes it visible."""
        folder, after = self._folder(submission.number), submission.spec.after
        first = JobState(reason=f"waits for job {after}" if after is not None else "")
        with self._translate_errors():
            write_submission(folder, submission)
            append_value(folder.states, StoredState(submission.submitted_unix_s, first))

    def successors(self, number: int) -> list[JobRecord]:
        """Return the records of the jobs that start once a job has succeeded."""
        return [record for record in self.all() if record.job.spec.after == number]

    def withdraw(self, number: int) -> None:
        """Remove a job that its engine did not accept. The next `forget` removes what is left of it."""
        shutil.rmtree(self.set_aside(number), ignore_errors=True)

    def set_engine_job_id(self, number: int, engine_job_id: str) -> None:
        """Record the engine's own id of a job."""
        with self._translate_errors():
            record = self.get(number).with_state(unix_s=time.time(), engine_job_id=engine_job_id)
            append_value(self._folder(number).states, record.state)

    def set_aside(self, number: int) -> Path:
        """Rename the folder of a job, so that it can be removed. Its number is never used again."""
        with self._translate_errors():
            path = self._jobs / f"{_REMOVED}{number}"
            self._folder(number).path.rename(path)
            return path

    def folders_set_aside(self) -> list[Path]:
        """Return the folders of jobs that are not completely removed yet."""
        with self._translate_errors():
            paths = self._jobs.glob(f"{_REMOVED}*")
            return sorted(path for path in paths if _is_number(path.name.removeprefix(_REMOVED)))

    def get(self, number: int) -> JobRecord:
        """Return a job's record."""
        with self._translate_errors():
            try:
                if (submission := read_submission(self._folder(number))) is None:
                    raise NotFound(f"Job {number} does not exist. See `holdfast queue`.")
                return JobRecord(submission, self._stored(submission))
            except OSError as error:
                if error.errno not in _NO_RECORD:
                    raise  # it may pass
                raise Corrupt(
                    f"The record of job {number} cannot be read: {error}. Its folder and its processes were "
                    "not touched, and its number is not used again."
                ) from error

    def all(self, engine: str | None = None) -> list[JobRecord]:
        """Return the records of all jobs, or of one engine's, oldest first, without unreadable ones."""
        records = [found for found in self._read_all() if isinstance(found, JobRecord)]
        return [record for record in records if engine in (None, record.job.engine)]

    def unreadable(self) -> list[str]:
        """Return why the records of some jobs cannot be read, a message for each."""
        return [str(found) for found in self._read_all() if isinstance(found, (Corrupt, Conflict))]

    def _read_all(self) -> Iterator[JobRecord | NotFound | Corrupt | Conflict]:
        """Yield the record of each folder, or its error. `NotFound`: the launch has not completed."""
        for number in self.numbers():
            try:
                yield self.get(number)
            except (NotFound, Corrupt, Conflict) as error:
                yield error

    def save(self, record: JobRecord) -> JobRecord:
        """Record a job's new state durably, with the times of its start and end, and return the record."""
        state, job_state = record.state, record.state.job_state
        started = state.unix_s if job_state.attempt else None
        ended = state.unix_s if job_state.status.is_final else None
        after = record.with_state(
            started_unix_s=state.started_unix_s or started, ended_unix_s=state.ended_unix_s or ended
        )
        folder = self._folder(record.job.number)
        with self._translate_errors():
            write_submission(folder, record.job)
            append_value(folder.states, after.state)
        return after

    def repair(self, record: JobRecord) -> None:
        """Restore the files of a record that are lost, damaged or older. Only its controller may do so."""
        folder = self._folder(record.job.number)
        with self._translate_errors():
            write_submission(folder, record.job)
            if newest_state(folder) != record.state:
                append_value(folder.states, record.state)

    def ask(self, number: int, kind: str, lead_s: float | None = None) -> None:
        """Add a request to a job's controller."""
        with self._translate_errors():
            append_value(self._folder(number).requests, JobRequest(kind, lead_s, uuid.uuid4().hex))

    def requests(self, record: JobRecord) -> list[JobRequest]:
        """Return the open requests to a job."""
        with self._translate_errors():
            found = read_values(self._folder(record.job.number).requests, JobRequest)
            return [one for one in found if one.id not in record.state.answered]

    def _folder(self, number: int) -> JobFolder:
        return job_folder(self._state, number)

    def _stored(self, submission: Submission) -> StoredState:
        """Return the newest state, rebuilt if the journal is lost or older than the attempts."""
        folder = self._folder(submission.number)
        last_attempt = folder.last_attempt()  # first, as a state is recorded before its attempt begins
        found = newest_state(folder)
        if submission.engine != _HERE:
            return found or StoredState(submission.submitted_unix_s)
        if found is None or found.job_state.attempt < last_attempt:
            return rebuild_state(folder, submission)
        return found

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except NotFound:
            raise
        except OSError as error:
            raise RetryLater(f"Cannot use the job records in {self._jobs}: {error}.") from error


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) <= _MAX_DIGITS


def write_submission(folder: JobFolder, submission: Submission) -> None:
    """Write what was submitted, twice. Files that are intact are left as they are."""
    text = encode(submission)
    for path in folder.submissions:
        if not path.exists() or path.read_bytes() != text.encode():
            write_atomic(path, text)


def read_submission(folder: JobFolder) -> Submission | None:
    """Return what was submitted, or None for a folder of an incomplete launch."""
    trouble: Corrupt | None = None
    for path in folder.submissions:
        try:
            with open_regular(path) as file:
                text = file.read(MAX_BYTES + 1)  # the decoder refuses more
            _check_version(path, text)
            found = decode_as(Submission, text, str(path), any_text=True)
        except FileNotFoundError:
            continue
        except Corrupt as error:
            trouble = error
        else:
            if str(found.number) == path.parent.name:
                return found
            trouble = Corrupt(f"{path} is of job {found.number}.")  # a copy would be a second job
    if trouble is None and not folder.states.exists() and not folder.last_attempt():
        return None
    why = f"is damaged: {trouble}" if trouble else f"is missing from {folder.path}."
    raise Corrupt(
        f"The record of job {folder.path.name} {why} Its folder and its processes were not touched, and its "
        "number is not used again."
    ) from trouble


def _check_version(path: Path, text: bytes) -> None:
    try:
        version = json.loads(text)["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return  # the decoder reports it
    if isinstance(version, int) and version > VERSION:
        raise Conflict(
            f"{path} was created by a newer version of Holdfast (version {version}, supported here: "
            f"{VERSION}). Use that version, or set HOLDFAST_STATE to another folder."
        )


def newest_state(folder: JobFolder) -> StoredState | None:
    """Return the newest state that can be read, or None."""
    for line in reversed(lines(folder.states, tail_bytes=_TAIL_BYTES)):
        with contextlib.suppress(Corrupt):  # torn by a kill, or damaged: its neighbours are read
            return decode_as(StoredState, line, str(folder.states), any_text=True)
    return None


def rebuild_state(folder: JobFolder, submission: Submission) -> StoredState:
    """Return the state of a job whose journal does not have it; its newest attempt may be running.

    Restarts are counted from the recorded outcomes. Requests to preempt count as applied.
    """
    attempt = folder.last_attempt()
    plan = _newest_plan(folder, submission, attempt)
    if attempt == 1 and plan is None:
        attempt = 0  # killed before any node was started: the job has no process, and no claim
    preempted = tuple(one.id for one in read_values(folder.requests, JobRequest) if one.kind == "preempt")
    first = folder.attempt(1)
    started_s = first.stat().st_mtime if attempt and first.exists() else None
    job_state = JobState()
    ended_s: float | None = None
    if attempt:
        ranks = range(submission.policy.num_nodes)
        status = JobStatus.STARTING if attempt == 1 else JobStatus.RECOVERING
        if all(folder.node(attempt, rank).running.exists() for rank in ranks):
            status = JobStatus.RUNNING
        job_state = JobState(
            status=status,
            attempt=attempt,
            is_active=True,
            recoveries=attempt - 1,
            num_errors=min(_num_errors(folder, submission, attempt), submission.policy.max_restarts),
            reason=_REASON,
        )
    changes = read_changes(folder)
    if changes and (last := changes[-1]).status.is_final:
        recoveries, outcomes = max(0, attempt - 1), last.outcomes
        job_state = JobState(last.status, attempt, False, recoveries, outcomes=outcomes, reason=last.reason)
        ended_s = last.unix_s
    return StoredState(
        submission.submitted_unix_s,
        job_state,
        started_unix_s=started_s,
        ended_unix_s=ended_s,
        answered=preempted,
        gpus=() if plan is None else plan.gpus,
        port=None if plan is None else plan.port,
    )


def _num_errors(folder: JobFolder, submission: Submission, attempt: int) -> int:
    """Return the number of earlier attempts that ended by an error of the job."""
    policy, failed = submission.policy, set[int]()
    for number, rank in itertools.product(range(1, attempt), range(policy.num_nodes)):
        with contextlib.suppress(Internal):
            outcome = read_outcome(folder.node(number, rank).ended)
            if outcome is not None and outcome.is_failed_command and outcome.code not in policy.free_codes:
                failed.add(number)
    return len(failed)


def _newest_plan(folder: JobFolder, submission: Submission, attempt: int) -> NodeSpec | None:
    """Return the newest specification of a node. That of any node has the GPUs of all."""
    for number in range(attempt, 0, -1):
        for rank in range(submission.policy.num_nodes):
            with contextlib.suppress(FileNotFoundError, Corrupt):
                return NodeSpec.read(folder.node(number, rank).plan)
    return None
