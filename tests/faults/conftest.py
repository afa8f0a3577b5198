"""Fixtures of the crash tests: the nursery of the worker, a playground per test, a reference per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.playground import Playground
from nursery import Nursery, shared


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    return shared()


@pytest.fixture
def playground(tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playground]:
    found = Playground(tmp_path, nursery)
    yield found
    found.wait_for_keepers()


@pytest.fixture(scope="session")
def uninterrupted_ranks(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the final state of two ranks that nothing happened to."""
    place = Playground(tmp_path_factory.mktemp("uninterrupted"), nursery)
    place.finish_ranks()
    return place.final()


@pytest.fixture(scope="session")
def uninterrupted(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the final state of a run of the usual length that nothing happened to."""
    place = Playground(tmp_path_factory.mktemp("uninterrupted"), nursery)
    place.finish()
    return place.final()
