"""Deadlines of jobs on a machine whose clock jumps, with real controllers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

CLOCK = Path(__file__).parents[2] / "faults" / "clock"
"""Folder of a module that sets the clock of Python processes by CLOCK_OFFSET_S."""


@pytest.mark.slow
@pytest.mark.parametrize("offset_s", [1e6, -1e6])
def test_deadlines_hold_for_a_controller_with_another_clock(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    """The first notice leaves an hour, which is not over. The 15 s of the second one end, by any clock."""
    run = "trap '' TERM; echo up; until [ -e $GO ]; do sleep 0.05; done"
    long, short = (harness.submit(run, GO=str(harness.folder / "go")) for _ in range(2))
    for job, lead_s in ((long, 3600.0), (short, 15.0)):
        harness.wait_for_output(job, "up")
        harness.engine.preempt(job.id, lead_s=lead_s)
        harness.wait_for(job, lambda job=job: harness.record(job).state.due.kill_unix_s, "the deadline")
    monkeypatch.setenv("CLOCK_OFFSET_S", str(offset_s))
    monkeypatch.setenv("PYTHONPATH", f"{CLOCK}:{os.environ['PYTHONPATH']}")
    for job in (long, short):
        replace_controller(harness, job, f"CLOCK_OFFSET_S={offset_s}")
    harness.wait_for_output(short, "up", times=2)
    assert (harness.engine.job(long.id).attempt, harness.engine.job(long.id).status) == (1, JobStatus.RUNNING)
    (harness.folder / "go").touch()
    assert harness.wait(long).recoveries == 0


def replace_controller(harness: JobHarness, job: Job, mark: str) -> None:
    """Kill the job's controller until the new one has a variable: an agent may start one without it."""

    def is_marked() -> bool:
        found = harness.roles(job, "controller")
        texts = [Path(f"/proc/{one.pid}/environ").read_text() for one in found]
        if texts and all(mark in text for text in texts):
            return True
        processes.kill(found)
        harness.engine.job(job.id)
        return False

    harness.wait_for(job, is_marked, mark)
