"""Evidence of a hang: progress and stacks of each rank, captured on its host, for a line of the history."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, to_builtins

from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive, running_keepers
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.errors import Corrupt
from holdfast.system.documents import decode_as
from holdfast.watch.hang.stacks import NAME, ProcessStacks, capture

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


def encode(evidence: RankEvidence) -> dict[str, Any]:
    """Return evidence as a JSON object. Of very large stacks the innermost frames are kept."""
    found = to_builtins(evidence)
    if len(json.dumps(found)) > _MAX_LINE_BYTES:
        for process in (found["process"], *found["workers"]):
            process["threads"] = [
                {**one, "frames": one["frames"][:_FEW_FRAMES]} for one in process["threads"][-_FEW_THREADS:]
            ]
    return found


def decode(line: Mapping[str, Any]) -> RankEvidence | None:
    """Return the evidence of a line of the history; None without it, or if it is damaged."""
    members = line.get("evidence")
    if line.get("event") != EVENT or members is None:
        return None
    try:
        text = json.dumps(members).encode()
        return decode_as(RankEvidence, text, "the evidence of a hang", any_text=True)
    except Corrupt:
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
