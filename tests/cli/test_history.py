"""`holdfast history`: events, checkpoints and metrics, with and without torn lines."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cli.conftest import Command, append_event
from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import open_store


@pytest.fixture
def home_with_events(home: Path) -> Path:
    """Make a home with the history of two attempts and two ranks, out of order across files."""
    append_event(home, 1, 100.0, "staged", 100, bytes=1000, seconds=0.5)
    append_event(home, 1, 103.0, "committed", 100, bytes=3_000_000_000, seconds=2.0, detail='ok, "fine"')
    append_event(home, 1, 101.5, "staged", 100, rank=1)
    append_event(home, 2, 200.0, "restored", 100)
    append_event(home, 2, 201.0, "ended", None)
    return home


def test_events_of_all_files_by_time(holdfast: Command, home_with_events: Path) -> None:
    events = holdfast("history", home_with_events, "--json").json
    assert [(e["t"], e["event"], e["rank"]) for e in events] == [
        (100.0, "staged", 0),
        (101.5, "staged", 1),
        (103.0, "committed", 0),
        (200.0, "restored", 0),
        (201.0, "ended", 0),
    ]


def test_table_has_speed_and_survives_missing_members(holdfast: Command, home_with_events: Path) -> None:
    lines = holdfast("history", home_with_events).out.splitlines()
    assert len(lines) == 6
    assert " ".join(lines[3].split()[2:]) == '1 0 committed 100 home 3.0 GB 2.0 s 1.50 ok, "fine"'
    assert " ".join(lines[5].split()[2:]) == "2 0 ended - home - - -"


def test_csv_can_be_read_back(holdfast: Command, home_with_events: Path) -> None:
    rows = list(csv.DictReader(holdfast("history", home_with_events, "--csv").out.splitlines()))
    assert len(rows) == 5
    assert rows[2]["detail"] == 'ok, "fine"'
    assert (rows[2]["t"], rows[2]["bytes"], rows[4]["step"]) == ("103.0", "3000000000", "")
    assert (rows[2]["tier"], rows[2]["bytes_per_s"], rows[4]["bytes_per_s"]) == ("home", "1500000000.0", "")


def test_filters_narrow(holdfast: Command, home_with_events: Path) -> None:
    def count(*words: object) -> int:
        return len(holdfast("history", home_with_events, "--json", *words).json)

    assert count("--event", "staged", "--event", "ended") == 3
    assert count("--step", 100) == 4
    assert count("--tail", 2) == 2
    assert holdfast("history", home_with_events, "--event", "skipped").out == "no events\n"


@pytest.mark.parametrize(
    "torn", [b'{"t":300,"event":"sta', b"\x00\x00\x00\n", b"[1]\n", b'{"t":"x","event":"y"}\n']
)
def test_a_torn_line_is_ignored_and_counted(holdfast: Command, home_with_events: Path, torn: bytes) -> None:
    open_store(home_with_events).append(names.history(2, 0), torn)
    result = holdfast("history", home_with_events, "--json")
    assert result.status == 0
    assert len(result.json) == 5
    assert "ignored 1 line cut off by a crash" in result.err


@pytest.mark.parametrize("words", ["no events", "no metrics --metrics", "no checkpoints --checkpoints"])
def test_a_home_without_history_has_no_rows(holdfast: Command, home: Path, words: str) -> None:
    no, what, *options = words.split()
    result = holdfast("history", home, *options)
    assert (result.status, result.out) == (0, f"{no} {what}\n")


# -- checkpoint by checkpoint ----------------------------------------------------------------------------


@pytest.fixture
def tiered(home: Path) -> Path:
    """Make a home with the history of a drained save and a failed one."""
    for t, event, step, seconds, tier in (
        (100.25, "saved", 50, 0.25, ""),
        (100.5, "staged", 50, 0.5, ""),
        (102.5, "persisted", 50, 2.0, "local"),
        (103.0, "committed", 50, 2.5, "local"),
        (120.0, "drained", 50, 8.0, "home"),
        (130.25, "saved", 60, 0.25, ""),
    ):
        append_event(home, 2, t, event, step, bytes=4000, seconds=seconds, tier=tier)
    append_event(home, 2, 131.0, "failed", 60, detail="disk full", tier="local")
    return home


def test_each_checkpoint_in_each_tier_is_a_row(holdfast: Command, tiered: Path) -> None:
    rows = holdfast("history", tiered, "--checkpoints", "--json").json
    assert [(row["step"], row["tier"], row["outcome"]) for row in rows] == [
        (50, "local", "durable"),
        (50, "home", "durable"),
        (60, None, "failed"),
    ]
    assert rows[0] == {
        **{"step": 50, "attempt": 2, "tier": "local", "t": 100.0, "ranks": 1, "bytes": 4000},
        **{"blocked_s": 0.25, "staged_s": 0.5, "write_s": 2.0, "bytes_per_s": 2000.0, "durable_s": 3.0},
        **{"outcome": "durable", "detail": ""},
    }
    assert (rows[1]["write_s"], rows[1]["bytes_per_s"], rows[1]["durable_s"]) == (8.0, 500.0, 20.0)
    assert (rows[2]["detail"], rows[2]["durable_s"]) == ("disk full", None)


def test_checkpoints_as_csv_and_as_a_table_have_the_same_columns(holdfast: Command, tiered: Path) -> None:
    rows = list(csv.DictReader(holdfast("history", tiered, "--checkpoints", "--csv").out.splitlines()))
    as_json = holdfast("history", tiered, "--checkpoints", "--json").json
    assert [list(row) for row in rows] == [list(row) for row in as_json]
    assert (rows[0]["blocked_s"], rows[2]["tier"], rows[2]["outcome"]) == ("0.25", "", "failed")
    lines = holdfast("history", tiered, "--checkpoints").out.splitlines()
    assert len(lines) == 4
    assert " ".join(lines[1].split()[5:]) == "4.0 kB 250.0 ms 500.0 ms 2.0 s 0.00 3.0 s durable"
    assert lines[3].endswith("failed: disk full")


def test_filters_narrow_checkpoints_too(holdfast: Command, tiered: Path) -> None:
    def steps(*words: object) -> list[int]:
        return [row["step"] for row in holdfast("history", tiered, "--checkpoints", "--json", *words).json]

    assert steps("--tier", "home") == [50]
    assert steps("--step", 60) == [60]
    assert steps("--tail", 1) == [60]
    assert holdfast("history", tiered, "--checkpoints", "--tier", "memory").out == "no checkpoints\n"
    events = holdfast("history", tiered, "--tier", "local", "--json").json
    assert [event["event"] for event in events] == ["persisted", "committed", "failed"]


@pytest.fixture
def home_with_losses(home_with_events: Path) -> Path:
    """Add losses: attempt 2 resumes from step 100 of attempt 1."""
    for attempt, steps in {1: [99, 100, 101], 2: [101, 102]}.items():
        values = {"loss": [float(attempt), 0.125, "nan"][: len(steps)], "lr": [0.1] * len(steps)}
        t = 100.0 * attempt + 50
        append_event(home_with_events, attempt, t, "metrics", max(steps), steps=steps, values=values)
    return home_with_events


def test_metrics_have_one_value_per_step_and_name(holdfast: Command, home_with_losses: Path) -> None:
    rows = holdfast("history", home_with_losses, "--metrics", "--json").json
    losses = [(row["step"], row["attempt"], row["value"]) for row in rows if row["name"] == "loss"]
    assert losses == [(99, 1, 1.0), (100, 1, 0.125), (101, 2, 2.0), (102, 2, 0.125)]
    assert all(row["counts"] for row in rows)
    assert len(holdfast("history", home_with_losses, "--metrics", "--json", "--step", 100).json) == 2


def test_lost_steps_are_shown_with_lost(holdfast: Command, home_with_losses: Path) -> None:
    out = holdfast("history", home_with_losses, "--metrics", "--lost", "--csv").out
    rows = list(csv.DictReader(out.splitlines()))
    names = ("step", "attempt", "name", "value")
    lost = [tuple(row[name] for name in names) for row in rows if row["counts"] == "False"]
    assert lost == [("101", "1", "loss", "nan"), ("101", "1", "lr", "0.1")]
    lines = holdfast("history", home_with_losses, "--metrics", "--lost").out.splitlines()
    assert lines[5].split() == ["101", "1", "loss", "nan", "lost"]


def test_metrics_are_hidden_among_events_unless_chosen(holdfast: Command, home_with_losses: Path) -> None:
    assert len(holdfast("history", home_with_losses, "--json").json) == 5
    assert len(holdfast("history", home_with_losses, "--event", "metrics", "--json").json) == 2


def test_an_unknown_event_is_an_error_with_the_valid_ones(holdfast: Command, home: Path) -> None:
    holdfast("history", home, "--event", "comitted").refused(
        "The event 'comitted' does not exist. Did you mean committed?", "drained"
    )
