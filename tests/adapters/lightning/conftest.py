"""Tests in this folder are skipped where Lightning is not installed."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = []
if importlib.util.find_spec("lightning") is None:
    collect_ignore_glob += ["copies.py", "training.py"]


@pytest.fixture(autouse=True)
def no_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no test ask a cloud for preemption notices."""
    monkeypatch.setenv("HOLDFAST_PREEMPTION", "none")
