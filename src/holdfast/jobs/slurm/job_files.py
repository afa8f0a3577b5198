"""Files of a Slurm job, shared by login node, controller and runners."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.errors import Corrupt, Internal
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node.job_secrets import has_secrets, remove_secrets
from holdfast.jobs.node_spec import MAX_OWN_BYTES
from holdfast.jobs.record_files import JobRequest
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.system.documents import decode_dataclass, decode_object
from holdfast.system.log import get_logger

_log = get_logger("jobs")


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """Submitted job. Never changes."""

    number: int
    name: str
    task_id: str
    num_nodes: int
    num_gpus: int  # per node, from the task
    has_setup: bool
    user: str
    terms: RestartPolicy
    task_environment: Mapping[str, str]  # `envs` and `secrets`
    image: str = ""  # container image of the commands; empty: they run on the nodes as they are
    exclude: str = ""  # nodes that its user leaves out
    is_pinned: bool = False  # its user has named its nodes


@dataclass(frozen=True, slots=True)
class NodeUploads:
    """Uploads of a node in the newest attempt."""

    machine: str
    path: str  # scratch folder of the job on the machine
    missing: str | None = None  # files that are not in their buckets at the end; None: not known
    is_settled: bool = False  # another upload would not send them either


@dataclass(frozen=True, slots=True)
class SlurmJobState:
    """State of the job, as recorded by its controller."""

    job_state: JobState = field(default_factory=JobState)
    restart: int = -1  # Slurm's restart count when this was written
    slurm_id: str = ""
    step_before: int | None = None  # newest checkpoint when the attempt began
    num_answered: int = 0  # requests
    num_silent: int = 0  # attempts in a row without any message from a node
    machines: tuple[str, ...] = ()  # of the newest attempt, by node
    left_out: tuple[str, ...] = ()  # nodes that a requeue was to leave out
    uploads: Mapping[int, NodeUploads] = field(default_factory=dict)  # by node, if the job has mounts
    started_unix_s: float | None = None
    ended_unix_s: float | None = None


class JobFiles:
    """Files of one job, on a file system that all nodes share."""

    def __init__(self, job: JobFolder) -> None:
        self.job = job
        self.script = job.path / "sbatch.sh"
        self.output = job.path / "slurm.log"
        self._facts = job.path / "facts.json"
        self._story = job.path / "story.json"
        self._asked = job.path / "asked"

    def write_job(self, job: SubmittedJob) -> None:
        """Write the submitted job, readable only by its owner, as it contains secrets."""
        self._write_facts(job)
        # Created early: another node's file system may cache for long that a file does not exist.
        self._asked.touch(mode=0o600)
        self.job.changed.touch()
        self.write_state(SlurmJobState())

    def read_job(self) -> SubmittedJob:
        """Return the submitted job."""
        text, what = self._facts.read_bytes(), str(self._facts)
        return decode_dataclass(SubmittedJob, text, what, max_bytes=MAX_OWN_BYTES, any_text=True)

    def remove_secrets(self) -> None:
        """Remove the secrets of a job that has ended, unless they are gone. After an error, call again."""
        if not has_secrets(self.job):
            return
        try:
            self._remove_task_environment()
            remove_secrets(self.job)
        except FileNotFoundError:
            return  # the job is being removed
        except OSError as error:
            _log.warning("cannot remove the secrets of an ended job from %s: %s", self.job.path, error)

    def _remove_task_environment(self) -> None:
        try:
            job = self.read_job()
        except Corrupt:
            self._facts.unlink(missing_ok=True)
        else:
            self._write_facts(dataclasses.replace(job, task_environment={}))

    def _write_facts(self, job: SubmittedJob) -> None:
        write_document(self._facts, job)

    def write_state(self, state: SlurmJobState) -> None:
        """Write the state of the job."""
        write_document(self._story, state)

    def read_state(self) -> SlurmJobState:
        """Return the state of the job."""
        try:
            return decode_dataclass(SlurmJobState, self._story.read_bytes(), str(self._story), any_text=True)
        except (OSError, Corrupt) as error:
            raise Internal(f"{self._story} is not a valid state of a job: {error}") from error

    def request(self, kind: str, lead_s: float) -> None:
        """Send a request to the controller, which checks once a second."""
        fd = os.open(self._asked, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, json.dumps({"kind": kind, "lead_s": lead_s}).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def requests(self) -> list[JobRequest]:
        """Return all requests so far, oldest first."""
        lines = self._asked.read_bytes().split(b"\n")[:-1]
        return [_parse_request(number, line) for number, line in enumerate(lines)]


def _parse_request(number: int, line: bytes) -> JobRequest:
    document = decode_object(line, "a request to a job")
    return JobRequest(str(number), document.text("kind"), document.number("lead_s"))
