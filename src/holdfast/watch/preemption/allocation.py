"""Ends that come at a given time: the time limit of a Slurm job, and a deadline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from abc import abstractmethod

from typing_extensions import override

from holdfast.system.linux.program_runs import run_program
from holdfast.system.units import format_duration
from holdfast.watch.preemption.notice import Cloud, Notice, Unreachable

_LEAST_LEAD_S, _MARGIN_S = 60.0, 30.0
"""Shortest time from the notice to the end, and what is added to twice the time of a step and a save."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 300.0
_SQUEUE_S = 60.0
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)


class _End(Cloud):
    """An end that comes closer. Its notice leaves time for twice a step and a durable save.

    At the end of a short time the notice comes not before half of the time that was left at first.
    """

    pause_s = _LEAST_PAUSE_S
    detail: str

    def __init__(self) -> None:
        self._most_lead_s: float | None = None

    @override
    def poll(self) -> Notice | None:
        left_s = self._left_s()
        if left_s is None:
            self.pause_s = _MOST_PAUSE_S
            return None
        if self._most_lead_s is None:
            self._most_lead_s = left_s / 2
        lead_s = min(max(_LEAST_LEAD_S, 2 * self.save_s + _MARGIN_S), self._most_lead_s)
        if left_s <= lead_s:
            detail = f"{self.detail} in {format_duration(max(left_s, 0.0))}"
            return Notice(self.name, detail, time.time() + left_s)
        # Half of the way: the end may move closer, and a save may take longer than before.
        self.pause_s = min(max((left_s - lead_s) / 2, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        return None

    @abstractmethod
    def _left_s(self) -> float | None:
        """Return the time left, or None without a limit."""


class Deadline(_End):
    """Deadline that the user gives, as a time from the start of the training."""

    name = "deadline"
    detail = "time is over"

    def __init__(self, after_s: float) -> None:
        super().__init__()
        self._end_s = time.monotonic() + after_s

    @override
    def _left_s(self) -> float:
        return self._end_s - time.monotonic()


class Slurm(_End):
    """Time limit of this Slurm job, read from `squeue`: a changed one is followed.

    While Slurm does not answer, or where a container lacks squeue, the last answer counts, else
    SLURM_JOB_END_TIME.
    """

    name = "slurm"
    detail = "time limit"

    def __init__(self) -> None:
        super().__init__()
        self._end_s: float | None = None
        self._is_unlimited = False

    @override
    def _left_s(self) -> float | None:
        text = _squeue_left(os.environ["SLURM_JOB_ID"])
        found = _LEFT.fullmatch(text)
        if found is not None:
            days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
            self._end_s = time.monotonic() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
            self._is_unlimited = False
        elif text == "UNLIMITED":
            self._is_unlimited = True
        elif self._end_s is None and not self._is_unlimited:
            end = os.environ.get("SLURM_JOB_END_TIME", "")
            if not end.isdecimal():
                raise Unreachable(f"squeue gives no time left for job {os.environ['SLURM_JOB_ID']}: {text!r}")
            self._end_s = time.monotonic() + int(end) - time.time()
        return None if self._is_unlimited or self._end_s is None else self._end_s - time.monotonic()


def is_in_slurm_job() -> bool:
    """Return True in a job of Slurm whose end can be found."""
    environment = os.environ
    return "SLURM_JOB_ID" in environment and (
        shutil.which("squeue") is not None or "SLURM_JOB_END_TIME" in environment
    )


def _squeue_left(job_id: str) -> str:
    """Return the time left of a job as squeue prints it, or an empty string."""
    words = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"]
    try:
        done = run_program(words, timeout_s=_SQUEUE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.text if done.status == 0 else ""
