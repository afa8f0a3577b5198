"""Fixtures of hangs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import nursery
from hang.trials import Trial


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """A trial of one rank, whose processes are killed at the end."""
    with Trial(tmp_path, nursery.shared()) as found:
        yield found
