"""Each test in this folder has its own temporary folders, and ends its session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast.adapters.nebula as nm
from holdfast.adapters.nebula import interface


@pytest.fixture(autouse=True)
def own_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test its own near copies."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    interface.end()


@pytest.fixture
def home(tmp_path: Path) -> str:
    """Return a new home."""
    return str(tmp_path / "home")


@pytest.fixture
def begun(home: str) -> str:
    """Return a new home whose session has begun."""
    nm.init(home)
    return home
