"""Attempt numbers of a home: used, claimed, fenced, and proven to have had a checkpoint."""

from __future__ import annotations

import contextlib
import time

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import AttemptClaim, Emptied, Saved, document, parse
from holdfast.checkpoint.home.listing import scan
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, NotFound, RetryLater, Unsupported


def newest_attempt(store: Store) -> int:
    """Return the highest attempt number that has been claimed; 0 in a new home."""
    return max((facts.attempt for _, facts in scan(store, "attempts/") if facts.kind == "attempt"), default=0)


def newest_number(store: Store) -> int:
    """Return the highest attempt number in any name of the home; 0 in a new home.

    Claims may be lost. The number of a checkpoint, or of what is left of one, must not be used again.
    """
    found = (names.attempt_in(entry.name) for entry in store.list())
    return max((number for number in found if number is not None), default=0)


def check_not_fenced(store: Store, attempt: int) -> None:
    """Raise if a newer attempt has claimed the run."""
    newest = newest_attempt(store)
    if newest > attempt:
        raise Conflict(
            f"Attempt {newest} has taken over this home; attempt {attempt} is fenced and may no longer "
            "commit. Its earlier checkpoints remain. Stop this process: the other one continues."
        )


def read_claim(store: Store, attempt: int) -> AttemptClaim:
    """Return the claim of an attempt."""
    name = names.attempt(attempt)
    return parse(AttemptClaim, store.get(name), name)


def note_saved(store: Store, run: str, checkpoint: CheckpointId) -> None:
    """Write the proof that an attempt has had a complete checkpoint, next to its claim.

    Without it a home whose step folders are all lost looks like one whose first save never became complete,
    and training would start from zero.
    """
    text = document(Saved(run, attempt=checkpoint.attempt, step=checkpoint.step))
    with contextlib.suppress(Conflict, RetryLater):  # it exists already; or the next commit tries again
        store.put(names.first_saved(checkpoint.attempt), text, if_absent=True)


def note_emptied(store: Store, run: str, attempt: int) -> None:
    """Record that the checkpoints of all attempts up to `attempt` were deleted on purpose."""
    text = document(Emptied(run, attempt, time.time()))
    store.put(names.emptied(attempt), text)


def emptied_upto(store: Store) -> int:
    """Return the newest attempt whose checkpoints were deleted on purpose; 0 by default."""
    found = (names.parse_emptied(entry.name) for entry in store.list("attempts/"))
    return max((one for one in found if one is not None and _is_sound(store, one)), default=0)


def _is_sound(store: Store, attempt: int) -> bool:
    name = names.emptied(attempt)
    try:
        return parse(Emptied, store.get(name), name).attempt == attempt
    except (Corrupt, NotFound, Unsupported):
        return False  # a damaged record excuses no loss
