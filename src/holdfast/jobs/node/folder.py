"""Where everything about a job lies: the files of its folder, and those of each node of an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """Files of one node of one attempt."""

    path: Path

    @property
    def lock(self) -> Path:
        """Locked as long as the node's warden lives."""
        return self.path / "lock"

    @property
    def pid(self) -> Path:
        """The warden's pid and start time."""
        return self.path / "pid"

    @property
    def plan(self) -> Path:
        """What the warden is to do."""
        return self.path / "plan.json"

    @property
    def running(self) -> Path:
        """There once `run` has been started."""
        return self.path / "running"

    @property
    def ended(self) -> Path:
        """How it ended."""
        return self.path / "ended"

    @property
    def notice(self) -> Path:
        """Where a preemption notice is put."""
        return self.path / "notice"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Files of one job."""

    path: Path

    @property
    def lock(self) -> Path:
        """Locked as long as somebody looks after the job."""
        return self.path / "controller.lock"

    @property
    def controller_log(self) -> Path:
        """What the controller has to say when all else fails."""
        return self.path / "controller.log"

    @property
    def bell(self) -> Path:
        """FIFO by which the controller is told that there is something to see."""
        return self.path / "bell"

    @property
    def changed(self) -> Path:
        """Written to after each change, for those who follow."""
        return self.path / "changed"

    @property
    def environment(self) -> Path:
        """Environment of whoever launched the job, with the values of secrets."""
        return self.path / "environment.json"

    @property
    def progress(self) -> Path:
        """Steps that the training has told."""
        return self.path / "progress"

    def script(self, name: str) -> Path:
        """`setup` or `run`."""
        return self.path / f"{name}.sh"

    @property
    def logs(self) -> Path:
        """Folder of the nodes' output."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """Output of a node, of all attempts."""
        return self.logs / f"node-{rank}.log"

    def workdir(self, rank: int) -> Path:
        """Where a node's commands are run."""
        return self.path / "nodes" / str(rank) / "workdir"

    def set_up(self, rank: int) -> Path:
        """There once `setup` has succeeded on a node."""
        return self.path / "nodes" / str(rank) / "set-up"

    @property
    def copies(self) -> Path:
        """What `file_mounts` copied."""
        return self.path / "mounts"

    def attempt(self, number: int) -> Path:
        """Folder of an attempt; there once anything of it was started."""
        return self.path / "attempts" / str(number)

    def node(self, attempt: int, rank: int) -> NodeFolder:
        """A node of an attempt."""
        return NodeFolder(self.attempt(attempt) / str(rank))


def job_folder(state: Path, number: int) -> JobFolder:
    """The folder of a job."""
    return JobFolder(state / "jobs" / str(number))


def bucket_dir(state: Path, name: str) -> Path:
    """What stands for the bucket of a name on this machine; it outlives the jobs."""
    return state / "buckets" / name
