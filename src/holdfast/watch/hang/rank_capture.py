"""Capture of the ranks of a run on this host: their progress and stacks, as evidence."""

from __future__ import annotations

import contextlib
import socket
import time

from holdfast.checkpoint.keeper.lockfile import KeeperInfo, is_trainer_alive, running_keepers
from holdfast.checkpoint.keeper.pulse import PulseReader, TrainerProgress
from holdfast.errors import Corrupt
from holdfast.watch.hang.capture import capture
from holdfast.watch.hang.evidence import RankEvidence
from holdfast.watch.hang.handlers import NAME

MAX_RANKS = 64
"""Ranks of a host whose stacks are captured."""


def capture_rank(
    info: KeeperInfo, progress: TrainerProgress, *, stalled_s: float, limit_s: float = 0.0
) -> RankEvidence:
    """Return evidence of one rank.

    Args:
        info: contents of its keeper's lock file.
        progress: its progress.
        stalled_s: time without progress, in seconds.
        limit_s: limit of that; 0 if it is not known.

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
    """Return evidence of the ranks on this host, by rank.

    Args:
        home: home of the run.
        attempt: their attempt; by default the newest.
        without: rank to leave out.

    Raises:
        Denied: a lock file of a keeper cannot be opened.
        RetryLater: the file system failed.

    Blocks: at most 3 s per process.
    """
    infos = [info for _, info in running_keepers(home) if info.pulse_fd >= 0 and is_trainer_alive(info)]
    newest = max((info.attempt for info in infos), default=0) if attempt is None else attempt
    chosen = [info for info in infos if info.attempt == newest and info.rank != without]
    found: dict[int, RankEvidence] = {}
    for info in sorted(chosen, key=lambda info: info.rank)[:MAX_RANKS]:
        with contextlib.suppress(OSError, Corrupt):  # it exits now
            progress = read_progress(info)
            found[info.rank] = capture_rank(info, progress, stalled_s=stalled_for_s(progress))
    return found


def read_progress(info: KeeperInfo) -> TrainerProgress:
    """Return the progress of a trainer.

    Raises:
        OSError: it has exited.
        Corrupt: its keeper's lock file does not name a pulse.
    """
    pulse = PulseReader.of_process(info.trainer_pid, info.pulse_fd)
    try:
        return pulse.read()
    finally:
        pulse.close()


def stalled_for_s(progress: TrainerProgress) -> float:
    """Return the time since the last progress, in seconds."""
    last_ns = max(progress.beat_ns, progress.phase_ns)
    return max(0.0, (time.monotonic_ns() - last_ns) / 1e9) if last_ns else 0.0
