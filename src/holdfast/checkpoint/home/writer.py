"""Identity of a process that writes to a home: its run, attempt and rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WriterId:
    """One rank of one attempt of a run."""

    run: str
    attempt: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class LiveTrainer:
    """A living process that may still save to the home."""

    attempt: int
    rank: int
    pid: int
