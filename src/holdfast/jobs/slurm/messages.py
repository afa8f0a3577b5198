"""Messages between a job's controller and its runners, and the srun step that they are sent through."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import get_args

from holdfast.errors import Corrupt
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.outcome import Outcome
from holdfast.jobs.slurm import commands
from holdfast.system.documents import decode_object, read_dataclass
from holdfast.system.entry import command


@dataclass(frozen=True, slots=True)
class RunnerStarted:
    """A runner has started."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeRunning:
    """The node has started `run`."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeNoticed:
    """The node has received a preemption notice from Slurm."""

    node: int
    source: str
    lead_s: float


@dataclass(frozen=True, slots=True)
class NoticeSent:
    """The notice was sent to the node's processes."""

    node: int
    num_listening: int


@dataclass(frozen=True, slots=True)
class NodeEnded:
    """Outcome of a node."""

    node: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ScratchOpened:
    """The node has opened the scratch folder of the job on its machine."""

    node: int
    machine: str
    path: str


@dataclass(frozen=True, slots=True)
class LeftoversSent:
    """The node has uploaded what earlier attempts have left on its machine."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeUploading:
    """The node's commands have ended, and some of their files are not uploaded yet."""

    node: int
    missing: str  # for people


@dataclass(frozen=True, slots=True)
class UploadsEnded:
    """The node uploads nothing more."""

    node: int
    missing: str  # files that are not in their buckets, for people
    is_settled: bool  # True if another upload would not send them either, as for a symbolic link


@dataclass(frozen=True, slots=True)
class OpenMounts:
    """Request to the nodes: mount, as all of them have uploaded what earlier attempts have left."""


@dataclass(frozen=True, slots=True)
class EndUploads:
    """Request to the nodes: unmount, and upload until a deadline. All their commands have ended."""

    until_unix_s: float | None  # None: as long as it takes
    removes: bool  # remove the scratch folder, as the job leaves the machine


@dataclass(frozen=True, slots=True)
class NotifyProcesses:
    """Request to the nodes: send a notice to your processes."""

    source: str
    deadline_unix_s: float


@dataclass(frozen=True, slots=True)
class KillProcesses:
    """Request to the nodes: kill all processes."""

    with_keepers: bool


Message = (
    RunnerStarted
    | NodeRunning
    | NodeNoticed
    | NoticeSent
    | NodeEnded
    | ScratchOpened
    | LeftoversSent
    | NodeUploading
    | UploadsEnded
    | OpenMounts
    | EndUploads
    | NotifyProcesses
    | KillProcesses
)
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def write(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps({"holdfast": type(message).__name__, **asdict(message)}).encode() + b"\n"


class Inbox:
    """Parser of received bytes into messages. Other lines are collected separately."""

    def __init__(self) -> None:
        self._rest = b""
        self.others: list[str] = []  # lines that are not messages: output of srun or a site's own programs

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                members = decode_object(line, "a line", any_text=True).members
                yield read_dataclass(_KINDS[str(members.pop("holdfast", ""))], members, "a message")
            except (Corrupt, KeyError):
                if line.strip():
                    self.others.append(line.decode("utf-8", "replace"))


class Step:
    """srun process that runs the nodes of one attempt."""

    def __init__(self, folder: JobFolder, attempt: int, num_nodes: int, kill_wait_s: float) -> None:
        # Created here, once: other nodes' file systems may cache for long that it does not exist.
        folder.attempt(attempt).mkdir(mode=0o700, parents=True, exist_ok=True)
        addresses = commands.addresses(os.environ["SLURM_JOB_NODELIST"])
        # srun uses the job's options, except for CPUs per task, which it needs again (since 22.05).
        cpus = os.environ.get("SLURM_CPUS_PER_TASK")
        self._srun = subprocess.Popen(
            [
                "srun",
                f"--nodes={num_nodes}",
                f"--ntasks={num_nodes}",
                "--ntasks-per-node=1",
                *([f"--cpus-per-task={cpus}"] if cpus else []),
                "--kill-on-bad-exit=1",  # a runner only fails if it was killed, and its peers wait in vain
                "--wait=0",
                "--unbuffered",
                *command(
                    *("holdfast.jobs.slurm", "runner", str(folder.path), str(attempt)),
                    ",".join(addresses),
                    str(kill_wait_s),
                ),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # srun would forward a signal, or end everything
        )
        assert self._srun.stdin is not None
        assert self._srun.stdout is not None
        self._in, self._out = self._srun.stdin, self._srun.stdout
        self._inbox = Inbox()
        self._killed: KillProcesses | None = None
        self.has_ended = False  # true once no runner is left
        self.has_opened = False  # true once the nodes may mount

    @property
    def fd(self) -> int:
        """Descriptor that is readable when a node has sent a message."""
        return self._out.fileno()

    def receive(self) -> Iterator[Message]:
        """Yield the nodes' messages since the last call."""
        if not select.select([self._out], [], [], 0)[0]:
            return
        data = os.read(self._out.fileno(), 1 << 16)
        if not data:
            self._srun.wait()
            self.has_ended = True
        yield from self._inbox.feed(data)
        for line in self._inbox.others:
            sys.stderr.write(f"{line}\n")
        self._inbox.others.clear()

    def send(self, message: Message) -> None:
        """Send a message to all nodes."""
        with contextlib.suppress(OSError):
            os.write(self._in.fileno(), write(message))

    def kill(self, *, with_keepers: bool) -> None:
        """Send the nodes a request to kill their processes, once."""
        request = KillProcesses(with_keepers)
        if request != self._killed:
            self._killed = request
            self.send(request)

    def close(self) -> None:
        """Close the pipes to srun."""
        self._in.close()
        self._out.close()
