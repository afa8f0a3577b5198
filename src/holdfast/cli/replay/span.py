"""Recorded span of a run: two checkpoints of its line, and the metrics of the steps between them."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.home.history_lines import read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.home.newest import from_listing
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.retention import line_of
from holdfast.checkpoint.store import Store
from holdfast.errors import InvalidInput, NotFound
from holdfast.system.units import plural
from holdfast.watch.report.curves import collect_curves
from holdfast.watch.report.events import parse_events

_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """Steps that a run has trained from one checkpoint to a later one."""

    start: Manifest
    end: Manifest


def find_span(store: Store, *, step: int | None = None, to_step: int | None = None) -> RecordedSpan:
    """Return the span between two checkpoints of the current line.

    Args:
        step: step of the first one; by default that before the other.
        to_step: step of the other one; by default that after the first, or the newest.

    Raises:
        InvalidInput: such checkpoints do not exist, or the number of ranks has changed between them.
        NotFound: the home holds no checkpoint.
        RetryLater: the store failed.
    """
    return from_listing(lambda: _find_listed(store, step, to_step))


def _find_listed(store: Store, step: int | None, to_step: int | None) -> RecordedSpan:
    newest = open_checkpoint(store).manifest
    every = candidates(list_home(store))
    line = line_of(every, newest.checkpoint_id, newest.ancestors).current
    attempts = {one.step: one.attempt for one in reversed(line)}  # of a step saved again, the newest
    first, last = _choose(sorted(attempts), step, to_step, store.url)
    start, end = (open_checkpoint(store, one, attempts[one]).manifest for one in (first, last))
    if start.world_size != end.world_size:
        raise InvalidInput(
            f"Step {first} was saved on {plural(start.world_size, 'rank')} and step {last} on "
            f"{end.world_size}. Results depend on the number of ranks, so they cannot be compared. Choose "
            "two steps of the same number with --step and --to."
        )
    return RecordedSpan(start, end)


def _choose(steps: list[int], step: int | None, to_step: int | None, url: str) -> tuple[int, int]:
    for one in (step, to_step):
        if one is not None and one not in steps:
            shown = ", ".join(map(str, steps[-_MAX_SHOWN:]))
            raise NotFound(
                f"{url} does not hold a complete checkpoint of step {one} on the way to the newest one. "
                f"It holds those of steps {shown}."
            )
    if step is not None:
        later = [one for one in steps if one > step] if to_step is None else [to_step]
        pair = (step, later[0]) if later else None
    else:
        last = steps[-1] if to_step is None else to_step
        earlier = [one for one in steps if one < last]
        pair = (earlier[-1], last) if earlier else None
    if pair is None or pair[0] >= pair[1]:
        raise InvalidInput(
            f"A replay needs two checkpoints: one to start from, and a later one to compare with. {url} "
            f"holds those of {plural(len(steps), 'step')}: {', '.join(map(str, steps[-_MAX_SHOWN:]))}."
        )
    return pair


def recorded_metrics(store: Store, span: RecordedSpan) -> dict[int, dict[str, float]]:
    """Return the metrics that the run recorded between the two checkpoints, by step and name.

    Raises:
        RetryLater: the store failed.
    """
    lines, _ = read_lines(store)
    found: dict[int, dict[str, float]] = {}
    for curve in collect_curves(parse_events(lines)):
        for point in curve.counted:
            if span.start.step < point.step <= span.end.step:
                found.setdefault(point.step, {})[curve.name] = point.value
    return found
