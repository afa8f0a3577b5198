"""Reports of nodes, orders to them, and the srun step through which both are sent.

Each is the whole state, sent again when it changes, so a receiver needs only the newest.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Corrupt
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.outcome import Outcome
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.job_files import NodeUploads
from holdfast.system.documents import decode_as, read_as, to_plain
from holdfast.system.entry import command


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


def write(state: NodeReport | Orders) -> bytes:
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
        self._inbox = Inbox(NodeReport)
        self.reports: dict[int, NodeReport] = {}  # the newest of each node
        self.orders = Orders()  # the newest
        self.has_ended = False  # true once no runner is left

    @property
    def fd(self) -> int:
        """Descriptor that is readable when a node has sent a report."""
        return self._out.fileno()

    def receive(self) -> None:
        """Receive the nodes' reports since the last call."""
        if not select.select([self._out], [], [], 0)[0]:
            return
        data = os.read(self._out.fileno(), 1 << 16)
        if not data:
            self._srun.wait()
            self.has_ended = True
        self.reports.update((report.node, report) for report in self._inbox.feed(data))
        for line in self._inbox.others:
            sys.stderr.write(f"{line}\n")
        self._inbox.others.clear()

    def order(self, **changes: Any) -> None:
        """Change the orders of all nodes."""
        orders = replace(self.orders, **changes)
        if orders != self.orders:
            self.orders = orders
            with contextlib.suppress(OSError):
                os.write(self._in.fileno(), write(orders))

    def close(self) -> None:
        """Close the pipes to srun."""
        self._in.close()
        self._out.close()
