"""Step of a Slurm job: the srun process of an attempt, and the messages through it."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator

from holdfast.jobs.folder import JobFolder
from holdfast.jobs.slurm import commands, messages
from holdfast.system.entry import command


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
        self._inbox = messages.Inbox()
        self._killed: messages.KillProcesses | None = None
        self.has_ended = False  # true once no runner is left
        self.has_opened = False  # true once the nodes may mount

    @property
    def fd(self) -> int:
        """Descriptor that is readable when a node has sent a message."""
        return self._out.fileno()

    def receive(self) -> Iterator[messages.Message]:
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

    def send(self, message: messages.Message) -> None:
        """Send a message to all nodes."""
        with contextlib.suppress(OSError):
            os.write(self._in.fileno(), messages.write(message))

    def kill(self, *, with_keepers: bool) -> None:
        """Send the nodes a request to kill their processes, once."""
        request = messages.KillProcesses(with_keepers)
        if request != self._killed:
            self._killed = request
            self.send(request)

    def close(self) -> None:
        """Close the pipes to srun."""
        self._in.close()
        self._out.close()
