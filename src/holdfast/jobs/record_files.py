"""Files of a job's record in its folder: the submission, the journal of its states, and requests to it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import Conflict, Corrupt
from holdfast.jobs import journal
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.timers import ClockReading, Timers
from holdfast.system.documents import MAX_BYTES, decode_dataclass, refuse
from holdfast.system.linux.files import open_regular, write_atomic

VERSION = 1
ENGINE_NAMES = ("local", "slurm", "sky", "k8s", "kubeflow")  # names of engines, as in `--on`
_TAIL_BYTES = 4 << 20  # part of a journal that is searched for its last valid lines
_MAX_NODES = 1_000_000
_MAX_UNIX_S = 253_402_300_799.0  # end of the year 9999


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Shape of a submitted job."""

    num_nodes: int
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


@dataclass(frozen=True, slots=True)
class Submission:
    """Submitted job. Never changes."""

    number: int
    name: str
    task_id: str
    engine: str
    spec: JobSpec
    policy: RestartPolicy
    submitted_unix_s: float
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class StoredState:
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


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Request of a command to a job."""

    id: str
    kind: str  # cancel or preempt
    lead_s: float | None


def write_submission(folder: JobFolder, submission: Submission) -> None:
    """Write what was submitted, twice. Files that are intact are left as they are."""
    text = journal.encode(submission)
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
            return _checked(path, decode_dataclass(Submission, text, str(path), any_text=True))
        except FileNotFoundError:
            continue
        except Corrupt as error:
            trouble = error
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


def _checked(path: Path, submission: Submission) -> Submission:
    """Return a submission that belongs to its folder. A copied folder would be a second job of its number."""
    if str(submission.number) != path.parent.name:
        raise Corrupt(f"{path} is of job {submission.number}.")
    if submission.engine not in ENGINE_NAMES:
        refuse(str(path), "engine", f"one of {', '.join(ENGINE_NAMES)}", submission.engine)
    if not 1 <= submission.spec.num_nodes <= _MAX_NODES:
        refuse(str(path), "num_nodes", f"an integer from 1 to {_MAX_NODES}", submission.spec.num_nodes)
    if not 0 <= (time_s := submission.submitted_unix_s) <= _MAX_UNIX_S:
        refuse(str(path), "submitted_unix_s", f"seconds from 0 to {_MAX_UNIX_S:.0f}", time_s)
    return submission


def newest_state(folder: JobFolder) -> StoredState | None:
    """Return the newest state that can be read, or None."""
    for line in reversed(journal.lines(folder.states, tail_bytes=_TAIL_BYTES)):
        with contextlib.suppress(Corrupt):  # torn by a kill, or damaged: its neighbours are read
            return decode_dataclass(StoredState, line, str(folder.states), any_text=True)
    return None


def read_requests(folder: JobFolder) -> list[JobRequest]:
    """Return all requests so far, oldest first. Damaged ones are skipped."""
    return journal.read_values(folder.requests, JobRequest)
