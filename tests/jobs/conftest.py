"""Fixture of local jobs: an engine with its own state folder, and no process left after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.harness import JobHarness, started_harness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[JobHarness]:
    """Return a harness with its own folder."""
    with started_harness(tmp_path) as found:
        yield found
