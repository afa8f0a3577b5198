"""Fixtures of hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nursery
from hang.trials import Trial


@pytest.fixture
def new_trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    """Return a function that makes a trial with a number of ranks. Its processes are killed at the end."""
    trials: list[Trial] = []

    def make(world_size: int = 1) -> Trial:
        folder = tmp_path / str(len(trials))
        folder.mkdir()
        trials.append(Trial(folder, nursery.shared(), world_size=world_size))
        return trials[-1]

    yield make
    for one in trials:
        one.kill()
