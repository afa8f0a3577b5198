"""Container runtimes under test: the stand-in, podman, and docker."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path

from typing_extensions import override

from holdfast.jobs.engine import Job
from jobs.containers.images import IMAGE
from jobs.containers.stand_in import StandIn


class RuntimeUnderTest(ABC):
    """Runtime that can run the image of the tests."""

    image = IMAGE

    @abstractmethod
    def containers(self, job: Job) -> list[str]:
        """Return the ids of the containers of a job."""

    @abstractmethod
    def pid(self, container: str) -> int:
        """Return the process of a container."""

    def kill(self, container: str) -> None:
        """Kill the process of a container."""
        os.kill(self.pid(container), signal.SIGKILL)


class StandInUnderTest(RuntimeUnderTest):
    """The stand-in."""

    def __init__(self, folder: Path) -> None:
        self.runtime = StandIn(folder)
        self.runtime.add_image(IMAGE, HOME="/srv/home", SETTING="of-the-image")

    @override
    def containers(self, job: Job) -> list[str]:
        found = {path.stem: path.read_text() for path in self.runtime.folder.glob("*.container")}
        return [container for container, words in found.items() if f"{job.task_id}/" in words]

    @override
    def pid(self, container: str) -> int:
        return int((self.runtime.folder / f"{container}.pid").read_text())


class RealRuntime(RuntimeUnderTest):
    """Podman or docker, as this user."""

    def __init__(self, program: str) -> None:
        self.program = program

    @override
    def containers(self, job: Job) -> list[str]:
        labels = [f"label=holdfast.node={job.task_id}/{rank}" for rank in range(job.num_nodes)]
        lists = [self.run("ps", "--all", "--quiet", "--no-trunc", "--filter", label) for label in labels]
        return [container for listed in lists for container in listed.split()]

    @override
    def pid(self, container: str) -> int:
        return int(self.run("container", "inspect", "--format", "{{.State.Pid}}", container))

    def run(self, *words: str) -> str:
        """Return the output of a command."""
        done = subprocess.run([self.program, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()
