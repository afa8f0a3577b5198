"""Claims of a home: its run, the attempt of one trainer, and the fence of earlier attempts."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
import uuid
from collections.abc import Iterator, Sequence

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format import part as part_format
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import AttemptClaim, Emptied, Saved, document, parse
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.home.listing import LiveTrainer, candidates, list_home, scan
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.tiered import first_good
from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound, RetryLater, Unsupported


def claim_run(store: Store) -> str:
    """Return the id of a home's run; write its document if the home is new, or has lost it."""
    found = read_run(store)
    if found is not None:
        _repair_run(store, found)
        return found.id
    made = new_run()
    with contextlib.suppress(Conflict):  # another start was quicker: its run it is
        store.put(names.RUN, run.document(made), if_absent=True)
        return made.id
    found = read_run(store)
    if found is None:
        raise RetryLater(
            f"{names.RUN} in {store.url} was created and then deleted by another process. Try again."
        )
    return found.id


def _read_near_run(near: Store) -> run.Run | None:
    """Return the run of a nearer tier; None if no document there names one."""
    with contextlib.suppress(Corrupt):
        return read_run(near)
    return None


def new_run() -> run.Run:
    """Return a new run with a random id."""
    return run.Run(uuid.uuid4().hex, created_unix_s=time.time())


def _repair_run(store: Store, found: run.Run) -> None:
    """Write `holdfast.json` again if it is lost or damaged; other documents name the run."""
    try:
        if read_run_document(store) is None:
            with contextlib.suppress(Conflict):
                store.put(names.RUN, run.document(found), if_absent=True)
    except Corrupt:
        store.put(names.RUN, run.document(found))


def claim_attempt(
    store: Store, run_id: str, *, world_size: int, trainer: int | None = None, above: int = 0
) -> run.AttemptClaim:
    """Claim the next attempt's number, above that of other tiers: every attempt before it is fenced.

    Args:
        trainer: its process id; this process by default.
    """
    number = 1 + max(newest_number(store), above)
    host, pid = socket.gethostname(), os.getpid() if trainer is None else trainer
    while True:
        attempt = run.AttemptClaim(number, run_id, world_size, host, pid, started_unix_s=time.time())
        try:
            # Create-if-absent is the only mutual exclusion of a run. No clock and no lock decides (note 014).
            store.put(names.attempt(number), run.document(attempt), if_absent=True)
        except Conflict:
            number += 1  # another start of this run was quicker
        else:
            return attempt


def check_claim(store: Store, attempt: int, claim: str) -> None:
    """Check that an attempt still has its number, unless its claim is ""; write a lost claim again."""
    if not claim:
        return
    name = names.attempt(attempt)
    try:
        found = store.get(name)
    except NotFound:
        _check_not_deleted(store, run.parse(run.AttemptClaim, claim.encode(), name).run)
        with contextlib.suppress(Conflict):
            store.put(name, claim.encode(), if_absent=True)
        found = store.get(name)
    if found == claim.encode():
        return
    try:
        other = run.parse(run.AttemptClaim, found, name)
    except (Corrupt, Unsupported):
        return  # damaged, and still in the way of any other start that would take the number
    raise Conflict(
        f"The claim of attempt {attempt} in {store.url} was lost, and process {other.pid} on host "
        f"{other.host} has claimed the same number since. This process may no longer commit; its earlier "
        "checkpoints stand. Stop it: the other one continues."
    )


def _check_not_deleted(store: Store, run_id: str) -> None:
    """Raise if nothing in a home names the run any more: it was deleted, and must not be made anew."""
    found = read_run(store)
    if found is not None and found.id == run_id:
        return
    now = "nothing in it names this run any more" if found is None else "it holds another run now"
    raise Conflict(
        f"{store.url} was deleted while run {run_id} was saving to it: {now}. Nothing is written there, and "
        "the saves that were not durable are lost. Start again to begin a new run."
    )


