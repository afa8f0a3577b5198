"""`holdfast history` tells what happened, torn lines or not."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from cli.conftest import Command
from holdfast.format import names
from holdfast.store import open_store


@pytest.fixture
def told(home: Path) -> Path:
    """A home with the history of two attempts and two ranks, out of order across files."""
    store = open_store(home)

    def tell(attempt: int, rank: int, t: float, event: str, step: int | None, **more: object) -> None:
        line = {"t": t, "event": event, "step": step, "attempt": attempt, "rank": rank, **more}
        store.append(names.history(attempt, rank), json.dumps(line).encode() + b"\n")

    tell(1, 0, 100.0, "staged", 100, bytes=1000, seconds=0.5)
    tell(1, 0, 103.0, "committed", 100, bytes=3_000_000_000, seconds=2.0, detail='ok, "fine"')
    tell(1, 1, 101.5, "staged", 100)
    tell(2, 0, 200.0, "restored", 100)
    tell(2, 0, 201.0, "ended", None)
    return home


def test_events_of_all_files_by_time(holdfast: Command, told: Path) -> None:
    events = holdfast("history", told, "--json").json
    assert [(e["t"], e["event"], e["rank"]) for e in events] == [
        (100.0, "staged", 0),
        (101.5, "staged", 1),
        (103.0, "committed", 0),
        (200.0, "restored", 0),
        (201.0, "ended", 0),
    ]


def test_table_has_speed_and_survives_missing_members(holdfast: Command, told: Path) -> None:
    lines = holdfast("history", told).out.splitlines()
    assert len(lines) == 6
    assert lines[3].split()[2:] == [
        "1",
        "0",
        "committed",
        "100",
        "3.0",
        "GB",
        "2.0",
        "s",
        "1.50",
        "ok,",
        '"fine"',
    ]
    assert lines[5].split()[2:] == ["2", "0", "ended", "-", "-", "-", "-"]


def test_csv_can_be_read_back(holdfast: Command, told: Path) -> None:
    rows = list(csv.DictReader(holdfast("history", told, "--csv").out.splitlines()))
    assert len(rows) == 5
    assert rows[2]["detail"] == 'ok, "fine"'
    assert (rows[2]["t"], rows[2]["bytes"], rows[4]["step"]) == ("103.0", "3000000000", "")


def test_filters_narrow(holdfast: Command, told: Path) -> None:
    def count(*words: object) -> int:
        return len(holdfast("history", told, "--json", *words).json)

    assert count("--event", "staged", "--event", "ended") == 3
    assert count("--step", 100) == 4
    assert count("--tail", 2) == 2
    assert holdfast("history", told, "--event", "nothing").out == "no events\n"


@pytest.mark.parametrize(
    "torn", [b'{"t":300,"event":"sta', b"\x00\x00\x00\n", b"[1]\n", b'{"t":"x","event":"y"}\n']
)
def test_a_torn_line_is_left_out_and_counted(holdfast: Command, told: Path, torn: bytes) -> None:
    open_store(told).append(names.history(2, 0), torn)
    said = holdfast("history", told, "--json")
    assert said.status == 0
    assert len(said.json) == 5
    assert "left out 1 line that" in said.err


def test_a_home_without_history_has_no_events(holdfast: Command, home: Path) -> None:
    said = holdfast("history", home)
    assert (said.status, said.out) == (0, "no events\n")
