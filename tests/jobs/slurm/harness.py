"""Slurm jobs under test: submit them, wait for them, preempt and kill them as a cluster does."""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.jobs.engine import Job
from holdfast.jobs.environment import tag
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.node import processes
from holdfast.jobs.node.processes import Process
from holdfast.jobs.slurm.engine import SlurmEngine
from holdfast.jobs.slurm.job_files import JobFiles
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import Overrides, parse_task
from jobs.harness import with_word

LIMIT_S = 600.0


def command(*words: str) -> str:
    """Return the output of a Slurm command."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout.strip()


class SlurmHarness:
    """Engine under test, with the jobs submitted to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = SlurmEngine()

    def submit(self, run: str, *, head: str = "", setup: str = "", **envs: str) -> Job:
        """Submit a job that runs a script. `head` has further keys of its task file."""
        text = f"{textwrap.dedent(head)}\nrun: |\n{textwrap.indent(textwrap.dedent(run), '  ')}\n"
        if setup:
            text += f"setup: |\n{textwrap.indent(textwrap.dedent(setup), '  ')}\n"
        return self.engine.submit(parse_task(text, str(self.folder / "task.yaml"), Overrides(envs=envs)))

    def files(self, job: Job) -> JobFiles:
        """Return the files of the job."""
        return JobFiles(job_folder(state_dir(), job.id))

    def slurm_id(self, job: Job) -> str:
        """Return Slurm's id of a job that has started."""
        return self.files(job).read_state().slurm_id

    def log(self, job: Job, node: int = 0) -> str:
        """Return the output of a node so far."""
        path = self.files(job).job.log(node)
        return path.read_text() if path.exists() else ""

    # -- waiting ---------------------------------------------------------------------------------------------

    def wait_for(self, job: Job, what: Callable[[], object], name: str) -> None:
        """Wait until `what()` returns something true."""
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline, f"waited in vain for {name}:\n{self.describe(job)}"
            time.sleep(0.1)

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

    def wait_for_output(self, job: Job, words: str, times: int = 1, node: int = 0) -> None:
        """Wait until a node's log has some text a number of times."""
        self.wait_for(job, lambda: self.log(job, node).count(words) >= times, repr(words))

    def describe(self, job: Job) -> str:
        """Return all details of a job, for a failure's message."""
        files = self.files(job)
        paths = [*files.job.logs.glob("*.log"), files.output, files.job.changed]
        told = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths if path.exists())
        queue = subprocess.run(["squeue", "--states=all"], capture_output=True, text=True, check=False).stdout
        return f"{self.engine.job(job.id)}\n{told}\n{queue}"

    # -- what a cluster does ---------------------------------------------------------------------------------

    def take_node(self, node: str = "n1") -> None:
        """Let a job of higher priority take a node for a short while."""
        words = ["sbatch", "--parsable", "--partition=prio", "--nodes=1", "--exclusive", f"--nodelist={node}"]
        words += [f"--output={self.folder}/important.out"]
        subprocess.run(words, input="#!/bin/bash\nsleep 1\n", text=True, check=True, capture_output=True)

    def roles(self, job: Job, role: str) -> list[Process]:
        """Return the job's controller, runners or wardens."""
        path = str(self.files(job).job.path).encode()
        found = []
        for process in processes.snapshot().values():
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            own = [word for word in words if word == path or word.startswith(path + b"/")]
            if own and role.encode() in words and not any(b"srun" in word for word in words[:2]):
                found.append(process)
        return found

    def runner(self, job: Job, node: int) -> Process:
        """Return the runner of a node."""
        (found,) = [
            one for one in self.roles(job, "runner") if environment(one.pid).get("SLURM_NODEID") == str(node)
        ]
        return found

    def of_job(self, job: Job) -> list[Process]:
        """Return the processes of the job's commands."""
        return processes.tagged(tag(job.task_id), processes.snapshot())

    def named(self, job: Job, word: str) -> list[Process]:
        """Return the processes of the job's commands with a text in their command line."""
        return with_word(self.of_job(job), word)

    def leave(self) -> None:
        """Kill what is left, and check that ended jobs left nothing."""
        left = []
        for job in self.engine.jobs():
            if job.status.is_final:
                left += [(job.id, one) for one in self.of_job(job) if not one.exits_by_itself]
            elif number := self.engine._record(job.id).engine_job_id:
                subprocess.run(["scancel", "--full", "--signal=KILL", number], check=False)
                subprocess.run(["scancel", number], check=False)
            processes.kill(self.of_job(job))
        assert not left, f"processes of jobs that have ended: {left}"


def environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)
