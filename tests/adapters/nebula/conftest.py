"""Each test in this folder has temporary folders of its own, and ends the session that it began."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.adapters.nebula import current


@pytest.fixture(autouse=True)
def own_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Near copies of one test are none of another's."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    current.end()


@pytest.fixture
def home(tmp_path: Path) -> str:
    """A home that nobody has used."""
    return str(tmp_path / "home")
