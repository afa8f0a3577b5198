"""Outcome of one node in an attempt."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from enum import Enum

from msgspec import Struct

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS

_MAX_CHARS = 400
_NOTICED = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""Exit codes of a shell whose command has died of a notice, as before its Checkpointer was made."""


class Phase(str, Enum):
    """Phase of a node."""

    SETUP = "setup"
    RUN = "run"


class Outcome(Struct, frozen=True):
    """Outcome of a node: its shell exited, its shell was killed, or the node was lost."""

    phase: Phase
    code: int | None = None  # exit code of the shell. A lost node has neither this nor `killed_by`.
    killed_by: int | None = None  # signal that killed the shell
    hung: str = ""  # place at which the training hung before it was ended
    diverged: str = ""  # why the training has ended after too many rollbacks
    unfit: str = ""  # failed checks of the node, because of which its commands were not started
    unstarted: str = ""  # why its commands could not be started, such as a mount that failed
    is_stopped: bool = False  # killed by the controller, after another node's exit or a cancellation

    @property
    def is_lost(self) -> bool:
        """True if the node was lost, so that its exit code is unknown."""
        return self.code is None and self.killed_by is None

    @property
    def is_success(self) -> bool:
        """True if the node has completed its work."""
        return self.code == 0

    @property
    def is_failed_command(self) -> bool:
        """True if the commands of the node have failed."""
        return not (self.is_success or self.is_lost or self.is_preempted or self.is_hung or self.unfit)

    @property
    def is_own_error(self) -> bool:
        """True if the commands of the node have failed by themselves."""
        return self.is_failed_command and not self.is_stopped

    @property
    def is_preempted(self) -> bool:
        """True if the node exited with a preemption's status, or was killed from outside."""
        return self.code in (PREEMPTED_STATUS, *_NOTICED) or self.killed_by is not None

    @property
    def is_hung(self) -> bool:
        """True if the training of the node hung, and was ended for a restart."""
        return self.code == HUNG_STATUS

    def describe(self) -> str:
        """Return a description that follows the name of the node."""
        if self.is_lost:
            return "was lost"
        if self.unfit:
            return f"is not fit for the job: {self.unfit}"
        if self.unstarted:
            return f"could not start: {self.unstarted}"
        if self.hung:
            return f"hung ({self.hung})"
        if self.diverged:
            return f"diverged: {self.diverged}"
        if self.killed_by is not None:
            return f"was killed by {_name(self.killed_by)} in {self.phase.value}"
        if self.code == PREEMPTED_STATUS:
            return f"was preempted (status {self.code})"
        if self.code in _NOTICED:
            return f"was ended by {_name(self.code - 128)} in {self.phase.value} (status {self.code})"
        if self.is_success:
            return "finished"
        return f"failed in {self.phase.value} with status {self.code}{_hint(self.code or 0)}"


def unstarted(why: str) -> Outcome:
    """Return the outcome of a node whose commands could not be started."""
    line = why.partition("\n")[0]
    return Outcome(Phase.SETUP, code=1, unstarted=line[:_MAX_CHARS])


def own_ends(outcomes: Mapping[int, Outcome]) -> dict[int, Outcome]:
    """Return the outcomes of nodes that failed by themselves, the first to end first."""
    return {node: one for node, one in outcomes.items() if not one.is_success and not one.is_stopped}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _hint(code: int) -> str:
    if code == 128 + signal.SIGKILL:
        return " (killed by SIGKILL: usually out of memory)"
    return f" ({_name(code - 128)})" if 128 < code < 128 + 65 else ""
