"""The error tree, grouped by what the reader can do about it.

HoldfastError
├── RetryLater      the same call may succeed later: a busy or unreachable store, a wait that ran out
├── Denied          the store refuses access: permissions or credentials have to change first
├── NotFound        what was asked for is not there (also a FileNotFoundError)
├── Corrupt         bytes are there but are not the bytes that were written
├── Conflict        somebody else owns the name, or a newer attempt has taken over
├── InvalidInput    the caller's arguments or state cannot be used as given (also a ValueError)
├── Unsupported     a valid wish that this version, platform or store cannot grant
└── Internal        a bug of Holdfast; please report it

Every class can be pickled, so errors cross process borders with their facts.
`Preempted` stands beside the tree: it is a SystemExit, since a preempted run has not failed.
"""

from __future__ import annotations

from holdfast.redaction import printable, redact

PREEMPTED_STATUS = 75
"""Exit status of a run that was preempted after a durable save (EX_TEMPFAIL: run me again)."""


class HoldfastError(Exception):
    """Base of all errors of this package.

    Args:
        message: what failed, where, expected and found, what was done, what to do.
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
    """The same call may succeed later."""

    kind = "retry-later"


class Denied(HoldfastError):
    """The store refuses access; permissions or credentials have to change before the same call succeeds."""

    kind = "denied"


class NotFound(HoldfastError, FileNotFoundError):
    """What was asked for is not there."""

    kind = "not-found"

    def __str__(self) -> str:
        return str(self.args[0])


class Corrupt(HoldfastError):
    """Bytes are there but are not the bytes that were written."""

    kind = "corrupt"


class Conflict(HoldfastError):
    """Somebody else owns the name, or a newer attempt has taken over the run."""

    kind = "conflict"


class InvalidInput(HoldfastError, ValueError):
    """The caller's arguments or state cannot be used as given."""

    kind = "invalid-input"


class Unsupported(HoldfastError):
    """A valid wish that this version, platform or store cannot grant."""

    kind = "unsupported"


class Internal(HoldfastError):
    """A bug of Holdfast; please report it."""

    kind = "internal"


class Preempted(SystemExit):
    """Raised by `Checkpointer.steps()` after a preemption notice was honoured: the save is durable.

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
    """A part of the training that a resumed run would not have as an uninterrupted one has it."""


class SaveWarning(UserWarning):
    """A save failed, was skipped or was dropped; training goes on and older checkpoints stand."""
