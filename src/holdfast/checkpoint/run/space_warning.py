"""Warning at the start of a run whose next save does not fit."""

from __future__ import annotations

from holdfast.checkpoint.home.space import measure_space
from holdfast.errors import HoldfastError
from holdfast.system.log import get_logger

_log = get_logger("checkpoint.run")


def warn_of_space(*places: str | None) -> None:
    """Log a warning for each folder without space for the next save.

    Args:
        places: home and local folder. URLs and empty homes are not checked.
    """
    for place in places:
        if place is None:
            continue
        try:
            found = measure_space(place)
        except (HoldfastError, OSError):
            continue  # the first save reports what is wrong with it
        if found is not None and found.trouble:
            _log.warning(
                "%s: %s. Older checkpoints are deleted only once it is complete.", place, found.trouble
            )
