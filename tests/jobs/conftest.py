"""Fixture of local jobs: an engine with its own state folder, and no process left after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.harness import JobHarness


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobHarness]:
    """Return a harness with its own folder."""
    state = tmp_path / "state"
    monkeypatch.setenv("HOLDFAST_STATE", str(state))
    monkeypatch.setenv("HOLDFAST_PREEMPTION", "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # this machine may have fewer GPUs than a test asks for
    found = JobHarness(tmp_path)
    yield found
    found.leave()
