"""A desk per test: an engine with a state folder of its own, and no process left when the test is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.desk import Desk


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Where a test submits its jobs."""
    state = tmp_path / "state"
    monkeypatch.setenv("HOLDFAST_STATE", str(state))
    monkeypatch.setenv("HOLDFAST_NOTICES", "none")
    found = Desk(tmp_path)
    yield found
    found.leave()
