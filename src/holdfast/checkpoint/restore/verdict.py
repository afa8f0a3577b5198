"""Verdict of all ranks on one checkpoint, and the errors of a failed restore; pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.skipped import Skipped
from holdfast.checkpoint.ranks import RankOutcome, raise_first
from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.system.units import format_duration, plural

SKIPPABLE = (Corrupt, NotFound, Unsupported, RetryLater)
"""Errors that count against the checkpoint. Any other is the caller's or ours, and is raised.

After a RetryLater alone the checkpoint is tried again and never skipped: it may be whole.
"""
SUPERSEDED = "superseded"
"""Kind of reason of a checkpoint that a newer attempt has gone back behind."""
_KINDS = {kind.kind: kind for kind in (Corrupt, Denied, NotFound, RetryLater, Unsupported)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one checkpoint, equal on all ranks."""

    kinds: tuple[str, ...] = ()  # of the errors of all ranks; empty if there were none
    reason: str = ""
    ancestors: Ancestors | None = None  # None if no rank could read its manifest

    @property
    def is_good(self) -> bool:
        """True if no rank has failed."""
        return not self.kinds

    @property
    def is_unread(self) -> bool:
        """True if some rank could not read it, and no rank has found damage."""
        return bool(self.kinds) and all(kind == RetryLater.kind for kind in self.kinds)


def judge(outcomes: Sequence[RankOutcome[Any]], rank: int, ancestors: Ancestors | None) -> Verdict:
    """Return the verdict after one stage.

    Args:
        outcomes: of the stage, by rank.
        ancestors: of the checkpoint, as far as they are known.

    Raises:
        HoldfastError: a rank has failed in a way that no other checkpoint would prevent.
    """
    failed = [one for one in outcomes if one.error is not None]
    raise_first(
        [one for one in failed if not isinstance(one.error, SKIPPABLE)], rank, "failed to restore the state"
    )
    ranks: dict[str, list[int]] = {}
    for one in failed:
        ranks.setdefault(str(one.error), []).append(one.rank)
    lines = [
        f"{'rank' if len(those) == 1 else 'ranks'} {format_some(those)}: {text}"
        for text, those in ranks.items()
    ]
    kinds = tuple(one.error.kind for one in failed if isinstance(one.error, HoldfastError))
    return Verdict(kinds, " | ".join(lines), ancestors)


def format_some(items: Sequence[object], most: int = 10) -> str:
    """Return items as text; only the number of those beyond `most`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(str(item) for item in items[:most]) + more


def make_unread_error(
    url: str, newest: Skipped, seconds: float, older: Sequence[int], touched: Iterable[str]
) -> RetryLater:
    """Return the error for a checkpoint that cannot be read.

    Args:
        newest: the checkpoint, with the reason.
        seconds: time that its reads were retried for.
        older: steps that can be restored in its place, the next one first.
        touched: names of live tensors that may hold bytes of it.
    """
    step, names = newest.step, sorted(touched)
    choice = (
        f" To resume from an older one instead, call restore(step={older[0]}); step {step} then stays until "
        f"you delete it with `holdfast rm {url} --step {step}`."
        if older
        else ""
    )
    mixed = f" {format_some(names, 3)} may hold bytes of it: do not train with them." if names else ""
    return RetryLater(
        f"Step {step} of attempt {newest.attempt} in {url} could not be read for {format_duration(seconds)}: "
        f"{newest.reason} It may be whole, so no older one was restored in its place.{mixed} Start again "
        f"when the store answers.{choice}",
        step=step,
    )


def make_mixed_error(left: Sequence[str], step: int, rank: int) -> Corrupt:
    """Return the error for tensors filled from a damaged checkpoint that this one cannot overwrite."""
    return Corrupt(
        f"A newer checkpoint was found to be damaged after {format_some(left)} had been read from it, and "
        f"step {step} does not hold these. The live state mixes steps: make it anew, then restore step "
        f"{step} by its number.",
        step=step,
        rank=rank,
        key=left[0],
    )


def make_none_good_error(
    url: str, skipped: Sequence[Skipped], kinds: Collection[str], touched: Collection[str], step: int | None
) -> HoldfastError:
    """Return the error for a home without a usable checkpoint: Corrupt, or the kind that all reasons have."""
    every = "".join(f"\n  step {one.step}, attempt {one.attempt}: {one.reason}" for one in skipped)
    asked = plural(len(skipped), "checkpoint") + ("" if step is None else f" of step {step}")
    mixed = (
        f" {len(touched)} live tensors may hold bytes of a damaged checkpoint: do not train with them."
        if touched
        else ""
    )
    message = (
        f"{url} has {asked}, but none could be restored, and training must not start from zero "
        f"unnoticed.{mixed} Repair one, or start afresh in another home.{every}"
    )
    (kind,) = set(kinds) if len(set(kinds)) == 1 else {Corrupt.kind}
    return _KINDS.get(kind, Corrupt)(message, step=step)
