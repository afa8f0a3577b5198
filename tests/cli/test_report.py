"""`holdfast report` as text, JSON and a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Command, append_event, runs_without_torch
from holdfast.watch.report.page import chart_library


@pytest.fixture
def interrupted(home: Path) -> Path:
    """Return a home in which attempt 2, claimed a second after the first, resumed from step 200."""

    def write(attempt: int, t: float, event: str, step: int, **more: Any) -> None:
        append_event(home, attempt, 1_700_000_001.0 + t, event, step, **more)

    for step in (100, 200, 300):
        for t, event, seconds in ((2, "saved", 2), (10, "persisted", 8), (11, "committed", 9)):
            write(1, (step + t) / 1000, event, step, bytes=800, seconds=seconds / 1000)
    write(2, 1.5, "restored", 200, bytes=800, seconds=0.4, detail="skipped step 300 of attempt 1: rotten")
    write(2, 1.602, "saved", 250, bytes=800, seconds=0.002)
    return home


def test_a_few_lines_for_a_terminal(holdfast: Command, interrupted: Path) -> None:
    lines = holdfast("report", interrupted).out.splitlines()
    assert lines[0] == "Not marked as finished. Last event: 2023-11-14 22:13:22 UTC, attempt 2."
    printed = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines[1:-1]}
    assert printed["Lost to interruptions"] == "1.3 s (1 interruption; 100 steps known to be repeated)"
    assert printed["Saves"].startswith("4 (3 durable, 1 not")


def test_json_is_the_whole_summary(holdfast: Command, interrupted: Path) -> None:
    summary = holdfast("report", interrupted, "--json").json
    (one,) = summary["interruptions"]
    assert (one["before"], one["after"], one["restored_step"], one["steps_lost"]) == (1, 2, 200, 100)
    assert one["redo_s"] == pytest.approx(0.1, abs=1e-5)
    assert one["down_s"] == pytest.approx(0.698, abs=1e-5)
    assert one["restore_s"] == pytest.approx(0.5, abs=1e-5)
    assert summary["times"]["lost_s"] == pytest.approx(1.298, abs=1e-5)
    assert summary["advice"]["num_failures"] == 1
    assert summary["home_contents"]["num_checkpoints"] == 5


def test_the_page_is_one_self_contained_file(holdfast: Command, interrupted: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    place = tmp_path / "report.html"
    result = holdfast("report", interrupted, "-o", place, "--title", "Run <one> & only")
    text = place.read_text()
    assert result.out.startswith(f"{place}: ")
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>Run &lt;one&gt; &amp; only</h1>" in text
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    assert holdfast("report", interrupted, "-o", "-").out.startswith("<!DOCTYPE html>")


def test_a_page_that_cannot_be_written_leaves_no_file(
    holdfast: Command, interrupted: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vl_convert")
    holdfast("report", interrupted, "-o", tmp_path / "nowhere" / "report.html").refused(
        "Cannot write the report"
    )
    (tmp_path / "taken").mkdir()
    assert holdfast("report", interrupted, "-o", tmp_path / "taken").status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]


def test_a_missing_library_is_reported_with_its_extra(
    holdfast: Command, interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    chart_library.cache_clear()  # as in a new process
    holdfast("report", interrupted, "-o", tmp_path / "report.html").refused(
        "pip install 'torch-holdfast[report]'"
    )
    assert holdfast("report", interrupted).status == 0


def test_a_run_without_history_is_reported_as_far_as_possible(holdfast: Command, home: Path) -> None:
    holdfast("report", home.with_name("nothing")).refused()
    assert "Newest checkpoint" in holdfast("report", home).out
    assert holdfast("report", home, "--json").json["saves"] == []


def test_a_page_does_not_import_torch(interrupted: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    runs_without_torch("report", interrupted, "-o", tmp_path / "report.html")
