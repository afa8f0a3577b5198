"""One replay: a job of the local engine trains while the events of a schedule happen to it."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.jobs.engine import Job
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.node import processes
from holdfast.jobs.task.parser import Overrides, parse_tasks

from .progress import Progress, sum_up
from .schedule import Event, Schedule
from .troubles import Troubles, wait

_LISTENING = "00010000"  # flags of such a socket in /proc/net/unix
SCRIPT = Path(__file__).resolve().parent / "training.py"
# A node that is away cannot start anything: the job's first command waits for it.
TASK = """\
num_nodes: {num_nodes}
resources: {{job_recovery: {{max_restarts_on_errors: 100000}}}}
envs: {{{envs}}}
run: |
  while [ -e {gate} ]; do sleep 0.02; done
  HOLDFAST_BEGAN_UNIX_S=$EPOCHREALTIME exec {python} {script} {folder} {tool} --every {every} {steps}
"""


class Replay:
    """A job in a folder of its own."""

    def __init__(
        self, folder: Path, tool: str, *, num_nodes: int, every: int, steps: int | None = None
    ) -> None:
        self._folder, self._has_standbys = folder, tool == "standby"
        self._gate = folder / "gate"
        folder.mkdir(parents=True)
        text = TASK.format(
            num_nodes=num_nodes,
            envs="HOLDFAST_STANDBY: '1'" if self._has_standbys else "",
            gate=self._gate,
            python=sys.executable,
            script=SCRIPT,
            folder=folder,
            tool=tool,
            every=every,
            steps=f"--steps {steps}" if steps else "",
        )
        self._engine = LocalEngine()
        (self._job,) = self._engine.submit_file(parse_tasks(text, "goodput.yaml", Overrides()))
        self._troubles = Troubles(self._engine, self._job, script=SCRIPT.name, folder=folder)

    def run(self, schedule: Schedule, seed: int) -> dict[str, Any]:
        """Let all events happen, and return what the job has done meanwhile."""
        choice = random.Random(seed)
        wait(self._has_step, "the first step")
        if self._has_standbys:
            wait(lambda: num_listening() >= schedule.num_nodes, "the standby of each node")
        begin_unix_s = self.progress()[0].steps[0][1]
        for event in schedule.events:
            _sleep_until(begin_unix_s + event.at_s)
            self._happen(event, choice.randrange(schedule.num_nodes), begin_unix_s)
        end_unix_s = begin_unix_s + schedule.length_s
        _sleep_until(end_unix_s)
        wait(lambda: self.progress()[-1].steps[-1][1] > end_unix_s, "a step after the last event")
        return sum_up(self.progress(), end_unix_s)

    def close(self) -> None:
        """End the job."""
        self._gate.unlink(missing_ok=True)
        if self._has_standbys:
            processes.kill([one for one in processes.snapshot().values() if is_standby(one.pid)])
        if not self.job.status.is_final:
            self._engine.cancel(self._job.id)
        self.wait_ended()

    def wait_ended(self) -> None:
        """Wait for the job's end."""
        wait(lambda: self.job.status.is_final, "the job's end")

    @property
    def job(self) -> Job:
        """The job now."""
        return self._engine.job(self._job.id)

    def progress(self) -> list[Progress]:
        """Return the steps of each attempt that has completed some, in order."""
        found = []
        for path in self._folder.glob("steps-*"):
            lines = [one.split() for one in path.read_text().splitlines(keepends=True) if one.endswith("\n")]
            if lines:
                steps = tuple((int(step), float(at)) for step, at in lines)
                number = path.name.rpartition("-")[2]
                start = (self._folder / f"start-{number}").read_text().split()
                found.append(Progress(int(number), steps, tuple(float(moment) for moment in start)))
        return sorted(found, key=lambda one: one.attempt)

    def _has_step(self) -> bool:
        if self.job.status.is_final:
            raise RuntimeError(f"the job ended before its first step: {self.job.status} {self.job.reason}")
        return bool(self.progress())

    def _happen(self, event: Event, node: int, begin_unix_s: float) -> None:
        if event.outage_s:
            self._gate.touch()
        self._troubles.cause(event.trouble, node)
        if event.outage_s:
            _sleep_until(begin_unix_s + event.at_s + event.outage_s)
            self._gate.unlink()


def num_listening() -> int:
    """Return how many standbys wait for the next start of their script."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(line[3] == _LISTENING and line[-1].startswith("@holdfast-standby-") for line in lines)


def is_standby(pid: int) -> bool:
    """Return True for a process from which the next start of a script is forked, or was."""
    try:
        return b"holdfast.watch.standby" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _sleep_until(unix_s: float) -> None:
    time.sleep(max(0.0, unix_s - time.time()))
