"""Pauses between retries."""

from __future__ import annotations

import math

from holdfast.system import backoff


def test_a_doubled_pause_grows_up_to_its_limit() -> None:
    assert [backoff.doubled(n, 0.5, 3.0) for n in range(6)] == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.doubled(10_000, 0.5, 3.0) == 3.0
    assert math.isfinite(backoff.doubled(10_000, 0.5, math.inf))


def test_a_proportional_pause_stays_within_its_limits() -> None:
    assert [backoff.proportional(s, 0.5, 1.0, 10.0) for s in (0.0, 1.0, 4.0, 100.0)] == [1.0, 1.0, 2.0, 10.0]


def test_a_jittered_pause_is_at_least_half_and_varies() -> None:
    pauses = {backoff.jittered(2.0) for _ in range(100)}
    assert len(pauses) > 50
    assert all(1.0 <= pause_s <= 2.0 for pause_s in pauses)
