"""Folders and files of a job, and of each node of an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """Files of one node of one attempt."""

    path: Path

    @property
    def lock(self) -> Path:
        """Lock of the running agent."""
        return self.path / "lock"

    @property
    def pid(self) -> Path:
        """Pid and start time of the agent."""
        return self.path / "pid"

    @property
    def plan(self) -> Path:
        """Specification of the node."""
        return self.path / "plan.json"

    @property
    def running(self) -> Path:
        """File that exists once `run` has started."""
        return self.path / "running"

    @property
    def ended(self) -> Path:
        """Outcome of the node."""
        return self.path / "ended"

    @property
    def notice(self) -> Path:
        """File for preemption notices."""
        return self.path / "notice"


@dataclass(frozen=True, slots=True)
class JobFolder:
    """Files of one job."""

    path: Path

    @property
    def lock(self) -> Path:
        """Lock of the running controller."""
        return self.path / "controller.lock"

    @property
    def controller_log(self) -> Path:
        """Log of the controller."""
        return self.path / "controller.log"

    @property
    def bell(self) -> Path:
        """FIFO that wakes the controller."""
        return self.path / "bell"

    @property
    def changed(self) -> Path:
        """Log of status changes, for followers."""
        return self.path / "changed"

    @property
    def environment(self) -> Path:
        """Environment of the user who launched the job, with values of secrets."""
        return self.path / "environment.json"

    @property
    def progress(self) -> Path:
        """Steps recorded by the training."""
        return self.path / "progress"

    def script(self, name: str) -> Path:
        """Return the path of the script `setup` or `run`."""
        return self.path / f"{name}.sh"

    @property
    def logs(self) -> Path:
        """Folder of the nodes' output."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """Return the path of a node's output of all attempts."""
        return self.logs / f"node-{rank}.log"

    def workdir(self, rank: int) -> Path:
        """Return the working directory of a node's commands."""
        return self.path / "nodes" / str(rank) / "workdir"

    def set_up(self, rank: int) -> Path:
        """Return the path of a file that exists once `setup` has succeeded on a node."""
        return self.path / "nodes" / str(rank) / "set-up"

    @property
    def copies(self) -> Path:
        """Folder for copies made by `file_mounts`."""
        return self.path / "mounts"

    def attempt(self, number: int) -> Path:
        """Return the folder of an attempt, which exists once the attempt has started."""
        return self.path / "attempts" / str(number)

    def node(self, attempt: int, rank: int) -> NodeFolder:
        """Return the folder of a node in an attempt."""
        return NodeFolder(self.attempt(attempt) / str(rank))


def job_folder(state: Path, number: int) -> JobFolder:
    """Return the folder of a job."""
    return JobFolder(state / "jobs" / str(number))


def bucket_folder(state: Path, name: str) -> Path:
    """Return the folder that replaces a named bucket on this machine. It outlives the jobs."""
    return state / "buckets" / name
