"""Local jobs under test: submit them, wait for them, kill their processes, check what is left."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.environment import tag
from holdfast.jobs.folder import JobFolder, job_folder, state_dir
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.node import processes
from holdfast.jobs.node.mounts.mount_records import why_unavailable
from holdfast.jobs.node.processes import AGENT, Process
from holdfast.jobs.recorded import RecordedEngine
from holdfast.jobs.records import JobRecord, Records
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import Overrides, parse_tasks

LIMIT_S = 600.0
_WHY = why_unavailable()
needs_namespaces = pytest.mark.skipif(_WHY is not None, reason=f"this kernel has no mount namespaces: {_WHY}")


def command_line(pid: int) -> list[bytes]:
    """Return the words of a process's command line; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def holders(folder: Path, *words: str) -> list[str]:
    """Return the files below a folder, by their paths in it, that contain one of some words."""
    found = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return [
        str(path.relative_to(folder))
        for path in found
        if path.is_file() and any(word.encode() in path.read_bytes() for word in words)
    ]


def write_program(path: Path, script: str) -> None:
    """Write a shell script that can be executed, and the folder of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def with_word(found: list[Process], word: str) -> list[Process]:
    """Return the processes with a text in their command line."""
    return [one for one in found if word.encode() in b"\0".join(command_line(one.pid))]


class Harness:
    """Engine under test, with the jobs submitted to it."""

    def __init__(self, folder: Path, engine: RecordedEngine) -> None:
        self.folder, self.engine, self.state = folder, engine, state_dir()

    def submit(self, run: str, *, head: str = "", setup: str = "", **envs: str) -> Job:
        """Submit a job that runs a script. `head` has further keys of its task file."""
        text = f"{textwrap.dedent(head)}\nrun: |\n{textwrap.indent(textwrap.dedent(run), '  ')}\n"
        if setup:
            text += f"setup: |\n{textwrap.indent(textwrap.dedent(setup), '  ')}\n"
        file = parse_tasks(text, str(self.folder / "task.yaml"), Overrides(envs=envs))
        return self.engine.submit_file(file)[0]

    def submit_and_kill(self, point: str, submit: Callable[[], Job]) -> Job:
        """Submit a job, one of whose processes is killed at a failpoint, and return it after that."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOLDFAST_KILL_AT", point)
            patch.setenv("HOLDFAST_KILL_MARK", str(self.folder / "killed"))
            job = submit()
        self.wait_for(job, (self.folder / "killed").exists, "the kill")
        return job

    def run(self, run: str, *, ends: JobStatus = JobStatus.SUCCEEDED, **options: str) -> Job:
        """Submit a job that must end with success or another status, and return it at its end."""
        return self.wait(self.submit(run, **options), ends)

    def succeed(self, job: Job) -> Job:
        """Wait until a job has ended with success."""
        return self.wait(job, JobStatus.SUCCEEDED)

    def files(self, job: Job) -> JobFolder:
        """Return the folder of a job."""
        return job_folder(self.state, job.id)

    def let_go(self, job: Job, node: int = 0) -> None:
        """Create the file `go` in the workdir of a node, for which its commands wait."""
        (self.files(job).workdir(node) / "go").touch()

    def log(self, job: Job, node: int = 0) -> str:
        """Return the output of a node so far."""
        path = self.files(job).log(node)
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: Job, what: Callable[[], object], name: str) -> None:
        """Wait until `what()` returns something true."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline, f"waited in vain for {name}:\n{self.describe(job)}"
            time.sleep(0.05)

    def wait(self, job: Job, *statuses: JobStatus, attempt: int | None = None) -> Job:
        """Wait until the job has one of these statuses. Default: until it has ended."""
        found = [job]

        def stands() -> bool:
            found[0] = self.engine.job(job.id)
            status = found[0].status
            assert status in statuses or not statuses or not status.is_final, self.describe(job)
            is_there = status in statuses if statuses else status.is_final
            return is_there and attempt in (None, found[0].attempt)

        self.wait_for(job, stands, f"{[status.value for status in statuses] or 'the end'}")
        return found[0]

    def wait_running(self, job: Job, words: str) -> None:
        """Wait until the first node's log has some text, and the job is shown as running."""
        self.wait_for_output(job, words)
        self.wait(job, JobStatus.RUNNING)

    def cancel(self, job: Job) -> Job:
        """Cancel a job, and return it at its end."""
        self.engine.cancel(job.id)
        return self.wait(job, JobStatus.CANCELLED)

    def finish(self, job: Job) -> Job:
        """Let a job on one node go, and return it at its end."""
        self.let_go(job)
        return self.wait(job)

    def wait_for_output(self, job: Job, words: str, times: int = 1, node: int = 0) -> None:
        """Wait until a node's log has some text a number of times."""
        self.wait_for(job, lambda: self.log(job, node).count(words) >= times, repr(words))

    def describe(self, job: Job) -> str:
        """Return all details of a job, for a failure's message."""
        files = self.files(job)
        logs = [*files.logs.glob("*.log"), *files.path.glob("*.log"), files.changed]
        told = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs if path.exists())
        return f"{self.engine.job(job.id)}\n{told}"

    def of_job(self, job: Job) -> list[Process]:
        """Return the processes of the job's nodes, without agents."""
        return processes.tagged(tag(job.task_id), processes.snapshot())

    def roles(self, job: Job, role: str) -> list[Process]:
        """Return the processes of the job with a role: controllers with their guardians, or agents."""
        path = os.fsencode(self.files(job).path)
        found = []
        for process in processes.snapshot().values():
            words = command_line(process.pid)
            own = [word for word in words if word == path or word.startswith(path + b"/")]
            if own and role.encode() in words and not any(b"srun" in word for word in words[:2]):
                found.append(process)
        return found

    def named(self, job: Job, word: str) -> list[Process]:
        """Return the processes of the job's nodes with a text in their command line."""
        return with_word(self.of_job(job), word)


