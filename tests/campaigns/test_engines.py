"""Engines of other projects: their registry, and their table in the results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)

from engines import HEADINGS, rows  # noqa: E402  # pyright: ignore[reportMissingImports]
from peers import OTHERS, find  # noqa: E402  # pyright: ignore[reportMissingImports]
from results import Results  # noqa: E402  # pyright: ignore[reportMissingImports]
from table import render_engines  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path.remove(BENCHMARKS)  # its files would hide folders of tests with the same name


def _run(**facts: Any) -> dict[str, Any]:
    return {"round": 0, "state": "tiny", "contestant": "one", "title": "One", **facts}


def test_every_name_has_a_class_of_its_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in OTHERS:
        kind = find(name)
        assert kind.title
        assert kind.package, f"{name} has no distribution, so the table would lack its version"


def test_an_engine_that_fails_has_its_error_in_the_table() -> None:
    [row] = rows(Results((_run(error="ValueError: not on CPU"),)), "tiny")
    assert row[:2] == ["One", "failed: ValueError: not on CPU"]
    assert len(row) == len(HEADINGS) + 1


def test_a_load_by_other_code_is_named() -> None:
    run = _run(values={"disk_bytes": 2e6}, loads_with="torch.load", exact={"back": "exact"})
    [row] = rows(Results((run,)), "tiny")
    assert row[0] == "One, loaded with torch.load"
    assert "2 MB" in row
    assert "exact" in row


def test_without_results_the_table_names_the_command() -> None:
    assert "run.py --others" in render_engines([])
