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

from collections.abc import Mapping

from holdfast.redaction import printable, redact

PREEMPTED_STATUS = 75
"""Exit status of a run that was preempted after a durable save (EX_TEMPFAIL: start it again)."""
HUNG_STATUS = 63
"""Exit status of a run that hung and was ended, with `on_hang="restart"`: start it again."""


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

    def __str__(self) -> str:
        return str(self.args[0])


class Denied(HoldfastError):
    """A request that the store refuses until permissions, credentials, settings or a quota change."""

    kind = "denied"


class NotFound(HoldfastError, FileNotFoundError):
    """A file, checkpoint, key or job that does not exist."""

    kind = "not-found"

    def __str__(self) -> str:
        return str(self.args[0])


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

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(PREEMPTED_STATUS)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"preempted ({self.reason}) after step {self.step}; the checkpoint is durable"


class ResumeWarning(UserWarning):
    """A part of training that would differ in a resumed run from an uninterrupted one."""


class SaveWarning(UserWarning):
    """A save that failed, was skipped or dropped, or supersedes another one; or a failed export.

    Training continues, and older checkpoints remain.
    """


ERRORS: Mapping[str, type[HoldfastError]] = {
    one.__name__: one  # not by `kind`: TimedOut inherits RetryLater's, MissingKey NotFound's
    for one in list(vars().values())
    if isinstance(one, type) and issubclass(one, HoldfastError)
}
"""Classes of errors by name, for errors that another process has sent."""