class JobHarness(Harness):
    """Engine of this machine under test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, LocalEngine())

    def record(self, job: Job) -> JobRecord:
        """Return the record of the job."""
        return Records(self.state).get(job.id)

    def end_without_command(self, job: Job) -> tuple[JobStatus, int]:
        """Return the status and attempt of a job at its end, to which no command has contributed."""
        self.wait_for(job, lambda: self.record(job).state.job_state.status.is_final, "the end")
        found = self.record(job).state.job_state
        return found.status, found.attempt

    def has_controller(self, job: Job) -> bool:
        """Return True if the job has exactly one controller, with its guardian."""
        return len(self.roles(job, "controller")) == 2

    def controller(self, job: Job) -> Process:
        """Return the job's controller, without its guardian."""
        self.wait_for(job, lambda: self.has_controller(job), "a controller")
        both = {one.pid: one for one in self.roles(job, "controller")}
        (found,) = [one for one in both.values() if one.parent in both]
        return found

    def kill_controller(self, job: Job) -> None:
        """Kill the job's controller and its guardian, and wait until they are gone."""
        found = self.roles(job, "controller")
        assert found, "nobody looks after the job"
        processes.kill(found)

    def kill_all(self, job: Job) -> None:
        """Kill all processes of a job, as a restart of the machine does."""
        processes.kill([*self.roles(job, "controller"), *self.roles(job, "agent")])
        processes.kill(self.of_job(job))

    def kill_node(self, job: Job, rank: int) -> None:
        """Kill the agent of a node and its process tree, as the loss of a machine does."""
        attempt = self.engine.job(job.id).attempt
        table = processes.snapshot()
        for agent in processes.of_role(AGENT, self.files(job).node(attempt, rank).path):
            processes.kill([agent, *processes.descendants(agent.pid, table)])

    def leave(self) -> None:
        """Kill what is left, and check that ended jobs left nothing."""
        left = []
        for job in self.engine.jobs():
            orphans = [one for one in self.of_job(job) if not one.exits_by_itself]
            if job.status.is_final:
                left += [(job.id, job.status, one) for one in orphans]
            self.kill_all(job)
        _bury()
        assert not left, f"processes of jobs that have ended: {left}"


def _bury() -> None:
    """Controllers that this process started are its children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


@contextlib.contextmanager
def started_harness(folder: Path, state: Path | None = None) -> Iterator[JobHarness]:
    """Set the environment of jobs for the block, and check at its end that no process is left.

    Args:
        folder: folder of the test.
        state: state folder of the jobs. Default: one in `folder`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOLDFAST_STATE", str(state or folder / "state"))
        patch.setenv("HOLDFAST_PREEMPTION", "none")
        patch.setenv("HOLDFAST_NODE_CHECKS", "off")  # they would take a part of the time of all tests
        # As in an active environment. The first Python on the PATH may be a shim, which takes long to start.
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # this machine may have fewer GPUs than a test asks for
        found = JobHarness(folder)
        yield found
        found.leave()
