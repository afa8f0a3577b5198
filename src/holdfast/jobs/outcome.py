"""Outcome of one node in an attempt, and the cause of a failed one, beside that of the one before; pure."""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Mapping, Sequence
from enum import Enum

from msgspec import Struct

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS, redact

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


MAX_SAME = 3  # attempts in a row with the same cause, without a newer checkpoint, before the job fails
SAME_FAILURES = "HOLDFAST_SAME_FAILURES"  # variable that replaces `MAX_SAME`: a number, or `any` for no limit
NO_LIMIT = "any"
_NUM_LINES = 20  # lines at the end of an attempt's output that are compared
_MAX_SHOWN = 200
_MAX_SAME_DIGITS = 6

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_PROGRESS = re.compile(r"\d%\||\dit/s|\ds/it")
_PREFIX = re.compile(r"^(\[\w+\]:?\s|\(\w+[^)]{0,60}pid=\d+[^)]{0,60}\)\s)+")
_VARYING = (
    (re.compile(r"(?:~|\.{0,2})(?:/[^\s/:\"'(),;\[\]]+)*/([^\s/:\"'(),;\[\]]+)"), r"PATH/\1"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b|\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?\b"), "TIME"),
    (
        re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b"),
        "TIME",
    ),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "ID"),
    (re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE), "ADDRESS"),
    (re.compile(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b", re.IGNORECASE), "ID"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), "HOST"),
    (re.compile(r"\b(pid|process|thread|port)([\s:=-]{1,3})\d+", re.IGNORECASE), r"\1\2N"),
    (re.compile(r"\btmp[._-]?\w{6,}"), "TMP"),
)
"""Text that differs between two attempts with the same error, even at the same step."""
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ERROR = re.compile(
    r"^[\w.]*(?:Error|Exception|Interrupt|Exit|Fault)\b|^holdfast\.errors\.\w+|^(?:error|fatal)\b",
    re.IGNORECASE,
)


class FailureCause(Struct, frozen=True):
    """Cause of a failed attempt."""

    what: str  # line that names the error, or else the last one, for people
    key: str  # equal for errors that differ only in numbers, addresses, times and paths
    exact: str  # equal for errors whose numbers are equal too

    @property
    def error(self) -> str:
        """The line that names the error, or "" if it does not."""
        return self.what if _ERROR.search(self.what) else ""


def find_cause(outcomes: Mapping[int, Outcome], lines: Sequence[str]) -> FailureCause | None:
    """Return the cause of a failed attempt from the output of its first failed node; None without one."""
    own = [outcome for _, outcome in sorted(own_ends(outcomes).items())]
    bare = [_PREFIX.sub("", _ESCAPES.sub("", line).rstrip()) for line in lines]  # without the name of a rank
    texts = [text for text in bare if text and not _PROGRESS.search(text)]
    if not own or not texts:
        return None
    named = [text for text in texts[-_NUM_LINES:] if _ERROR.search(text)]
    ends = [f"{one.phase.value} {one.code} {one.killed_by}" for one in own]
    compared = texts[-_NUM_LINES:]
    for pattern, word in _VARYING:
        compared = [pattern.sub(word, text) for text in compared]
    return FailureCause(
        what=redact((named or texts)[-1].strip())[:_MAX_SHOWN],
        key=_digest(ends, [_NUMBER.sub("#", text) for text in compared]),
        exact=_digest(ends, compared),
    )


def is_same(before: FailureCause | None, now: FailureCause | None, *, at_same_step: bool) -> bool:
    """Return True if two attempts failed with the same cause."""
    if before is None or now is None or before.key != now.key:
        return False
    # Training that made a checkpoint in between may print its step: then numbers must be equal too.
    return at_same_step or before.exact == now.exact


def max_same(environment: Mapping[str, str]) -> int:
    """Return the limit of attempts with the same cause from the variables of a job. 0: no limit."""
    wanted = environment.get(SAME_FAILURES, "").strip().lower()
    if wanted == NO_LIMIT:
        return 0
    is_number = wanted.isascii() and wanted.isdecimal() and len(wanted) <= _MAX_SAME_DIGITS
    return int(wanted) if is_number and int(wanted) > 0 else MAX_SAME


def _digest(ends: Sequence[str], texts: Sequence[str]) -> str:
    # A set, as ranks print the same error in any order and number.
    return hashlib.sha256("\n".join([*ends, *sorted(set(texts))]).encode()).hexdigest()[:32]
