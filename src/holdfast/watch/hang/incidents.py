"""Hangs of a run: ranks grouped by place, put together from what each has recorded, as text; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import printable
from holdfast.system.units import format_duration
from holdfast.watch.hang.evidence import RankEvidence, decode
from holdfast.watch.hang.places import Kind, Place, find_place
from holdfast.watch.hang.stacks import ProcessStacks, main_thread

OVER = "hang-over"  # kind of the event of a rank that makes progress again
_TOGETHER_S = 120.0  # longest time between the records of two ranks about one hang, beyond its own duration
_STOPPED = ("stopped", "gone", "waiting for a device")


class PlaceGroup(Struct, frozen=True):
    """Ranks that are at the same place."""

    ranks: tuple[int, ...]  # ascending
    place: str
    kind: Kind  # WORKS for processes that are stopped or gone
    step: int  # their newest completed step
    is_odd: bool = False  # the others wait for them


def place_of(evidence: RankEvidence) -> Place | None:
    """Return the place of the thread that trains; None without stacks."""
    return _place(evidence.process, evidence.thread)


def _place(process: ProcessStacks, thread: int) -> Place | None:
    found = main_thread(process.threads, thread)
    return None if found is None else find_place(found)


def group_ranks(evidence: Iterable[RankEvidence]) -> list[PlaceGroup]:
    """Return the groups of ranks at the same place, the odd ones first."""
    groups: dict[tuple[str, Kind, int], list[int]] = {}
    for of_rank in sorted(evidence, key=lambda of_rank: of_rank.rank):
        place = place_of(of_rank)
        kind = Kind.WORKS if place is None or of_rank.process.state.startswith(_STOPPED) else place.kind
        groups.setdefault((_describe(of_rank, place), kind, of_rank.step), []).append(of_rank.rank)
    found = [PlaceGroup(tuple(ranks), text, kind, step) for (text, kind, step), ranks in groups.items()]
    odd = _odd(found)
    marked = [replace(one, is_odd=one in odd) for one in found]
    return sorted(marked, key=lambda group: (not group.is_odd, group.ranks))


def _describe(evidence: RankEvidence, place: Place | None) -> str:
    state = evidence.process.state
    text = state if place is None else f"in {place.describe()}"
    if state.startswith(_STOPPED) and place is not None:
        text = f"{state} {text}"
    if evidence.phase:
        text = f"{text}, in phase {evidence.phase!r}"
    if place is not None and place.operation.startswith("DataLoader"):
        for worker in evidence.workers:
            at = _place(worker, 0)
            if at is not None and at.user is not None:
                return f"{text}; its worker is in {at.describe()}"
    return text


def _odd(groups: Sequence[PlaceGroup]) -> list[PlaceGroup]:
    """Return the groups that the others wait for: those that do not wait for other ranks."""
    waiting = [one for one in groups if one.kind in (Kind.WAITS, Kind.SYNCS)]
    others = [one for one in groups if one not in waiting]
    if others or len(waiting) < 2:
        return others
    # All wait: some ranks have skipped what the others are in. They are the fewest, or have come further.
    sizes = {len(one.ranks) for one in waiting}
    if len(sizes) > 1:
        return [one for one in waiting if len(one.ranks) < max(sizes)]
    furthest = max((one.step, one.kind is Kind.SYNCS) for one in waiting)
    ahead = [one for one in waiting if (one.step, one.kind is Kind.SYNCS) == furthest]
    return ahead if len(ahead) < len(waiting) else []


# -- the history ---------------------------------------------------------------------------------------------


class HangIncident(Struct, frozen=True):
    """Hang of a run."""

    attempt: int
    unix_s: float  # of the first record
    ranks: tuple[RankEvidence, ...]  # those that have some
    over_s: float | None = None  # its duration, if the training made progress again; else None

    @property
    def groups(self) -> list[PlaceGroup]:
        """Ranks at the same place, those that the others wait for first."""
        return group_ranks(self.ranks)


def list_hangs(lines: Iterable[Mapping[str, Any]]) -> list[HangIncident]:
    """Return the hangs in lines of a history, which are ordered by time; the oldest first."""
    records: dict[int, tuple[float, list[RankEvidence]]] = {}  # of each attempt: the hang that is not over
    found: list[HangIncident] = []

    def end(attempt: int, over_s: float | None) -> None:
        if attempt in records:
            unix_s, recorded = records.pop(attempt)
            found.append(HangIncident(attempt, unix_s, _newest_of_ranks(recorded), over_s))

    for line in lines:
        attempt = line.get("attempt")
        if not isinstance(attempt, int):
            continue
        if line.get("event") == OVER:
            seconds = line.get("seconds")
            end(attempt, float(seconds) if isinstance(seconds, (int, float)) else None)
        elif (evidence := decode(line)) is not None:
            if attempt in records and line["t"] - records[attempt][0] > _TOGETHER_S + evidence.stalled_s:
                end(attempt, None)
            records.setdefault(attempt, (line["t"], []))[1].append(evidence)
    for attempt in sorted(records):
        end(attempt, None)
    return sorted(found, key=lambda hang: hang.unix_s)


def _newest_of_ranks(evidence: Iterable[RankEvidence]) -> tuple[RankEvidence, ...]:
    """Return the newest evidence of each rank; if some of it is late, the newest of that."""
    by_rank: dict[int, RankEvidence] = {}
    for newer in evidence:
        if newer.is_late or newer.rank not in by_rank or not by_rank[newer.rank].is_late:
            by_rank[newer.rank] = newer
    return tuple(by_rank[rank] for rank in sorted(by_rank))


# -- text for people -----------------------------------------------------------------------------------------


def describe_hang(evidence: Sequence[RankEvidence], *, world_size: int, action: str, home: str) -> str:
    """Return the block that a training prints about its hang."""
    late = max((one for one in evidence if one.is_late), key=lambda late: late.stalled_s)
    doing = f"its phase {late.phase!r}" if late.phase else f"the step after {late.step}"
    lines = [
        f"THE TRAINING HANGS: rank {late.rank} has made no progress for {format_duration(late.stalled_s)} in "
        f"{doing} (limit {format_duration(late.limit_s)})."
    ]
    lines += [f"  {line}" for line in describe_groups(group_ranks(evidence))]
    if missing := sorted(set(range(world_size)) - {one.rank for one in evidence}):
        their = "its" if len(missing) == 1 else "their"
        lines.append(f"  {_ranks(missing)}: no evidence, as {their} own limit is not reached")
    lines.append(f"  {action} All stacks: holdfast stacks {home} --recorded")
    return printable("\n".join(lines))


def describe_groups(groups: Iterable[PlaceGroup]) -> list[str]:
    """Return a line for each group of ranks."""
    return [
        f"{'>' if one.is_odd else ' '} {_ranks(one.ranks)}: {one.place} (after step {one.step})"
        for one in groups
    ]


def describe_odd(evidence: Sequence[RankEvidence]) -> str:
    """Return one line: the ranks that the others wait for, or else the first group, and their place."""
    groups = group_ranks(evidence)
    odd = [one for one in groups if one.is_odd] or groups[:1]
    return printable("; ".join(f"{_ranks(one.ranks)} {one.place}" for one in odd))


def format_stacks(evidence: RankEvidence) -> list[str]:
    """Return the lines of all stacks of a rank."""
    lines = [
        f"rank {evidence.rank} on {evidence.host}, after step {evidence.step}, no progress for "
        f"{format_duration(evidence.stalled_s)}"
    ]
    for name, process in [("trainer", evidence.process), *(("worker", one) for one in evidence.workers)]:
        lines.append(f"  {name}, process {process.pid}, {process.state}")
        for thread in sorted(process.threads, key=lambda thread: thread.ident != evidence.thread):
            trains = ", which trains" if thread.ident == evidence.thread else ""
            lines.append(f"    thread {thread.ident:#x}{trains}")
            lines += [f"      {one.file}:{one.line} {one.function}" for one in thread.frames]
    return [printable(line) for line in lines]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "ranks 0-6, 8"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
