"""Files of a Slurm job, shared by login node, controller and runners."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from holdfast.errors import Corrupt, Internal
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import append_value, load_document, read_values, write_document
from holdfast.jobs.records import JobRequest, Submission, read_submission
from holdfast.jobs.state_machine import JobState


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
