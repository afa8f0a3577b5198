"""`holdfast history`: shows the events, checkpoints or metrics of a run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

from holdfast.checkpoint.home.history import EVENTS, read_lines
from holdfast.cli import print_note
from holdfast.cli.commands import HOME, argument, command, count, either, nearest, repeated, step_number
from holdfast.cli.homes import open_home
from holdfast.cli.tables import Column, format_time, print_csv, print_result, print_table
from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, format_duration, plural
from holdfast.watch.defaults import default_watches
from holdfast.watch.pace.windows import EVENT as PACE
from holdfast.watch.report.curves import Point, collect_curves
from holdfast.watch.report.saves import METRICS, TIERS, Copy, SaveRecord, collect_saves, parse_events, tier_of

_HIDDEN = (METRICS, PACE)
"""Events that would hide the others: a line every few seconds or minutes. The report draws them."""
# Columns of the CSV, in their order. New ones are appended.
COLUMNS = ("t", "event", "step", "attempt", "rank", "bytes", "seconds", "detail", "tier", "bytes_per_s")
SAVE_COLUMNS = (
    *("step", "attempt", "tier", "t", "ranks", "bytes", "blocked_s", "staged_s", "write_s", "bytes_per_s"),
    *("durable_s", "outcome", "detail"),
)
METRIC_COLUMNS = ("step", "attempt", "name", "value", "counts")
Event = dict[str, Any]


@command(
    "history",
    """
    holdfast history runs/gpt
    holdfast history runs/gpt --event committed --event restored --tail 20
    holdfast history runs/gpt --checkpoints --tier home
    holdfast history runs/gpt --checkpoints --csv > checkpoints.csv
    holdfast history runs/gpt --metrics --csv > loss.csv
    """,
    *HOME,
    either(
        argument(
            "--checkpoints",
            "show checkpoints instead of events: one row per checkpoint and tier, with durations and speed",
        ),
        argument("--metrics", "show metrics instead of events, such as the loss: one row per step and name"),
    ),
    argument("--lost", "with --metrics: include steps that were lost in interruptions"),
    repeated("--event E", "only events of this kind, such as committed"),
    argument("--step N", "only this step", step_number),
    argument("--tier", "only this tier", choices=TIERS),
    argument("--tail K", "only the last K rows", count),
    argument("--csv", "print CSV instead of a table"),
)
def run(args: argparse.Namespace) -> None:
    """Show events by time, checkpoints by save, or metrics by step."""
    store, _ = open_home(args.home)
    events, num_torn = read_lines(store)
    if num_torn:
        print_note(f"ignored {plural(num_torn, 'line')} cut off by a crash")
    what = "metrics" if args.metrics else "checkpoints" if args.checkpoints else "events"
    rows_of, names, columns = _VIEWS[what]
    rows = [row for row in rows_of(events, args) if args.step in (None, row.get("step"))]
    rows = [row for row in rows if args.tier in (None, row.get("tier"))]
    rows = rows[-args.tail :] if args.tail else rows
    if args.csv and not args.json:
        print_csv(names, ([row.get(name) for name in names] for row in rows))
    else:
        print_result(args, rows, partial(print_table, columns, rows) if rows else f"no {what}")


def _events(lines: list[Event], args: argparse.Namespace) -> list[Event]:
    found, asked = {line["event"] for line in lines}, args.event
    known = sorted({*EVENTS, *(event for watch in default_watches() for event in watch.events), *found})
    for name in asked:
        if name not in known:
            hint = f"{nearest(name, known)} Events are: {', '.join(known)}."
            raise InvalidInput(f"The event {name!r} does not exist.{hint}")
    shown = asked or found.difference(_HIDDEN)
    return [_with_speed(line) for line in lines if line["event"] in shown]


def _number(row: Event, name: str) -> float:
    value = row.get(name)
    return value if isinstance(value, (int, float)) else 0


def _amount(name: str, form: Callable[[float], str]) -> Callable[[Event], str | None]:
    """Return the function that formats a number of a row, which may be missing."""
    return lambda row: form(value) if (value := _number(row, name)) else None


def _span(name: str) -> Callable[[Event], str | None]:
    """Return the function that formats a duration of a row."""
    return lambda row: None if row[name] is None else format_duration(row[name])


def _speed(row: Event) -> str | None:
    return None if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.2f}"


def _with_speed(event: Event) -> Event:
    """Return the event with its tier and its speed."""
    num_bytes, seconds = _number(event, "bytes"), _number(event, "seconds")
    speed = num_bytes / seconds if num_bytes and seconds else None
    return {**event, "tier": tier_of(event), "bytes_per_s": speed}


_EVENT_TABLE = (
    Column("TIME", lambda event: format_time(event["t"])),
    Column("ATTEMPT", lambda event: event.get("attempt"), "right"),
    Column("RANK", lambda event: event.get("rank"), "right", spare=2),
    Column("EVENT", lambda event: event.get("event")),
    Column("STEP", lambda event: event.get("step"), "right"),
    Column("TIER", lambda event: event.get("tier"), spare=3),
    Column("SIZE", _amount("bytes", format_bytes), "right"),
    Column("SECONDS", _amount("seconds", format_duration), "right"),
    Column("GB/S", _speed, "right", spare=1),
    Column("DETAIL", lambda event: event.get("detail") or "", "text"),
)


def _checkpoints(lines: list[Event], _args: argparse.Namespace) -> list[Event]:
    saves = collect_saves(parse_events(lines))
    return [_row(save, copy) for save in saves for copy in save.copies or (None,)]


def _row(save: SaveRecord, copy: Copy | None) -> Event:
    is_durable = copy is not None and copy.durable_unix_s is not None
    return {
        "step": save.step,
        "attempt": save.attempt,
        "tier": copy.tier if copy else None,
        "t": round(save.started_unix_s, 6),
        "ranks": save.num_ranks,
        "bytes": save.num_bytes,
        "blocked_s": save.blocked_s,
        "staged_s": save.staged_s,
        "write_s": copy.write_s if copy else None,
        "bytes_per_s": copy.bytes_per_s if copy else None,
        "durable_s": None if copy is None or copy.durable_s is None else round(copy.durable_s, 6),
        "outcome": "durable" if is_durable else "unfinished" if save.outcome == "durable" else save.outcome,
        "detail": save.detail,
    }


_SAVE_TABLE = (
    Column("STEP", itemgetter("step"), "right"),
    Column("ATTEMPT", itemgetter("attempt"), "right", spare=3),
    Column("TIER", itemgetter("tier")),
    Column("TIME", lambda row: format_time(row["t"])),
    Column("SIZE", _amount("bytes", format_bytes), "right"),
    Column("BLOCKED", _span("blocked_s"), "right"),
    Column("STAGED", _span("staged_s"), "right", spare=1),
    Column("WRITTEN IN", _span("write_s"), "right", spare=2),
    Column("GB/S", _speed, "right", spare=4),
    Column("DURABLE IN", _span("durable_s"), "right"),
    Column("OUTCOME", lambda row: ": ".join(filter(None, (row["outcome"], row["detail"]))), "text"),
)


def _metrics(lines: list[Event], args: argparse.Namespace) -> list[Event]:
    events = parse_events(lines)
    rows: list[Event] = []
    for curve in collect_curves(events, [save.checkpoint_id for save in collect_saves(events)]):
        rows += [_number_row(curve.name, point, counts=True) for point in curve.counted]
        lost = (point for stretch in curve.lost for point in stretch)
        rows += [_number_row(curve.name, point, counts=False) for point in lost if args.lost]
    return sorted(rows, key=lambda row: (row["step"], row["attempt"]))


def _number_row(name: str, point: Point, *, counts: bool) -> Event:
    # JSON has no NaN and no infinity.
    value = point.value if math.isfinite(point.value) else str(point.value)
    return {"step": point.step, "attempt": point.attempt, "name": name, "value": value, "counts": counts}


_METRIC_TABLE = (
    Column("STEP", itemgetter("step"), "right"),
    Column("ATTEMPT", itemgetter("attempt"), "right"),
    Column("NAME", itemgetter("name"), "name"),
    Column("VALUE", lambda row: f"{float(row['value']):.6g}", "right"),
    Column("", lambda row: "" if row["counts"] else "lost"),
)
_VIEWS = {
    "events": (_events, COLUMNS, _EVENT_TABLE),
    "checkpoints": (_checkpoints, SAVE_COLUMNS, _SAVE_TABLE),
    "metrics": (_metrics, METRIC_COLUMNS, _METRIC_TABLE),
}
"""For each kind of rows: their function, the columns of the CSV, and those of the table."""
