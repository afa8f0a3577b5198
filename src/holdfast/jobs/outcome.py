"""How the part of an attempt that ran on one node ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from holdfast.errors import PREEMPTED_STATUS


class Phase(str, Enum):
    """What a node was at."""

    SETUP = "setup"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a node ended: its shell exited, its shell was killed, or the node was lost with all on it.

    Neither `code` nor `killed_by` means lost.
    """

    phase: Phase
    code: int | None = None  # exit status of the shell
    killed_by: int | None = None  # signal that the shell died of
    is_stopped: bool = False  # we ended it, because another node had ended or the job was to stop

    @property
    def is_lost(self) -> bool:
        """True if nobody is left to tell how it ended."""
        return self.code is None and self.killed_by is None

    @property
    def is_success(self) -> bool:
        """True if it has done its work."""
        return self.code == 0

    @property
    def is_preempted(self) -> bool:
        """True if it says so itself, or was killed from outside."""
        return self.code == PREEMPTED_STATUS or self.killed_by is not None

    def say(self) -> str:
        """In words, after the name of the node."""
        if self.is_lost:
            return "was lost"
        if self.killed_by is not None:
            return f"was killed by {_name(self.killed_by)} in {self.phase.value}"
        if self.code == PREEMPTED_STATUS:
            return f"was preempted (status {self.code})"
        if self.is_success:
            return "finished"
        return f"failed in {self.phase.value} with status {self.code}{_hint(self.code or 0)}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _hint(code: int) -> str:
    """What a shell means by a status above 128."""
    if code == 128 + signal.SIGKILL:
        return " (killed by SIGKILL: usually it ran out of memory)"
    return f" ({_name(code - 128)})" if 128 < code < 128 + 65 else ""
