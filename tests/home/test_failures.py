"""Failures of earlier attempts, from the history of a home."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.history import FailureRate, read_failures
from holdfast.checkpoint.store import open_store


def write(home: Path, attempt: int, *events: tuple[float, str, str], rank: int = 0) -> None:
    """Write a log with some events: time, kind and detail."""
    store = open_store(home)
    for time_s, event, detail in events:
        line = {"t": 1e9 + time_s, "event": event, "detail": detail, "step": 1}
        line |= {"attempt": attempt, "rank": rank}
        store.append(names.history(attempt, rank), json.dumps(line).encode() + b"\n")
    store.flush()


def test_attempts_without_an_end_are_failures_and_their_time_counts(tmp_path: Path) -> None:
    write(tmp_path, 1, (0, "saved", ""), (100, "saved", ""), (500, "committed", ""))
    write(tmp_path, 2, (0, "restored", ""), (50, "saved", ""), (60, "ended", "hung (rank 1)"))
    write(tmp_path, 3, (0, "restored", ""), (20, "saved", ""), (30, "ended", "preempted (SIGTERM)"))
    write(tmp_path, 4, (0, "pace", ""))  # it never trained
    write(tmp_path, 5, (0, "saved", ""), (40, "saved", ""), (40, "ended", "closed"))
    write(tmp_path, 6, (0, "saved", ""), (70, "metrics", ""))
    write(tmp_path, 6, (0, "saved", ""), (7000, "saved", ""), rank=1)
    write(tmp_path, 7, (0, "saved", ""))  # the present one
    found = read_failures(open_store(tmp_path), before=7)
    assert found == FailureRate(num_failures=3, up_s=100 + 60 + 30 + 40 + 70)
    assert found.mtbf_s == 100


def test_a_new_run_has_none(tmp_path: Path) -> None:
    found = read_failures(open_store(tmp_path), before=1)
    assert (found.num_failures, found.mtbf_s) == (0, None)
