"""The run on a machine with a GPU: its time, its processes, and the rows of its summary."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PATHS = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
sys.path.extend(PATHS)

import source_path  # noqa: E402  # pyright: ignore[reportMissingImports]

for path in PATHS:
    sys.path.remove(path)  # its files would hide folders of tests with the same name


def test_a_measurement_finds_the_packages_of_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/wheels")
    found = source_path.environment()["PYTHONPATH"].split(os.pathsep)
    assert found == [str(BENCHMARKS.parent / "src"), "/wheels"]
    monkeypatch.delenv("PYTHONPATH")
    assert source_path.environment()["PYTHONPATH"] == found[0]
