"""Folders and files of all jobs, of one job, and of each node of an attempt."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import InvalidInput


class ContainerFolder:
    """Files of the container of one node, for all attempts or for one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.image = path / "image.json"  # image and settings, for a container of one attempt
        self.state = path / "state.json"  # the running container, or why it cannot run
        self.linked = path / "linked"  # id of the container that has the job's links
        self.unneeded = path / "unneeded"  # exists once the job has ended
        self.removed = path / "removed"  # exists once the container was removed


class NodeFolder:
    """Files of one node of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / "lock"  # lock of the running agent
        self.plan = path / "plan.json"  # specification of the node
        self.running = path / "running"  # exists once `run` has started
        self.ended = path / "ended"  # outcome of the node
        self.checks = path / "checks.json"  # results of the checks before the attempt
        self.notice = path / "notice"  # for preemption notices
        self.unsent = path / "unsent.json"  # files that are not uploaded at the end, on another machine
        self.container = ContainerFolder(path / "container")  # of this attempt only, on a cluster


class JobFolder:
    """Files of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.submissions = (path / "job.json", path / "job.copy.json")  # what was submitted, twice
        self.states = path / "states.jsonl"  # journal of the job's states
        self.requests = path / "requests.jsonl"  # requests to the controller
        self.lock = path / "controller.lock"  # lock of the running controller
        self.controller_log = path / "controller.log"
        self.wakeup = path / "wakeup"  # FIFO that wakes the controller
        self.changed = path / "changed"  # log of status changes, for followers
        self.history = path / "history.jsonl"  # the same changes with all details
        self.shell_start = path / "shell-start.sh"  # that the scripts source first
        self.environment = path / "environment.json"  # of the user who launched the job, with secrets
        self.without_secrets = path / "without-secrets"  # exists once those files were removed
        self.notify_plan = path / "notify.json"  # targets of notifications, with secrets
        self.notifications = path / "notifications.jsonl"  # statuses to send
        self.deliveries = path / "deliveries.jsonl"  # results of sending them
        self.notifier_lock = path / "notifier.lock"  # lock of the running notifier
        self.progress = path / "progress"  # steps recorded by the training
        self.logs = path / "logs"  # folder of the nodes' output
        self.copies = path / "mounts"  # folder for copies made by `file_mounts`
        self.mounts = path / "supplies.json"  # specifications of the mounts
        self.links = path / "mounts.json"  # links at paths of the job
        self.image = path / "image.json"  # container image of the job, if it has one
        self.staging = path / "staging"  # empty folder, where directories with private links are assembled

    def script(self, name: str, rank: int) -> Path:
        """Return the path of the script `setup` or `run` of a node."""
        return self.path / "nodes" / str(rank) / f"{name}.sh"

    def log(self, rank: int) -> Path:
        """Return the path of a node's output of all attempts."""
        return self.logs / f"node-{rank}.log"

    def workdir(self, rank: int) -> Path:
        """Return the working directory of a node's commands."""
        return self.path / "nodes" / str(rank) / "workdir"

    def venv(self, rank: int, machine: str = "") -> Path:
        """Return the virtual environment of a node, on a machine if attempts may run on different ones."""
        return self.path / "nodes" / str(rank) / (f"venv.{machine}" if machine else "venv")

    def set_up(self, rank: int) -> Path:
        """Return the path of a file that exists once `setup` has succeeded on a node."""
        return self.path / "nodes" / str(rank) / "set-up"

    def container(self, rank: int) -> ContainerFolder:
        """Return the folder of a container for all attempts, which exists once it was needed."""
        return ContainerFolder(self.path / "nodes" / str(rank) / "container")

    def attempt(self, number: int) -> Path:
        """Return the folder of an attempt, which exists once the attempt has started."""
        return self.path / "attempts" / str(number)

    def last_attempt(self) -> int:
        """Return the number of the newest attempt, or 0 if none has started."""
        try:
            names = [entry.name for entry in os.scandir(self.path / "attempts")]
        except FileNotFoundError:
            return 0
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def node(self, attempt: int, rank: int) -> NodeFolder:
        """Return the folder of a node in an attempt."""
        return NodeFolder(self.attempt(attempt) / str(rank))


def jobs_folder(state: Path) -> Path:
    """Return the folder of all jobs' folders."""
    return state / "jobs"


def job_folder(state: Path, number: int) -> JobFolder:
    """Return the folder of a job."""
    return JobFolder(jobs_folder(state) / str(number))


def bucket_folder(state: Path, name: str) -> Path:
    """Return the folder that replaces a named bucket on this machine. It outlives the jobs."""
    return state / "buckets" / name


STATE = "HOLDFAST_STATE"
"""Variable with the path of the folder. Default: $XDG_STATE_HOME/holdfast or ~/.local/state/holdfast."""
_MAX_SHOWN = 200


def state_path() -> Path:
    """Return the path of the folder, which may not exist yet."""
    named = os.environ.get(STATE)
    if named:
        return Path(named).absolute()
    parent = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(parent).expanduser().absolute() / "holdfast"


def state_dir() -> Path:
    """Return the folder, creating it if needed."""
    folder = state_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        shown = f"{folder}" if len(str(folder)) < _MAX_SHOWN else f"{str(folder)[:_MAX_SHOWN]}..."
        raise InvalidInput(
            f"The folder of the jobs, {shown}, cannot be made: {error.strerror}. "
            f"Set {STATE} to a folder of yours."
        ) from error
    return folder
