"""Signs of lost checkpoints in a home that has no complete one: a run must not begin from zero then."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.home.claim import emptied_upto
from holdfast.checkpoint.home.documents import read_draft
from holdfast.checkpoint.home.history import parse_lines
from holdfast.checkpoint.home.listing import ListedSave, Listing, list_home
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, NotFound, Unsupported

_MAX_LOG_BYTES = 64 << 20
_MOST = 8


def find_losses(tiers: Sequence[Store]) -> list[str]:
    """Return descriptions of signs that some tier had a complete checkpoint; a few, the surest first.

    Only for tiers without a complete checkpoint. An interrupted save leaves no sign: the files that it wrote
    are whole. Attempts whose checkpoints a person has deleted have lost none, in any tier.
    """
    tiers = [tier for tier in tiers if tier.properties.has_documents]
    emptied = max(map(emptied_upto, tiers), default=0)
    return [sign for tier in tiers for _, sign in zip(range(_MOST), _signs(tier, emptied), strict=False)]


def check_no_losses(signs: list[str], url: str) -> None:
    """Raise if a run would begin from zero although it had checkpoints, as signs of `find_losses` show."""
    if not signs:
        return
    found = "".join(f"\n  {sign}" for sign in signs)
    raise Corrupt(
        f"{url} has no checkpoint that can be restored, but there were some, and training must not start "
        f"from zero unnoticed. Found:{found}\nNothing was changed. Bring the missing files back from a copy, "
        "restore from another place, or start from scratch in another home. If the loss is intended, delete "
        "this home."
    )


def _signs(store: Store, emptied: int) -> Iterator[str]:
    home = list_home(store)
    if store.size(names.DONE) is not None and _done_attempt(store) > emptied:
        yield f"{names.DONE}, which is written when a run has finished"
    for entry in store.list("attempts/"):
        proof = names.parse_record("saved", entry.name)
        if proof is not None and proof.attempt > emptied:
            saver = f"attempt {proof.attempt} has had a complete checkpoint"
            yield f"{entry.name}: {saver}, and its files are gone"
    for saved in reversed(home.by_step()):
        if saved.attempt > emptied:
            yield from _damage(store, saved, f"step {saved.step} of attempt {saved.attempt}")
    yield from _without_parts(home, emptied)
    yield from _recorded(store, emptied)


def _done_attempt(store: Store) -> float:
    """Return the attempt that finished the run; infinite if its document cannot be read."""
    try:
        return run.parse(run.Done, store.get(names.DONE), names.DONE).attempt
    except (Corrupt, NotFound, Unsupported):
        return math.inf


def _damage(store: Store, saved: ListedSave, which: str) -> Iterator[str]:
    """Yield signs in the files of one save. Documents become visible after the files that they describe."""
    for rank in sorted(saved.parts):
        name = names.part(saved.step, saved.attempt, rank)
        if rank not in saved.data:
            yield f"{which}: {name} is there, but not the data file that was written before it"
            continue
        try:
            read_draft(store, saved, rank)
        except (Corrupt, Unsupported) as error:
            yield f"{which}: {error}"
        except NotFound:
            continue  # deleted since it was listed


def _without_parts(home: Listing, emptied: int) -> Iterator[str]:
    """Yield the ranks that lost several parts. A kill leaves only a rank's last data file without one."""
    steps: dict[tuple[int, int], list[int]] = {}  # by attempt and rank
    for saved in home.by_step():
        for rank in saved.data.keys() - saved.parts if saved.attempt > emptied else ():
            steps.setdefault((saved.attempt, rank), []).append(saved.step)
    for (attempt, rank), missing in steps.items():
        if len(missing) > 1:
            yield (
                f"attempt {attempt}, rank {rank}: data files of {len(missing)} steps, of which no part is "
                "left, although each part is written before the data file of the next step"
            )


def _recorded(store: Store, emptied: int) -> Iterator[str]:
    """Yield signs in the history: events of steps that became complete in home."""
    for entry in store.list("history/"):
        log = names.parse_record("history", entry.name)
        if log is None or log.attempt <= emptied or not 0 < entry.num_bytes <= _MAX_LOG_BYTES:
            continue
        found = max(_committed_steps(store.get(entry.name)), default=None)
        if found is not None:
            yield f"{entry.name} records that step {found} was complete"


def _committed_steps(log: bytes) -> Iterator[int]:
    for event in parse_lines(log.splitlines(), "committed", "drained"):
        # A checkpoint that is complete in a local folder only may be lost with its host.
        if event.get("tier", "home") in ("home", "") and type(event.get("step")) is int:
            yield event["step"]
