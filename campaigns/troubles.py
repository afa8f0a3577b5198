"""Troubles of one job, one after another: `make troubles`.

A small GPT trains on four nodes of `holdfast launch`. A rank is killed, one hangs, a node is lost, the disk
is full, the machine is preempted, some samples are poisoned, the weights of one rank drift, and one rank is
slow. The job must end with the loss of a job without troubles that leaves out the same samples, bit for bit,
and the report page of its run must list each trouble. As root, the home is on a small disk that really fills
up; without root that trouble is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.replaying.troubles import Troubles, wait
from campaigns import counts
from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.home.rollbacks import read_rollbacks
from holdfast.checkpoint.store import open_store
from holdfast.jobs.engine import Job
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import parse_tasks

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "campaigns" / "troubled_training.py"
NUM_NODES = 4
APART = (
    50  # steps from trouble to trouble; a spike is seen after 32, and a healthy checkpoint is saved by then
)
LAST = 150  # steps after the last trouble: a slow rank is named after some windows of many steps
DISK = "48m"
LEFT_BYTES = 256 * 1024  # what the full disk still has, which is enough for documents and not for data
TASK = """\
num_nodes: {num_nodes}
resources: {{job_recovery: {{max_restarts_on_errors: 3}}}}
run: exec {python} {script} {folder} {home} {steps} {options}
"""


class Run:
    """A job in a folder of its own.

    Args:
        options: of the training script.
    """

    def __init__(self, folder: Path, home: Path, steps: int, options: str = "") -> None:
        self.folder, self.home = folder, home
        folder.mkdir(parents=True)
        text = TASK.format(
            num_nodes=NUM_NODES,
            python=sys.executable,
            script=SCRIPT,
            folder=folder,
            home=home,
            steps=steps,
            options=options,
        )
        self.engine = LocalEngine()
        self.number = self.engine.submit_file(parse_tasks(text, "troubles.yaml"))[0].id
        self.troubles = Troubles(self.engine, self.engine.job(self.number), script=SCRIPT.name, folder=folder)

    def losses(self) -> dict[int, str]:
        """Return the loss of each completed step; of several attempts, that of the last."""
        found: dict[int, str] = {}
        paths = self.folder.glob("steps-*")
        for path in sorted(paths, key=lambda one: int(one.name.rpartition("-")[2])):
            text = path.read_text()
            found |= {
                int(step): loss for step, loss in map(str.split, text[: text.rfind("\n") + 1].splitlines())
            }
        return found

    def wait_for_step(self, step: int) -> None:
        """Wait until the newest attempt has completed a step that is at least this one."""

        def is_there() -> bool:
            job = self.engine.job(self.number)
            if job.status.is_final and job.status is not JobStatus.SUCCEEDED:
                raise RuntimeError(_end(job))
            path = self.folder / f"steps-{job.attempt}"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            return bool(lines) and int(lines[-1].split()[0]) >= step

        wait(is_there, f"step {step}")

    def wait_for_event(self, event: str, name: str) -> None:
        """Wait until the run's history has an event of this kind.

        Raises:
            RuntimeError: the job ended without one.
        """

        def is_there() -> bool:
            job = self.engine.job(self.number)  # before the history: its last events are then in it
            if self.events(event):
                return True
            if job.status.is_final:
                raise RuntimeError(f"{_end(job)}; waited for {name}")
            return False

        wait(is_there, name)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events of these kinds in the run's history."""
        return [line for line in read_lines(open_store(self.home))[0] if line["event"] in names]

    def finish(self) -> str:
        """Wait for the job's success, and return the loss of its last step.

        Raises:
            RuntimeError: it has not succeeded.
        """
        wait(lambda: self.engine.job(self.number).status.is_final, "the job's end")
        job = self.engine.job(self.number)
        if job.status is not JobStatus.SUCCEEDED:
            raise RuntimeError(_end(job))
        losses = self.losses()
        return losses[max(losses)]

    def close(self) -> None:
        """Cancel the job if it has not ended."""
        if not self.engine.job(self.number).status.is_final:
            self.engine.cancel(self.number)
            wait(lambda: self.engine.job(self.number).status.is_final, "the job's end")


def _end(job: Job) -> str:
    return f"the job ended: {job.status.value}, {job.reason}"


@dataclass(frozen=True, slots=True)
class Ordeal:
    """One trouble of the script."""

    name: str
    cause: Callable[[Run], None]
    evidence: Callable[[Run], str]
    """Words that the report page must have afterwards; empty if the run has no evidence."""
    needs_disk: bool = False


def fill_disk(run: Run) -> None:
    """Fill the disk of the home until a save has failed."""
    before = len(run.events("failed"))
    filler = run.home.parent / "filler"
    status = os.statvfs(run.home.parent)
    try:
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - LEFT_BYTES))
        wait(lambda: len(run.events("failed")) > before, "a failed save")
    finally:
        filler.unlink()


