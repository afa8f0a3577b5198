"""Hangs of a run: the evidence of each rank, captured on its host, and the incidents that follow, as text."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.home.inventory import format_ranks
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive, running_keepers
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.errors import Corrupt, printable
from holdfast.system.documents import decode_as, to_plain
from holdfast.system.units import format_duration
from holdfast.watch.hang.stacks import NAME, Kind, Place, ProcessStacks, capture, find_place, main_thread

EVENT = "hang"  # kind of the event with the evidence of one rank
MAX_RANKS = 64  # ranks of a host whose stacks are captured
_MAX_LINE_BYTES = 200_000
_FEW_THREADS, _FEW_FRAMES = 4, 40


class RankEvidence(Struct, frozen=True):
    """Evidence of one rank."""

    rank: int
    host: str
    step: int  # its newest completed step
    phase: str  # phase that it was in; "" for a step
    stalled_s: float  # time without progress
    limit_s: float  # 0 for a rank that was asked because another one had reached its own limit
    thread: int  # identifier of the thread that trains
    process: ProcessStacks  # of the trainer
    workers: tuple[ProcessStacks, ...] = ()  # child processes with a handler, such as workers of data loaders

    @property
    def is_late(self) -> bool:
        """True if the rank has reached its limit."""
        return self.limit_s > 0


def encode_evidence(evidence: RankEvidence) -> dict[str, Any]:
    """Return evidence as a JSON object. Of very large stacks the innermost frames are kept."""
    found = to_plain(evidence)
    if len(json.dumps(found)) > _MAX_LINE_BYTES:
        for process in (found["process"], *found["workers"]):
            process["threads"] = [
                {**one, "frames": one["frames"][:_FEW_FRAMES]} for one in process["threads"][-_FEW_THREADS:]
            ]
    return found


def decode_evidence(line: Mapping[str, Any]) -> RankEvidence | None:
    """Return the evidence of a line of the history; None without it, or if it is damaged."""
    members = line.get("evidence")
    if line.get("event") != EVENT or members is None:
        return None
    with contextlib.suppress(Corrupt):
        return decode_as(RankEvidence, json.dumps(members), "the evidence of a hang", any_text=True)
    return None


def capture_rank(
    info: KeeperInfo, progress: TrainerProgress, *, stalled_s: float, limit_s: float = 0.0
) -> RankEvidence:
    """Return evidence of the rank whose keeper has a lock file with `info`.

    Blocks: at most 3 s per process.
    """
    process, workers = capture(info.trainer_pid, progress.words(NAME)[0] - 1)
    return RankEvidence(
        rank=info.rank,
        host=socket.gethostname(),
        step=progress.step,
        phase=progress.phase,
        stalled_s=round(stalled_s, 3),
        limit_s=round(limit_s, 3),
        thread=progress.thread,
        process=process,
        workers=workers,
    )


def capture_host(
    home: str, *, attempt: int | None = None, without: int | None = None
) -> dict[int, RankEvidence]:
    """Return evidence of the ranks on this host, by rank: of the newest attempt, unless one is given.

    Blocks: at most 3 s per process.
    """
    infos = [info for _, info in running_keepers(home) if info.pulse_fd >= 0 and is_trainer_alive(info)]
    newest = max((info.attempt for info in infos), default=0) if attempt is None else attempt
    chosen = [info for info in infos if info.attempt == newest and info.rank != without]
    found: dict[int, RankEvidence] = {}
    for info in sorted(chosen, key=lambda info: info.rank)[:MAX_RANKS]:
        with contextlib.suppress(OSError, Corrupt):  # it exits now
            progress = read_progress(info)
            last_ns = max(progress.beat_ns, progress.phase_ns)
            stalled_s = max(0.0, (time.monotonic_ns() - last_ns) / 1e9) if last_ns else 0.0
            found[info.rank] = capture_rank(info, progress, stalled_s=stalled_s)
    return found


def read_progress(info: KeeperInfo) -> TrainerProgress:
    """Return the progress of a trainer. Raises OSError if it has exited, and Corrupt without a pulse."""
    with contextlib.closing(PulseReader.of_process(info.trainer_pid, info.pulse_fd)) as pulse:
        return pulse.read()


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


def place_of(process: ProcessStacks, thread: int) -> Place | None:
    """Return the place of the thread that trains, or of a worker's oldest (0); None without stacks."""
    found = main_thread(process.threads, thread)
    return None if found is None else find_place(found)


def group_ranks(evidence: Iterable[RankEvidence]) -> list[PlaceGroup]:
    """Return the groups of ranks at the same place, the odd ones first."""
    groups: dict[tuple[str, Kind, int], list[int]] = {}
    for of_rank in sorted(evidence, key=lambda of_rank: of_rank.rank):
        place = place_of(of_rank.process, of_rank.thread)
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
            at = place_of(worker, 0)
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
        elif (evidence := decode_evidence(line)) is not None:
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
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"
