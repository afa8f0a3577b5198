"""Container runtimes under test: the stand-in, podman, and docker."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TypeAlias

from holdfast.jobs.engine import Job
from jobs.containers.stand_in import StandIn


class RealRuntime:
    """Podman or docker, as this user."""

    def __init__(self, program: str) -> None:
        self.program = program

    def containers(self, job: Job) -> list[str]:
        """Return the ids of the containers of a job."""
        labels = [f"label=holdfast.node={job.task_id}/{rank}" for rank in range(job.num_nodes)]
        lists = [self.run("ps", "--all", "--quiet", "--no-trunc", "--filter", label) for label in labels]
        return [container for listed in lists for container in listed.split()]

    def pid(self, container: str) -> int:
        """Return the process of a container."""
        return int(self.run("container", "inspect", "--format", "{{.State.Pid}}", container))

    def kill(self, container: str) -> None:
        """Kill the process of a container."""
        os.kill(self.pid(container), signal.SIGKILL)

    def run(self, *words: str) -> str:
        """Return the output of a command."""
        done = subprocess.run([self.program, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()


RuntimeUnderTest: TypeAlias = StandIn | RealRuntime
