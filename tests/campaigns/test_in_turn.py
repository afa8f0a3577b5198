"""Failures in turn, in short: some of the calls and requests of a run fail once, and nothing is lost."""

from __future__ import annotations

import pytest

from campaigns.in_turn import fail_call, fail_request
from nursery import shared
from servers import ministack


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PREEMPTION", "none")
    monkeypatch.setenv("HOLDFAST_KEEP_IN_MEMORY", "0")


@pytest.mark.parametrize("number", [3, 250])
@pytest.mark.parametrize("error", ["ESTALE", "ENOSPC"])
def test_a_system_call_that_fails_once_loses_nothing(error: str, number: int) -> None:
    outcome = fail_call(shared(), error, number)
    assert outcome.failed.endswith(error)
    assert outcome.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("fault", ["reset-after", "503"])
def test_a_request_that_fails_once_loses_nothing(fault: str, tiers: bool) -> None:
    with ministack() as server:
        outcome = fail_request(shared(), server, fault, 20, tiers=tiers)
    assert outcome.failed
    assert outcome.problems == []
