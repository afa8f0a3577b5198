"""The error tree, grouped by what the reader can do about it.

HoldfastError
├── RetryLater      the same call may succeed later: the store is busy or unreachable
│   └── TimedOut    a wait reached its time limit (also a TimeoutError)
├── Denied          the store refuses: change permissions, credentials, settings or a quota first
├── NotFound        the file, checkpoint or job does not exist (also a FileNotFoundError)
│   └── MissingKey  the checkpoint holds no entry of that name (also a KeyError)
├── Corrupt         the bytes differ from those that were written
├── Conflict        another owner has the name, or a newer attempt has taken over
├── InvalidInput    the arguments or the state cannot be used as given (also a ValueError)
├── Unsupported     this version, platform or store does not support the request
├── Diverged        the loss is in a spike again after as many rollbacks as allowed: change the training
└── Internal        a bug of Holdfast; please report it

Every class can be pickled, so errors cross process borders with their attributes.
`Preempted` is a SystemExit and no HoldfastError, since a preempted run has not failed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PREEMPTED_STATUS = 75
"""Exit status of a run that was preempted after a durable save (EX_TEMPFAIL: start it again)."""
HUNG_STATUS = 63
"""Exit status of a run that hung and was ended, with `Hang("restart")`: start it again."""


class HoldfastError(Exception):
    """Base class of all errors of this package.

    Args:
        message: what failed and where, what was expected and found, what was done, and what to do.
        step: step of the checkpoint concerned, if any.
        rank: rank concerned, if any.
        key: name of the tensor, value or object concerned, if any.
    """

    kind = "holdfast"

    def __init__(
        self, message: str, *, step: int | None = None, rank: int | None = None, key: str | None = None
    ) -> None:
        super().__init__(printable(redact(message)))
        self.step = step
        self.rank = rank
        self.key = key

    def __str__(self) -> str:  # a KeyError and an OSError would show theirs in another way
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        facts = {"step": self.step, "rank": self.rank, "key": self.key}
        return (_rebuilt, (type(self), str(self), facts))


def _rebuilt(cls: type[HoldfastError], message: str, facts: dict[str, object]) -> HoldfastError:
    error = cls(message)
    error.__dict__.update(facts)
    return error


class RetryLater(HoldfastError):
    """A failure that may pass: the same call may succeed later."""

    kind = "retry-later"


class TimedOut(RetryLater, TimeoutError):
    """A wait that reached its time limit."""


class Denied(HoldfastError):
    """A request that the store refuses until permissions, credentials, settings or a quota change."""

    kind = "denied"


class NotFound(HoldfastError, FileNotFoundError):
    """A file, checkpoint, key or job that does not exist."""

    kind = "not-found"


class MissingKey(NotFound, KeyError):
    """A name that a checkpoint does not hold."""


class Corrupt(HoldfastError):
    """Bytes that differ from those that were written."""

    kind = "corrupt"


class Conflict(HoldfastError):
    """A name that another owner has, or a run taken over by a newer attempt."""

    kind = "conflict"


class InvalidInput(HoldfastError, ValueError):
    """Arguments or state that cannot be used as given."""

    kind = "invalid-input"


class Unsupported(HoldfastError):
    """A valid request that this version, platform or store does not support."""

    kind = "unsupported"


class Diverged(HoldfastError):
    """A training that is in a spike again after as many rollbacks as allowed."""

    kind = "diverged"


class Internal(HoldfastError):
    """A bug of Holdfast; please report it."""

    kind = "internal"


class Preempted(SystemExit):
    """The end of a preempted run, raised by `Checkpointer.steps()` once the last save is durable.

    As a SystemExit it ends the process with status `PREEMPTED_STATUS` unless caught.
    """

    code: int  # pyright: ignore[reportIncompatibleVariableOverride] never anything else here
    was_raised = False  # in this process, whose exit status cannot be seen from inside

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(PREEMPTED_STATUS)
        Preempted.was_raised = True
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"preempted ({self.reason}) after step {self.step}; the checkpoint is durable"


class ResumeWarning(UserWarning):
    """A part of training that would differ in a resumed run from an uninterrupted one."""


class WatchWarning(UserWarning):
    """A watch that has failed and is off now, or what a watch reports. Training continues, and is saved."""


class LoaderWarning(ResumeWarning):
    """A data loader that is being read, and whose position is not in the state."""


class StrayParametersWarning(ResumeWarning):
    """Parameters of an optimizer of the state that are in no module of it."""


class SaveWarning(UserWarning):
    """A save that failed, was skipped or dropped, or supersedes another one; or a failed export.

    Training continues, and older checkpoints remain.
    """


class TornSaveWarning(SaveWarning):
    """A save that was dropped: something wrote to the state while it was copied."""


ERRORS: Mapping[str, type[HoldfastError]] = {
    one.__name__: one  # not by `kind`: TimedOut inherits RetryLater's, MissingKey NotFound's
    for one in list(vars().values())
    if isinstance(one, type) and issubclass(one, HoldfastError)
}
"""Classes of errors by name, for errors that another process has sent."""


_NAMES = (
    r"(?:[\w.-]{0,40}(?:signature|token|secret|passw(?:or)?d|credential|api[_-]?key|access[_-]?key(?:[_-]?id)?"
    r"|account[_-]?key)(?:[_.-][\w.-]{0,20})?|sig|sas|x-(?:amz|goog)-[\w-]{1,40})"
)
# Compiled at first use, as that takes 4 ms and most processes print nothing that needs it. `re` caches them.
_USER = r"(?i)(?<![a-z0-9+.-])(https?://)[^\s/'\"<>]{1,512}@"
_PASSWORD = r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^\s/'\"<>:]{0,256}:[^\s/'\"<>]{0,256}@"
_HEADER = (
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?)"
    r"(?:(?:bearer|basic|negotiate|sharedkey|aws4-hmac-sha256)\s{1,4})?[^\s\"',;]{1,8192}"
)
_BEARER = r"(?i)\b(bearer|basic)\s{1,4}(?=[^\s\"',;]{0,256}\d)[A-Za-z0-9._~+/=:-]{8,8192}"
_ASSIGNED = rf"(?i)(?<![\w.-])({_NAMES}=)[^\s&;,'\"<>)]{{1,8192}}"
_SECRETS = (
    (_USER, r"\1...@"),
    (_PASSWORD, r"\1...@"),
    (_HEADER, r"\1..."),
    (_BEARER, r"\1 ..."),
    (_ASSIGNED, r"\1..."),
)
_MARKS = ("://", "=", "earer", "asic", "uthorization", "EARER", "ASIC", "UTHORIZATION")
_CONTROLS = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def redact(text: str) -> str:
    """Return a text without passwords of URLs, tokens of headers and values of secret parameters."""
    if not any(mark in text for mark in _MARKS):
        return text
    for pattern, kept in _SECRETS:
        text = re.sub(pattern, kept, text)
    return text


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, except tabs and line breaks.

    A name from a stranger's checkpoint could otherwise move a terminal's cursor or reorder what is read.
    """
    return re.sub(_CONTROLS, _escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
