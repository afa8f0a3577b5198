"""Files of a Slurm job, shared by login node, controller and runners, and the messages of the latter two.

Each message, a report or orders, is the whole state, sent again when it changes, so a receiver needs only the
newest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from holdfast.errors import Corrupt, Internal
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import append_value, load_document, read_values, write_document
from holdfast.jobs.outcome import Outcome
from holdfast.jobs.records import JobRequest, Submission, read_submission
from holdfast.jobs.state_machine import JobState
from holdfast.system.documents import decode_as, read_as, to_plain


class NodeUploads(Struct, frozen=True):
    """Uploads of a node in the newest attempt."""

    machine: str
    path: str  # scratch folder of the job on the machine
    missing: str | None = None  # files that are not in their buckets at the end; None: not known
    is_settled: bool = False  # another upload would not send them either, as for a symbolic link


class SlurmJobState(Struct, frozen=True):
    """State of the job, as recorded by its controller."""

    job_state: JobState = field(default_factory=JobState)
    restart: int = -1  # Slurm's restart count when this was written
    slurm_id: str = ""
    step_before: int | None = None  # newest checkpoint when the attempt began
    num_answered: int = 0  # requests
    num_silent: int = 0  # attempts in a row without any message from a node
    machines: tuple[str, ...] = ()  # of the newest attempt, by node
    left_out: tuple[str, ...] = ()  # nodes that a requeue was to leave out
    uploads: Mapping[int, NodeUploads] = {}  # by node, if the job has mounts
    started_unix_s: float | None = None
    ended_unix_s: float | None = None


class JobFiles(JobFolder):
    """Files of one Slurm job, on a file system that all nodes share."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.batch_script = path / "sbatch.sh"
        self.output = path / "slurm.log"
        self._story = path / "story.json"
        self._asked = path / "asked"

    def create(self) -> None:
        """Create the files of a job that is about to be submitted."""
        # Created early: another node's file system may cache for long that a file does not exist.
        self._asked.touch(mode=0o600)
        self.changed.touch()
        self.write_state(SlurmJobState())

    def read_job(self) -> Submission:
        """Return the submitted job."""
        found = read_submission(self)
        if found is None:
            raise Internal(f"{self.path} is not the folder of a submitted job")
        return found

    def write_state(self, state: SlurmJobState) -> None:
        """Write the state of the job."""
        write_document(self._story, state)

    def read_state(self) -> SlurmJobState:
        """Return the state of the job."""
        try:
            return load_document(self._story, SlurmJobState)
        except (OSError, Corrupt) as error:
            raise Internal(f"{self._story} is not a valid state of a job: {error}") from error

    def request(self, kind: str, lead_s: float) -> None:
        """Send a request to the controller, which checks once a second."""
        append_value(self._asked, JobRequest(kind, lead_s))

    def read_requests(self) -> list[JobRequest]:
        """Return all requests so far, oldest first."""
        return read_values(self._asked, JobRequest)

    @property
    def is_cancelled(self) -> bool:
        """True if a user has cancelled the job."""
        return any(one.kind == "cancel" for one in self.read_requests())


class NodeReport(Struct, frozen=True):
    """State of a node, from its runner to the controller."""

    node: int
    are_leftovers_sent: bool = False  # what earlier attempts have left on the machine is uploaded
    is_running: bool = False  # `run` has started
    notice: str = ""  # source of a preemption notice that the machine has received
    notice_lead_s: float = 0.0
    notified_unix_s: float | None = None  # deadline of the newest notice that the processes have received
    num_listening: int = 0  # processes that handle it
    outcome: Outcome | None = None  # once the commands have ended
    uploads: NodeUploads | None = None  # once its scratch folder is open
    uploading: str = ""  # files that are still uploaded after that, for people


class UploadTerms(Struct, frozen=True):
    """Terms of the uploads of all nodes, once all commands have ended."""

    until_unix_s: float | None  # None: as long as it takes
    removes: bool  # remove the scratch folder, as the job leaves the machine


class Orders(Struct, frozen=True):
    """All that the nodes are to do besides their commands, from the controller to the runners."""

    notice: str = ""  # source of a notice for all processes; empty: there is none
    notice_unix_s: float = 0.0  # its deadline
    kills: bool = False  # kill all processes
    kills_keepers: bool = False  # keepers too
    opens_mounts: bool = False  # mount: all nodes have uploaded what earlier attempts have left
    uploads: UploadTerms | None = None  # unmount, and upload


_T = TypeVar("_T", NodeReport, Orders)


def as_line(state: NodeReport | Orders) -> bytes:
    """Return a report or orders as a line."""
    return json.dumps({"holdfast": to_plain(state)}).encode() + b"\n"


class Inbox(Generic[_T]):
    """Parser of received bytes into reports or orders. Other lines are collected separately."""

    def __init__(self, kind: type[_T]) -> None:
        self._kind, self._rest = kind, b""
        self.others: list[str] = []  # output of srun or a site's own programs

    def feed(self, data: bytes) -> Iterator[_T]:
        """Yield the values that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                members = decode_as(dict[str, Any], line, "a line", any_text=True)
                yield read_as(self._kind, members["holdfast"], "a message")
            except (Corrupt, KeyError):
                if line.strip():
                    self.others.append(line.decode("utf-8", "replace"))
