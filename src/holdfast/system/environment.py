"""Environment variables and files between a training process and the job that started it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from holdfast.errors import Corrupt, InvalidInput, Unsupported
from holdfast.system.documents import MAX_TEXT_CHARS, Count, decode_as, to_plain

PREEMPTION = "HOLDFAST_PREEMPTION"  # sources of preemption notices, see `holdfast.watch.preemption.sources`
KEEP_IN_MEMORY = "HOLDFAST_KEEP_IN_MEMORY"
"""Time for which a keeper offers the last save from memory after the death of its trainer."""
PROGRESS = "HOLDFAST_PROGRESS"
"""File that rank 0 appends a line to for each durable save and restore, and each rank at a preemption."""
TRIAL = "HOLDFAST_TRIAL"
"""File with the plan of a trial, see `watch/trial.py`; set by `holdfast check` and `replay`."""
WATCH = "HOLDFAST_WATCH"
"""Classes of watches that each Checkpointer has besides its own, as "module:Class,module:Class"."""
NOTIFY = "HOLDFAST_NOTIFY"
"""Commands and webhooks that are notified of all jobs launched with it, one per line. May contain secrets."""
NOTIFY_ON = "HOLDFAST_NOTIFY_ON"  # statuses of which they are notified, separated by commas
SANDBOX = "HOLDFAST_SANDBOX"
"""Folder that replaces every home and local folder during a dry run of a script; else unset."""

_MAX_DIGITS = 18
MAX_PLACE = 200  # characters of the place at which a training hangs, and of the reason why one has diverged


def require_linux(feature: str) -> None:
    """Raise `Unsupported` for a feature that needs Linux, on another operating system."""
    if sys.platform == "win32":
        raise Unsupported("Holdfast does not run on Windows. Use it on Linux, for example in WSL 2.")
    if sys.platform != "linux":
        raise Unsupported(
            f"{feature} needs Linux (memfd_create, pidfd_open, /proc), not {sys.platform}. Checkpoints can "
            "be read here: holdfast.open(), and holdfast ls, show, verify, diff, export, history, report."
        )


def read_integer(name: str, default: int, *, minimum: int = 0) -> int:
    """Return the integer of an environment variable of a launcher; `default` if it is unset or empty."""
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    is_integer = value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS
    if not is_integer or int(value) < minimum:
        raise InvalidInput(
            f"The environment variable {name} is {value[:100]!r}, expected an integer of at least {minimum}. "
            "Launchers such as torchrun and Slurm set it. Unset it, or set it to a number."
        )
    return int(value)


def is_dry_run() -> bool:
    """Return True in a process whose homes are in a sandbox."""
    return bool(os.environ.get(SANDBOX))


def sandboxed(place: str) -> str:
    """Return `place`, or in a dry run an empty folder of the sandbox.

    So a dry run neither reads the checkpoints of a real run nor claims an attempt of it.
    """
    folder = os.environ.get(SANDBOX)
    if not folder or place.startswith(folder):
        return place
    return str(place_in_sandbox(Path(folder), place))


def place_in_sandbox(folder: Path, place: str) -> Path:
    """Return the folder that replaces a home or local folder, an absolute path or URL, in a dry run."""
    return folder / hashlib.sha256(place.encode()).hexdigest()[:16]


def sandbox_environment(folder: Path) -> dict[str, str]:
    """Return this environment for a dry run of a script, whose homes are below `folder`."""
    env = {name: value for name, value in os.environ.items() if name != PROGRESS}
    return env | {PREEMPTION: "none", KEEP_IN_MEMORY: "0", SANDBOX: str(folder), "PYTHONUNBUFFERED": "1"}


_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Place = Annotated[str, Meta(max_length=MAX_PLACE)]


class JobReport(Struct, frozen=True, omit_defaults=True):
    """Line of the file of progress. Each report has the members of one line of this class."""

    home: _Text | None = None
    step: Count | None = None  # of a checkpoint in `home` that is durable, or was restored
    attempt: Count | None = None
    failed_save: Count | None = None  # step of a save of `attempt` that failed
    # Step at which this process exits after a preemption notice. A launcher between the job and the training
    # may replace the exit status: torchrun exits with 1.
    preempted: Count | None = None
    hung: Count | None = None  # step at which a training hangs and is ended
    place: _Place | None = None  # of that hang
    diverged: Count | None = None  # step at which a training ends after too many rollbacks
    reason: _Place | None = None  # of that end


def report_to_job(report: JobReport) -> None:
    """Report to the job that this process is part of, if any. Failures are ignored."""
    path = os.environ.get(PROGRESS)
    if not path:
        return
    line = json.dumps(to_plain(report)) + "\n"
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


class ReportedProgress(Struct):
    """Reports of the trainings of a job, from a position of their file on."""

    steps: dict[str, int] = {}  # greatest step of each home
    failed_saves: set[tuple[int, int]] = set()
    """Attempts and steps of the saves that failed, on any rank."""
    was_preempted: bool = False
    is_preempted: bool = False  # a preemption is the newest report: the training was not started again
    hang: str | None = None  # place of the first hang
    divergence: str | None = None  # reason of the first training that ended after too many rollbacks

    @property
    def newest_step(self) -> int | None:
        """Greatest step of all homes; None without one."""
        return max(self.steps.values(), default=None)

    def add(self, report: JobReport) -> None:
        """Add a report. One of another kind changes nothing."""
        self.is_preempted = report.preempted is not None
        self.was_preempted |= self.is_preempted
        if report.home is not None and report.step is not None:
            self.steps[report.home] = max(self.steps.get(report.home, 0), report.step)
        if report.attempt is not None and report.failed_save is not None:
            self.failed_saves.add((report.attempt, report.failed_save))
        self.hang = self.hang or report.place
        self.divergence = self.divergence or report.reason


def read_progress(path: Path, *, after: int = 0) -> ReportedProgress:
    """Return the reports in a file of progress, from a position on; none if it cannot be read."""
    found = ReportedProgress()
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(after)
        for line in file.read().splitlines():
            with contextlib.suppress(Corrupt):  # a line of another kind, or one that a kill has torn
                found.add(decode_as(JobReport, line, "a line of progress", any_text=True))
    return found
