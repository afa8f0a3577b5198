"""Jobs under test: submit them, wait until they stand somewhere, kill what is theirs, see what is left."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.jobs.engine import Job
from holdfast.jobs.environment import mark
from holdfast.jobs.following import Watch
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.node import processes
from holdfast.jobs.node.folder import JobFolder, job_folder
from holdfast.jobs.node.processes import Process
from holdfast.jobs.place import database, state_dir
from holdfast.jobs.records import Record, Records
from holdfast.jobs.status import Status
from holdfast.jobs.task.reading import Overrides, parse_task

LIMIT_S = 120.0


class Desk:
    """An engine, and the jobs that were submitted to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = state_dir()
        self.engine = LocalEngine()

    def submit(self, run: str, *, head: str = "", setup: str = "", **envs: str) -> Job:
        """A job that runs a script; `head` holds further keys of its task file."""
        text = f"{textwrap.dedent(head)}\nrun: |\n{textwrap.indent(textwrap.dedent(run), '  ')}\n"
        if setup:
            text += f"setup: |\n{textwrap.indent(textwrap.dedent(setup), '  ')}\n"
        return self.engine.submit(parse_task(text, str(self.folder / "task.yaml"), Overrides(envs=envs)))

    def files(self, job: Job) -> JobFolder:
        """Where the job's files are."""
        return job_folder(self.state, job.id)

    def log(self, job: Job, node: int = 0) -> str:
        """What a node has said so far."""
        path = self.files(job).log(node)
        return path.read_text() if path.exists() else ""

    # -- waiting ---------------------------------------------------------------------------------------------

    def wait_for(self, job: Job, what: Callable[[], object], name: str) -> None:
        """Wait until `what()` is true; woken by what happens in the job's folders."""
        files = self.files(job)
        watch = Watch(self.folder, files.path, files.logs)
        deadline = time.monotonic() + LIMIT_S
        try:
            while not what():
                assert time.monotonic() < deadline, f"waited in vain for {name}:\n{self.tell(job)}"
                watch.wait(0.2)
        finally:
            watch.close()

    def wait(self, job: Job, *statuses: Status) -> Job:
        """Wait until the job stands at one of these; by default until it has ended."""
        found = [job]

        def stands() -> bool:
            found[0] = self.engine.job(job.id)
            status = found[0].status
            assert status in statuses or not statuses or not status.is_final, self.tell(job)
            return status in statuses if statuses else status.is_final

        self.wait_for(job, stands, f"{[status.value for status in statuses] or 'the end'}")
        return found[0]

    def wait_until_said(self, job: Job, words: str, times: int = 1, node: int = 0) -> None:
        """Wait until a node's log has these words so often."""
        self.wait_for(job, lambda: self.log(job, node).count(words) >= times, repr(words))

    def tell(self, job: Job) -> str:
        """All that is known, for a failure's message."""
        files = self.files(job)
        logs = [*files.logs.glob("*"), files.controller_log, files.changed]
        told = "\n".join(f"--- {path.name}\n{path.read_text()}" for path in logs if path.exists())
        return f"{self.engine.job(job.id)}\n{told}"

    # -- processes -------------------------------------------------------------------------------------------

    def of_job(self, job: Job) -> list[Process]:
        """The processes of the job's nodes, wardens not among them."""
        return processes.marked(mark(job.task_id), processes.living())

    def roles(self, job: Job, role: str) -> list[Process]:
        """Controllers or wardens of the job."""
        path = str(self.files(job).path).encode()
        found = []
        for process in processes.living().values():
            try:
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            own = [word for word in words if word == path or word.startswith(path + b"/")]
            if own and role.encode() in words:
                found.append(process)
        return found

    def named(self, job: Job, word: str) -> list[Process]:
        """The processes of the job's nodes whose command line holds a word."""
        found = []
        for process in self.of_job(job):
            with contextlib.suppress(OSError):
                if word.encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    found.append(process)
        return found

    def record(self, job: Job) -> Record:
        """All that is written down about the job."""
        with Records(database(self.state)) as records:
            return records.get(job.id)

    def kill_controller(self, job: Job) -> None:
        """SIGKILL whoever looks after the job, and see it gone."""
        found = self.roles(job, "controller")
        assert found, "nobody looks after the job"
        processes.end(found)

    def kill_node(self, job: Job, rank: int) -> None:
        """SIGKILL the warden of a node and its whole tree, as a machine that is gone."""
        attempt = self.engine.job(job.id).attempt
        pid = int(self.files(job).node(attempt, rank).pid.read_text().split()[0])
        table = processes.living()
        processes.end([process for process in [table.get(pid), *processes.below(pid, table)] if process])

    def leave(self) -> None:
        """End whatever is left, and see that nothing of a job that had ended was."""
        left = []
        for job in self.engine.jobs():
            strays = [one for one in self.of_job(job) if not one.ends_by_itself]
            if job.status.is_final:
                left += [(job.id, job.status, one) for one in strays]
            processes.end(self.roles(job, "controller"))
            processes.end(self.roles(job, "warden"))
            processes.end(self.of_job(job))
        _bury()
        assert not left, f"processes of jobs that have ended: {left}"


def _bury() -> None:
    """Controllers that this process started are its children."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
