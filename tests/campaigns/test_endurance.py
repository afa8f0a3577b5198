"""Endurance, in short: a few hundred saves, a signal of each kind, and two starts with wrong clocks."""

from __future__ import annotations

import pytest

from campaigns.endurance import SIGNALS, run_clocks, save_often, send_signal
from nursery import shared


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_PREEMPTION", raising=False)
    monkeypatch.setenv("HOLDFAST_KEEP_IN_MEMORY", "0")


def test_many_saves_need_no_more_memory_descriptors_or_files() -> None:
    assert save_often(shared(), 200) == []


@pytest.mark.parametrize("seed", range(len(SIGNALS)))
def test_a_signal_to_all_processes_loses_no_complete_step(seed: int) -> None:
    assert send_signal(shared(), seed) == []


def test_ranks_whose_clocks_are_hours_wrong_lose_nothing() -> None:
    assert run_clocks(shared(), 1, num_kills=2) == []