def drift(run: Run) -> None:
    """Flip a bit of one rank's weights, wait until the rank is named, and have the job start again."""
    (run.folder / "flip").touch()
    run.wait_for_event("replicas-differ", "the name of the rank that drifts")
    run.troubles.kill_rank(0)


def slow_down(run: Run) -> None:
    """Slow one rank down until it is named."""
    order = run.folder / "slow"
    order.touch()
    run.wait_for_event("slow-rank", "the name of the slow rank")
    order.unlink()


def wait_for_rollback(run: Run) -> None:
    """Wait until training has gone back behind the poisoned samples."""
    run.wait_for_event("rollback", "a rollback")


def _of(event: str, words: str) -> Callable[[Run], str]:
    return lambda run: words if run.events(event) else ""


def _interruptions(run: Run) -> str:
    attempts = [line["attempt"] for line in read_lines(open_store(run.home))[0]]
    return f"{max(attempts) - 1} interruptions"  # of the run: a rollback is one too


ORDEALS = (
    Ordeal("a killed rank", lambda run: run.troubles.kill_rank(2), _interruptions),
    Ordeal("a hang", lambda run: run.troubles.stop_rank(1), _of("hang", "(rank 1 stopped in")),
    Ordeal("a lost node", lambda run: run.troubles.lose_node(3), _interruptions),
    Ordeal("a full disk", fill_disk, _of("failed", "No space left"), needs_disk=True),
    Ordeal("a preemption", lambda run: run.troubles.send_notice(0), _of("ended", "preempted (")),
    Ordeal("poisoned samples", wait_for_rollback, _of("rollback", "Rollbacks")),
    Ordeal("a replica that drifts", drift, _of("replicas-differ", "rank 2")),
    Ordeal("a slow rank", slow_down, _of("slow-rank", "rank 3")),
)
POISONED = next(number for number, one in enumerate(ORDEALS, 1) if one.cause is wait_for_rollback)


def main() -> int:
    """Run the command; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.troubles", description=__doc__)
    parser.add_argument("--page", type=Path, help="keep the report page here")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-troubles-"))
    os.environ |= {"HOLDFAST_PREEMPTION": "none", "HOLDFAST_STATE": str(folder / "state")}
    began_s = time.monotonic()
    try:
        with _disk(folder) as disk:
            ordeals = [one for one in ORDEALS if not one.needs_disk or disk != folder]
            found = _compare(folder, disk, ordeals, options.page)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(ordeals) == len(ORDEALS):
        counts.write("troubles", found, seconds=time.monotonic() - began_s)
    return int(any(one.failures for one in found))


def _compare(folder: Path, disk: Path, ordeals: list[Ordeal], page: Path | None) -> list[counts.Count]:
    """Run the job with troubles and the one without, and return what failed."""
    steps = APART * (len(ordeals) + 1) + LAST
    poison = APART * (POISONED - len(ORDEALS) + len(ordeals)) + 10
    run = Run(folder / "troubled", disk / "home", steps, f"--poison {poison}")
    try:
        for number, ordeal in enumerate(ordeals, 1):
            run.wait_for_step(APART * number + 3 * number)  # not at the same distance from a save
            print(f"step {max(run.losses())}: {ordeal.name}", flush=True)
            ordeal.cause(run)
        loss = run.finish()
        text = _report(run, page or folder / "page.html")
        missing = [one.name for one in ordeals if not (words := one.evidence(run)) or words not in text]
    finally:
        run.close()
    skipped = " ".join(f"--skip {start} {stop}" for start, stop in _skipped(run))
    clean = Run(folder / "clean", folder / "clean-home", steps, f"--poison {poison} {skipped}")
    try:
        expected = clean.finish()
    finally:
        clean.close()
    print(f"loss {loss}, without troubles {expected}; not on the report page: {missing or 'nothing'}")
    names = ", ".join(one.name for one in ordeals)
    return [
        counts.Count("troubles of one job", len(ordeals), len(missing), names),
        counts.Count("final loss, compared with a job without troubles", 1, int(loss != expected), loss),
    ]


def _skipped(run: Run) -> list[tuple[int, int]]:
    """Return the samples that the run has left out."""
    found = read_rollbacks([open_store(run.home)], None).found
    return [one.skipped["data"] for one in found]


def _report(run: Run, page: Path) -> str:
    """Write the report page of the run, and return it."""
    words = [sys.executable, "-m", "holdfast.cli", "report", str(run.home), "--output", str(page)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return page.read_text()


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[Path]:
    """Mount a small disk for the block, and yield its path; without root, yield `folder`."""
    disk = folder / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk)]
    if os.getuid() != 0 or subprocess.call(words):
        print("a full disk is left out: mounting a small one needs root", flush=True)
        yield folder
        return
    try:
        yield disk
    finally:
        subprocess.check_call(["umount", "-l", str(disk)])


if __name__ == "__main__":
    sys.exit(main())
