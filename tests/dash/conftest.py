"""Fixtures of the dash: jobs in a state folder of their own, and a browser that has opened the URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dash.client import Client
from holdfast.jobs.dash import pages
from jobs.conftest import harness as jobs

__all__ = ["jobs"]
WAITS = "until [ -e go ]; do sleep 0.02; done"


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Client]:
    """Start an application with homes, which reads jobs and runs again for every request."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    for name in ("_MIN_AGE_S", "_REST", "_RUN_AGE_S", "_RUN_REST"):
        monkeypatch.setattr(pages, name, 0.0)
    return Client


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    """An application without homes."""
    return connect()