def check_no_writer(store: Store, writers: Sequence[tuple[str, LiveTrainer]]) -> None:
    """Refuse to take a home from a process that may still save to it.

    Of the living trainers, each with its host, those whose attempt is fenced already do not count.
    """
    newest = newest_attempt(store)
    held = [(host, writer) for host, writer in writers if writer.attempt >= newest]
    if not held:
        return
    host, writer = min(held, key=lambda one: (one[1].rank, one[0]))
    since = _since(store, writer.attempt)
    is_own = (host, writer.pid) == (socket.gethostname(), os.getpid())
    advice = (
        "Close that Checkpointer first"
        if is_own
        else "Stop that process first, or wait for its end; to read beside it, use holdfast.open()"
    )
    raise Conflict(
        f"{store.url} is being written by attempt {writer.attempt}: "
        f"{'another Checkpointer of this process' if is_own else f'process {writer.pid}'} on host {host}"
        f"{since}. Nothing was saved or changed. {advice}. Checkpointer(..., take_over=True) takes the home "
        "over: the other one can then no longer commit."
    )


def _since(store: Store, attempt: int) -> str:
    with contextlib.suppress(Corrupt, NotFound, Unsupported):
        started_unix_s = read_claim(store, attempt).started_unix_s
        since = datetime.datetime.fromtimestamp(started_unix_s, tz=datetime.timezone.utc)
        return f", since {since:%Y-%m-%d %H:%M:%S} UTC"
    return ""


def check_run(store: Store, run_id: str) -> None:
    """Make a nearer tier part of the run, unless it belongs to a run already."""
    there = _read_near_run(store)  # without it, files count only if their parts name the run
    if there is not None and there.id != run_id:
        raise _of_another_run(store, run_id, there)
    _repair_run(store, there or run.Run(run_id, created_unix_s=time.time()))


def check_same_run(home: Store, near: Store) -> None:
    """Raise if a nearer tier and a home are not of one run."""
    there = _read_near_run(near)
    found = None if there is None else read_run(home)
    if there is not None and (found is None or found.id != there.id):
        raise _of_another_run(near, "a new one" if found is None else found.id, there)


def _of_another_run(store: Store, expected: str, found: run.Run) -> InvalidInput:
    return InvalidInput(
        f"{store.url} holds checkpoints of another run (expected {expected}, found {found.id}), so it "
        "cannot be the local tier of this one. Nothing was written. Give local= a folder of its own for "
        "each run."
    )


def copy_claim(store: Store, claim: run.AttemptClaim) -> None:
    """Copy a claim into a nearer tier, to fence writers that do not list home."""
    with contextlib.suppress(Conflict):
        store.put(names.attempt(claim.number), run.document(claim), if_absent=True)


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
    newest = 0
    for entry in store.list("attempts/"):
        found = names.parse_record("emptied", entry.name)
        with contextlib.suppress(Corrupt, NotFound, Unsupported):  # a damaged record excuses no loss
            if found and parse(Emptied, store.get(entry.name), entry.name).attempt == found.attempt:
                newest = max(newest, found.attempt)
    return newest


def read_run(store: Store) -> run.Run | None:
    """Return the run that a home holds; None for a home that was never used.

    Every claim, manifest and part names the run too, so that checkpoints stay readable if `holdfast.json` is
    damaged or lost.
    """
    damage: Corrupt | None = None
    try:
        found = read_run_document(store)
    except Corrupt as error:
        found, damage = None, error
    found = found or next(_runs_named_elsewhere(store), None)
    if found is None and damage is not None:
        raise damage
    return found


def read_run_document(store: Store) -> run.Run | None:
    """Return the run in `holdfast.json`; None if the file does not exist."""
    with contextlib.suppress(NotFound):
        return first_good(store, lambda copy: run.parse(run.Run, copy.get(names.RUN), names.RUN))
    return None


def _runs_named_elsewhere(store: Store) -> Iterator[run.Run]:
    home = list_home(store)
    for number in sorted(home.attempts, reverse=True):
        with contextlib.suppress(Corrupt, NotFound, Unsupported):
            claim = first_good(store, lambda copy, number=number: read_claim(copy, number))
            yield run.Run(claim.run, claim.started_unix_s)
    for checkpoint in candidates(home):
        with contextlib.suppress(Corrupt, NotFound, Unsupported):
            manifest = read_manifest(store, checkpoint, None)
            yield run.Run(manifest.run, manifest.created_unix_s)
    for saved in reversed(home.by_step()):
        for rank in saved.parts:
            with contextlib.suppress(Corrupt, NotFound, Unsupported):
                name = names.part(saved.step, saved.attempt, rank)
                part = first_good(store, lambda copy, name=name: part_format.parse(copy.get(name), name))
                yield run.Run(part.run, time.time())
