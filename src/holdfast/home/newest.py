"""Choice of the newest usable checkpoint: damaged ones are skipped, unreadable ones never are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.format import names
from holdfast.home.listing import Listing, list_home
from holdfast.home.patience import Patience
from holdfast.home.skipped import Skipped
from holdfast.store.contract import Store
from holdfast.units import format_duration

_PASSABLE = (Corrupt, NotFound, Unsupported)
_MAX_LISTINGS = 5
_T = TypeVar("_T")


def usable(
    found: Sequence[tuple[int, int]],
    load: Callable[[int, int], _T | None],
    *,
    url: str,
    patience: Patience,
    on_skipped: Callable[[Skipped, HoldfastError], None] = lambda skipped, error: None,
) -> Iterator[_T]:
    """Yield the result of `load` for each checkpoint, in the given order; skip those that do not verify.

    Every reader that chooses "the newest" goes through here, but for `restore_newest`, which has the same
    rule for several ranks (docs/design/015).

    Args:
        found: (attempt, step) of checkpoints, newest first.
        load: called with attempt and step; None leaves a checkpoint out.
        patience: for what cannot be read.
        on_skipped: called for each checkpoint that was skipped.

    Raises:
        RetryLater: a checkpoint could not be read until the patience ended; it may be whole.
        Denied: the store refuses access to it.
    """
    for index, (attempt, step) in enumerate(found):
        try:
            loaded = _load(load, attempt, step, patience)
        except _PASSABLE as error:
            on_skipped(Skipped(step, attempt, str(error)), error)
            continue
        except (RetryLater, Denied) as error:
            raise _unread(url, found[index:], error, patience.spent_s) from error
        if loaded is not None:
            yield loaded


def _load(load: Callable[[int, int], _T | None], attempt: int, step: int, patience: Patience) -> _T | None:
    patience.reset()
    while True:
        try:
            return load(attempt, step)
        except RetryLater as error:
            if not patience.lasts():
                raise
            patience.pause(f"step {step} of attempt {attempt}", str(error))


def _unread(url: str, left: Sequence[tuple[int, int]], error: HoldfastError, seconds: float) -> HoldfastError:
    (attempt, step), *older = left
    tried = f" for {format_duration(seconds)}" if isinstance(error, RetryLater) else ""
    choice = f", or ask for an older one by its number (step {older[0][1]})" if older else ""
    message = (
        f"Step {step} of attempt {attempt} in {url} could not be read{tried}: {error} It may be whole, so no "
        f"older one was loaded in its place. Try again when the store answers{choice}."
    )
    return type(error)(message, step=step, key=error.key)


def from_listing(read: Callable[[], _T]) -> _T:
    """Return the result of `read`, which lists a home and then reads there.

    A run deletes old checkpoints meanwhile, so that a listed one may be missing: `read` is called again.

    Raises:
        NotFound: every one of five calls has raised it.
    """
    for _ in range(_MAX_LISTINGS - 1):
        with contextlib.suppress(NotFound):
            return read()
    return read()


def was_deleted(store: Store, step: int, attempt: int) -> bool:
    """Return True if a listed checkpoint has no manifest any more: a run has deleted it since."""
    return store.size(names.manifest(step, attempt)) is None


@contextlib.contextmanager
def deletion_named(store: Store, step: int, attempt: int) -> Iterator[None]:
    """Name the cause if a run deletes a checkpoint while the block reads it.

    Raises:
        NotFound: it was deleted.
    """
    try:
        yield
    except (Corrupt, NotFound) as error:
        if not was_deleted(store, step, attempt):
            raise
        raise NotFound(
            f"Step {step} of attempt {attempt} in {store.url} was deleted by its run while it was read. Run "
            "this again for a newer one, or let the run keep more checkpoints, see Checkpointer(keep=...).",
            step=step,
        ) from error


def list_patiently(store: Store, patience: Patience) -> Listing:
    """Return a home's listing; retry while the store does not answer.

    Raises:
        RetryLater: the home could not be listed until the patience ended.
        Denied: the store refuses access.
    """
    return patience.spend(store.url, lambda: list_home(store))
