"""A short campaign of damages, by fixed seeds. `make damage` draws others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns import damage
from campaigns.crash_states import checks
from campaigns.crash_states.workloads import Act, Workload

SMALL = Workload("small", "five saves of which 4 stay", (Act("save", (1, 1, 5, 4)),))
NUM_CASES = 100


@pytest.fixture(scope="module")
def original() -> Iterator[Path]:
    with damage.made_home(SMALL) as folder:
        yield folder


@pytest.mark.essential
@pytest.mark.parametrize("seed", [0, 1])
def test_random_damage_never_restores_wrong_bytes(original: Path, seed: int):
    results = list(damage.run(SMALL, original, seed, NUM_CASES, num_workers=1))
    assert len(results) == NUM_CASES
    assert [one for one in results if one.problem] == []
    assert {one.outcome for one in results} >= {"newest", "older"}


def test_a_start_from_zero_is_reported(original: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "restore", lambda *_, **__: checks.Restored(None))
    results = list(damage.run(SMALL, original, 1, 10, num_workers=1))
    assert any("begin from zero" in one.problem for one in results)
