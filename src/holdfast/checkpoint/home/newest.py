"""Choice of the newest usable checkpoint: damaged ones are skipped, unreadable ones never are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.listing import Listing, list_home
from holdfast.checkpoint.home.patience import Patience
from holdfast.checkpoint.home.skipped import Skipped
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.system.units import format_duration

_PASSABLE = (Corrupt, NotFound, Unsupported)
_MAX_LISTINGS = 5
_T = TypeVar("_T")


def usable(
    found: Sequence[CheckpointId],
    load: Callable[[CheckpointId], _T | None],
    *,
    url: str,
    patience: Patience,
    on_skipped: Callable[[Skipped, HoldfastError], None] = lambda skipped, error: None,
) -> Iterator[_T]:
    """Yield the result of `load` for each checkpoint, in the given order; skip those that do not verify.

    Every reader that chooses "the newest" goes through here, but for `restore_newest`, which has the same
    rule for several ranks (docs/design/015).

    Args:
        found: checkpoints, newest first.
        load: called with each; None leaves it out.
        patience: for what cannot be read.
        on_skipped: called for each checkpoint that was skipped.
    """
    for index, one in enumerate(found):
        try:
            loaded = _load(load, one, patience)
        except _PASSABLE as error:
            on_skipped(Skipped(step=one.step, attempt=one.attempt, reason=str(error)), error)
            continue
        except (RetryLater, Denied) as error:
            raise _unread(url, found[index:], error, patience.spent_s) from error
        if loaded is not None:
            yield loaded


def _load(
    load: Callable[[CheckpointId], _T | None], checkpoint: CheckpointId, patience: Patience
) -> _T | None:
    patience.reset()
    while True:
        try:
            return load(checkpoint)
        except RetryLater as error:
            if not patience.lasts():
                raise
            patience.pause(f"step {checkpoint.step} of attempt {checkpoint.attempt}", str(error))


def _unread(url: str, left: Sequence[CheckpointId], error: HoldfastError, seconds: float) -> HoldfastError:
    one, *older = left
    tried = f" for {format_duration(seconds)}" if isinstance(error, RetryLater) else ""
    choice = f", or ask for an older one by its number (step {older[0].step})" if older else ""
    message = (
        f"Step {one.step} of attempt {one.attempt} in {url} could not be read{tried}: {error} It may be "
        f"whole, so no older one was loaded in its place. Try again when the store answers{choice}."
    )
    return type(error)(message, step=one.step, key=error.key)


def from_listing(read: Callable[[], _T]) -> _T:
    """Return the result of `read`, which lists a home and then reads there.

    A run deletes old checkpoints meanwhile, so that a listed one may be missing: `read` is called again.
    """
    for _ in range(_MAX_LISTINGS - 1):
        with contextlib.suppress(NotFound):
            return read()
    return read()


def was_deleted(store: Store, checkpoint: CheckpointId) -> bool:
    """Return True if a listed checkpoint has no manifest any more: a run has deleted it since."""
    return store.size(names.manifest(checkpoint.step, checkpoint.attempt)) is None


@contextlib.contextmanager
def deletion_named(store: Store, checkpoint: CheckpointId) -> Iterator[None]:
    """Name the cause if a run deletes a checkpoint while the block reads it."""
    try:
        yield
    except (Corrupt, NotFound) as error:
        if not was_deleted(store, checkpoint):
            raise
        raise NotFound(
            f"Step {checkpoint.step} of attempt {checkpoint.attempt} in {store.url} was deleted by its run "
            "while it was read. Run this again for a newer one, or let the run keep more checkpoints, see "
            "Checkpointer(keep=...).",
            step=checkpoint.step,
        ) from error


def list_patiently(store: Store, patience: Patience) -> Listing:
    """Return a home's listing; retry while the store does not answer."""
    return patience.spend(store.url, lambda: list_home(store))
