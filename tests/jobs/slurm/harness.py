"""Slurm jobs under test: submit them, wait for them, preempt and kill them as a cluster does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from typing_extensions import override

from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.node.processes import Process
from holdfast.jobs.slurm.engine import SlurmEngine
from holdfast.jobs.slurm.job_files import JobFiles
from jobs.harness import Harness

READY = "echo ready; while true; do sleep 0.1; done"
NOTIFIED = f"[ $HOLDFAST_ATTEMPT = 2 ] && exit 0\ntrap 'echo told; exit 75' TERM\n{READY}"
"""Commands of a job that waits for its notice, and ends in its second attempt."""


def command(*words: str) -> str:
    """Return the output of a Slurm command."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout.strip()


class SlurmHarness(Harness):
    """Engine of a Slurm cluster under test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, SlurmEngine())

    @override
    def files(self, job: Job) -> JobFiles:
        """Return the files of the job."""
        return JobFiles(super().files(job).path)

    def slurm_id(self, job: Job) -> str:
        """Return Slurm's id of a job that has started."""
        return self.files(job).read_state().slurm_id

    def describe(self, job: Job) -> str:
        """Return all details of a job, for a failure's message."""
        queue = subprocess.run(["squeue", "--states=all"], capture_output=True, text=True, check=False).stdout
        return f"{super().describe(job)}\n{queue}"

    # -- what a cluster does ---------------------------------------------------------------------------------

    def take_node(self, node: str = "n1") -> None:
        """Let a job of higher priority take a node for a short while."""
        words = ["sbatch", "--parsable", "--partition=prio", "--nodes=1", "--exclusive", f"--nodelist={node}"]
        words += [f"--output={self.folder}/important.out"]
        subprocess.run(words, input="#!/bin/bash\nsleep 1\n", text=True, check=True, capture_output=True)

    def runner(self, job: Job, node: int) -> Process:
        """Return the runner of a node."""
        (found,) = [
            one for one in self.roles(job, "runner") if environment(one.pid).get("SLURM_NODEID") == str(node)
        ]
        return found

    def leave(self) -> None:
        """Kill what is left, and check that ended jobs left nothing."""
        left = []
        for job in self.engine.jobs():
            if job.status.is_final:
                left += [(job.id, one) for one in self.of_job(job) if not one.exits_by_itself]
            elif number := self.engine._records.get(job.id).state.engine_job_id:
                subprocess.run(["scancel", "--full", "--signal=KILL", number], check=False)
                subprocess.run(["scancel", number], check=False)
            processes.kill(self.of_job(job))
        assert not left, f"processes of jobs that have ended: {left}"


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)
