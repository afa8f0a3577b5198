"""Choice of the newest usable checkpoint, with retries of failed reads, and notes on skipped ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import Listing, list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.system import backoff
from holdfast.system.log import QUIET_S
from holdfast.system.units import format_duration

_PASSABLE = (Corrupt, NotFound, Unsupported)
_MAX_LISTINGS = 5
_T = TypeVar("_T")


def usable(
    store: Store,
    found: Sequence[CheckpointId],
    load: Callable[[Manifest], _T | None],
    patience: Patience,
    skipped: dict[Skipped, HoldfastError] | None = None,
) -> Iterator[_T]:
    """Yield the result of `load` for each checkpoint, in the given order; skip those that do not verify.

    Every reader that chooses "the newest" goes through here, but for `restore_newest`, which has the same
    rule for several ranks (docs/design/015).

    Args:
        found: checkpoints, newest first.
        load: called with each manifest; None leaves the checkpoint out.
        skipped: receives the error of each checkpoint that does not verify.
    """
    this_run = None
    with contextlib.suppress(Corrupt):  # each manifest has a seal of its own, so this damage does not matter
        this_run = patience.spend(store.url, lambda: read_run(store))
    run_id = this_run.id if this_run else None
    for index, checkpoint in enumerate(found):
        patience.reset()
        try:
            name = f"step {checkpoint.step} of attempt {checkpoint.attempt}"
            loaded = patience.retry(name, lambda one=checkpoint: load(read_manifest(store, one, run_id)))
        except _PASSABLE as error:
            if skipped is not None:
                skipped[Skipped(checkpoint.step, checkpoint.attempt, str(error))] = error
            continue
        except (RetryLater, Denied) as error:
            raise _unread(store.url, found[index:], error, patience.spent_s) from error
        if loaded is not None:
            yield loaded


def _unread(url: str, left: Sequence[CheckpointId], error: HoldfastError, seconds: float) -> HoldfastError:
    checkpoint, *older = left
    tried = f" for {format_duration(seconds)}" if isinstance(error, RetryLater) else ""
    choice = f", or ask for an older one by its number (step {older[0].step})" if older else ""
    message = (
        f"Step {checkpoint.step} of attempt {checkpoint.attempt} in {url} could not be read{tried}: {error} "
        f"It may be whole, so no older one was loaded in its place. Try again when the store answers{choice}."
    )
    return type(error)(message, step=checkpoint.step, key=error.key)


def from_listing(read: Callable[[], _T]) -> _T:
    """Return the result of `read`, which lists a home and then reads there.

    A run deletes old checkpoints meanwhile, so that a listed one may be missing: `read` is called again.
    """
    for _ in range(_MAX_LISTINGS - 1):
        with contextlib.suppress(NotFound):
            return read()
    return read()


def no_such_checkpoint(
    url: str, found: Sequence[CheckpointId], step: int | None = None, attempt: int | None = None
) -> NotFound:
    """Return the error for a home without the requested checkpoint; `found` are the others, newest first."""
    asked = "checkpoint" if step is None else f"step {step}"
    asked += "" if attempt is None else f" of attempt {attempt}"
    shown = ", ".join(f"{one.step} (attempt {one.attempt})" for one in found[:20]) or "none"
    more = f" and {len(found) - 20} older" if len(found) > 20 else ""
    others = f" Complete steps, newest first: {shown}{more}." if found or step is not None else ""
    return NotFound(f"{url} does not contain a complete {asked}.{others}", step=step)


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


LIMIT_S = 120.0
"""Seconds for which a restore retries, by default."""
_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_SHARE = 0.1, 5.0, 0.5


class Patience:
    """Time limit for retries of one read, from the first failure to the last try.

    A line is logged once the failure has lasted a few seconds.
    """

    def __init__(self, limit_s: float, log: Callable[[str], None]) -> None:
        self._limit_s, self._log = limit_s, log
        self._began_s: float | None = None
        self._has_logged = False

    @property
    def spent_s(self) -> float:
        """Seconds since the first failure."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def lasts(self) -> bool:
        """Return True while another try is allowed. The first call starts the clock."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        return self.spent_s < self._limit_s

    def pause(self, what: str, reason: str) -> None:
        """Wait before another try, for half of the time spent so far, at most 5 s; log the failure once."""
        if self.spent_s >= QUIET_S and not self._has_logged:
            self._has_logged = True
            self._log(f"{what} cannot be read; trying again for {format_duration(self._limit_s)}: {reason}")
        pause_s = backoff.proportional(self.spent_s, _PAUSE_SHARE, _FIRST_PAUSE_S, _LAST_PAUSE_S)
        time.sleep(min(pause_s, max(self._limit_s - self.spent_s, 0.0)))

    def reset(self) -> None:
        """Restart the limit, after a successful read."""
        self._began_s, self._has_logged = None, False

    def retry(self, what: str, act: Callable[[], _T]) -> _T:
        """Return the result of `act`; call it again while it raises RetryLater, up to the limit."""
        while True:
            try:
                result = act()
            except RetryLater as error:
                if not self.lasts():
                    raise
                self.pause(what, str(error))
            else:
                self.reset()
                return result

    def spend(self, what: str, act: Callable[[], _T]) -> _T:
        """Return the result of `act`, as `retry` does; its last error has the name and the time."""
        try:
            return self.retry(what, act)
        except RetryLater as error:
            message = f"{what} could not be read for {format_duration(self.spent_s)}: {error}"
            raise RetryLater(message, step=error.step, key=error.key) from error


class Skipped(OfCheckpoint, Struct, frozen=True):
    """A checkpoint that a restore has skipped, with the reason."""

    step: int
    attempt: int
    reason: str
    is_superseded: bool = False  # a newer attempt resumed from an older one; its bytes are good


def note_skipped(store: Store, skipped: Iterable[Skipped], run_id: str | None) -> None:
    """Write a note for each skipped checkpoint that has files in `store`.

    Retention keeps the noted checkpoints of the three newest attempts that have any. Superseded checkpoints
    get no note: their bytes are good.
    """
    if run_id is None:  # this attempt has not claimed the home yet
        with contextlib.suppress(Corrupt, Unsupported):
            found = read_run(store)
            run_id = found.id if found else None
    for checkpoint in skipped:
        saved = list_home(store, step=checkpoint.step).saved.get(checkpoint.checkpoint_id)
        if checkpoint.is_superseded or saved is None or saved.was_skipped:
            continue
        attempt, step = checkpoint.attempt, checkpoint.step
        note = run.SkippedNote(run_id or "", attempt, step, checkpoint.reason, noted_unix_s=time.time())
        store.put(names.skipped(step, attempt), run.document(note))


def drop_note(store: Store, checkpoint: CheckpointId) -> None:
    """Delete the note about a checkpoint that was restored and verified whole."""
    name = names.skipped(checkpoint.step, checkpoint.attempt)
    if store.size(name) is not None:
        store.delete(name)


def read_reason(store: Store, checkpoint: CheckpointId) -> str:
    """Return the reason why a restore has skipped a checkpoint, from its note."""
    name = names.skipped(checkpoint.step, checkpoint.attempt)
    try:
        return run.parse(run.SkippedNote, store.get(name), name).reason
    except (Corrupt, NotFound, Unsupported) as error:
        return str(error)
