"""The soak, in short: a training on a file system whose calls fail, killed at random moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.faults import soak


@pytest.mark.essential
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_training_on_a_faulty_file_system_loses_nothing_durable(tmp_path: Path, seed: int) -> None:
    outcome = soak(seed, tmp_path, total=12, share=0.02)
    assert outcome.failures == []
    assert outcome.durable >= 6
    assert outcome.faults.total() > 0, "the faults were injected"
