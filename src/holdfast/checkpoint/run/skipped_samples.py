"""Samples that a training leaves out after rollbacks, and the objects that skip them; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import Rollback
from holdfast.checkpoint.home.rollbacks import Rollbacks
from holdfast.checkpoint.state import Skippable
from holdfast.errors import InvalidInput

Range = tuple[int, int]
"""First sample of a range, and the sample after its last one."""


def range_to_skip(
    start: int, now: int, skipped: Iterable[Range], *, num_steps: int, in_a_row: int, extra_steps: int
) -> Range:
    """Return the samples that are left out after a rollback.

    With each further rollback in a row the range since the checkpoint doubles: the bad data may be longer
    than the trouble.

    Args:
        start: position of the restored checkpoint.
        now: position at the time of the rollback.
        skipped: ranges that were left out before.
        num_steps: steps from the checkpoint to the rollback.
        in_a_row: rollbacks without progress, with this one.
        extra_steps: steps whose samples are left out beyond.
    """
    if now <= start or num_steps < 1:
        return start, max(start, now)
    joined = _joined(skipped)
    left_out = sum(max(0, min(stop, now) - max(first, start)) for first, stop in joined)
    per_step = (now - start - left_out) / num_steps
    begin = next((first for first, stop in joined if first <= start <= stop), start)  # of the whole range
    again = now - begin if in_a_row > 1 else 0
    return start, now + again + round(extra_steps * per_step)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, those that overlap as one."""
    joined: list[Range] = []
    for first, stop in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((first, stop))
    return joined


def leave_out(
    objects: Mapping[str, Skippable], ranges: Mapping[str, Sequence[Range]], rename: Callable[[str], str]
) -> list[str]:
    """Have the objects of a state skip ranges. Return the keys of ranges that no object can skip.

    Args:
        objects: objects by key.
        ranges: ranges by the key at the time of the rollback.
        rename: function from the keys of a checkpoint to those of the state.
    """
    unknown: list[str] = []
    for key, some in ranges.items():
        found = objects.get(rename(key))
        if found is None and len(objects) == len(ranges) == 1:
            found = next(iter(objects.values()))  # the only one, under another name
        if found is None:
            unknown.append(key)
            continue
        for start, stop in some:
            try:
                found.skip(start, stop)
            except Exception as error:
                raise InvalidInput(
                    f"{key}: {type(found).__qualname__}.skip({start}, {stop}) failed: {error!r}. A rollback "
                    "left these samples out, so training would see them again. Fix its skip(), or remove "
                    "it from the state.",
                    key=key,
                ) from error
    return unknown


def rewound_streams(rollbacks: Rollbacks, restored: CheckpointId) -> tuple[Rollback, list[str]] | None:
    """Return a rollback whose samples come again after a restore, with their readers.

    Args:
        rollbacks: those of the run.
        restored: the checkpoint.
    """
    for rollback in rollbacks.found:
        if rollback.kept and restored <= rollback.base:
            return rollback, list(rollback.kept)
    return None


def describe_skipped_samples(skipped: Mapping[str, Range], kept: Sequence[str]) -> str:
    """Return the samples that a rollback leaves out, for people."""
    found = [
        f"samples {start} to {stop - 1} of {key!r}" for key, (start, stop) in skipped.items() if stop > start
    ]
    if found:
        return f"{' and '.join(found)} are left out for ever"
    if kept:
        return f"{', '.join(map(repr, kept))} stayed at its position, so its samples since then are left out"
    return (
        "no object of the state can skip samples: an iterator of the loop continues, and what depends on the "
        "step number or on random numbers comes again"
    )
