"""Evidence of a hang: the progress and stacks of each rank, as members of its line in the history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_dataclass
from holdfast.watch.hang.capture import ProcessStacks

EVENT = "hang"
"""Kind of the event with the evidence of one rank."""
_WHAT = "the evidence of a hang"
_MAX_BYTES = 200_000
_FEW_THREADS, _FEW_FRAMES = 4, 40


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """Evidence of one rank.

    Attributes:
        rank: its number.
        host: name of its machine.
        step: its newest completed step.
        phase: phase that it was in; "" for a step.
        stalled_s: time without progress, in seconds.
        limit_s: the limit of that; 0 for a rank that was asked because another one had reached its own.
        thread: identifier of the thread that trains.
        process: the trainer's process.
        workers: its child processes with a handler of their own, such as workers of data loaders.
    """

    rank: int
    host: str
    step: int
    phase: str
    stalled_s: float
    limit_s: float
    thread: int
    process: ProcessStacks
    workers: tuple[ProcessStacks, ...] = ()

    @property
    def is_late(self) -> bool:
        """True if the rank has reached its limit."""
        return self.limit_s > 0


def encode(evidence: RankEvidence) -> dict[str, Any]:
    """Return evidence as a JSON object. Of very large stacks the innermost frames are kept."""
    found = asdict(evidence)
    if len(json.dumps(found)) > _MAX_BYTES:
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
        return decode_dataclass(RankEvidence, json.dumps(members).encode(), _WHAT, any_text=True)
    except Corrupt:
        return None
