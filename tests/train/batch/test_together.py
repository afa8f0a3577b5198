"""Several ranks search together: the one with the least memory decides, and a failure ends all."""

from __future__ import annotations

import pytest

from stage.ranks import run_ranks
from train.batch import together

pytestmark = pytest.mark.ranks


def test_the_rank_with_the_least_memory_decides_for_all() -> None:
    found = run_ranks(2, together.with_limits, 8_000_000, 3_000_000)
    assert found[0] == found[1], found
    assert found[0]["limit_bytes"] == 3_000_000
    assert found[0]["world_size"] == 2
    peaks = {size: peak for size, peak, fits, _ in found[0]["probes"] if fits}
    assert 2_850_000 < peaks[found[0]["largest"]] <= 3_000_000


def test_memory_that_runs_out_on_one_rank_bounds_all_ranks() -> None:
    found = run_ranks(2, together.running_out)
    assert found[0] == found[1], found
    assert found[0] in (48, 49, 50)


def test_a_failing_step_on_one_rank_ends_the_search_on_all() -> None:
    errors = run_ranks(2, together.failing)
    assert "RetryLater: fit_batch() stopped because the step failed on rank 1" in errors[0]
    assert "ValueError: a bad batch" in errors[0]
    assert "ValueError: a bad batch" in errors[1]
    assert "RetryLater" not in errors[1]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.fsdp2_on_cpu)])
def test_models_that_communicate_in_their_step_are_measured_and_restored(kind: str) -> None:
    found = run_ranks(2, together.wrapped, kind)
    assert found[0] == found[1], found
    assert found[0]["largest"] > 50
    assert "memory measured with real steps" in found[0]["note"]
    assert all(peak <= 3_000_000 for _, peak, fits, _ in found[0]["probes"] if fits and peak is not None)
