"""Warning about loaders whose worker processes outlive an epoch."""

from __future__ import annotations

from holdfast.errors import ResumeWarning
from holdfast.system.callsite import warn


def warn_of_persistent_workers(option: str) -> None:
    """Warn that a resume within an epoch draws other random numbers.

    Args:
        option: the option that keeps the workers.
    """
    warn(
        f"The run will not resume exactly within an epoch, because of {option}=True: a loader draws a seed "
        "for its workers when it starts them, from the generator of dropout. After a resume they start "
        f"at another moment. Set {option}=False, or give the loader a generator of its own.",
        ResumeWarning,
    )
