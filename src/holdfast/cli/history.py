"""`holdfast history`: shows the events, checkpoints or metrics of a run."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Iterable
from typing import Any

from holdfast.checkpoint.home.history import EVENTS, read_lines
from holdfast.cli.homes import open_home
from holdfast.cli.options import Commands, add_home, add_json, command, count, step_number
from holdfast.cli.tables import format_time, print_csv, print_json, print_table
from holdfast.errors import InvalidInput
from holdfast.system.units import format_bytes, format_duration, plural
from holdfast.watch.defaults import default_watches
from holdfast.watch.pace.windows import EVENT as PACE
from holdfast.watch.report.curves import Point, collect_curves
from holdfast.watch.report.events import METRICS, TIERS, parse_events, tier_of
from holdfast.watch.report.saves import Copy, SaveRecord, collect_saves

_HIDDEN = (METRICS, PACE)
"""Events that would hide the others: a line every few seconds or minutes. The report draws them."""
COLUMNS = ("t", "event", "step", "attempt", "rank", "bytes", "seconds", "detail", "tier", "bytes_per_s")
"""Columns of an event, in the order of the CSV. New ones are appended."""
SAVE_COLUMNS = (
    "step",
    "attempt",
    "tier",
    "t",
    "ranks",
    "bytes",
    "blocked_s",
    "staged_s",
    "write_s",
    "bytes_per_s",
    "durable_s",
    "outcome",
    "detail",
)
"""Columns of a checkpoint in one tier, in the order of the CSV. New ones are appended."""

METRIC_COLUMNS = ("step", "attempt", "name", "value", "counts")
"""Columns of a metric, in the order of the CSV. New ones are appended."""

_EXAMPLES = """
holdfast history runs/gpt
holdfast history runs/gpt --event committed --event restored --tail 20
holdfast history runs/gpt --checkpoints --tier home
holdfast history runs/gpt --checkpoints --csv > checkpoints.csv
holdfast history runs/gpt --metrics --csv > loss.csv
"""

Event = dict[str, Any]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "history", run, examples=_EXAMPLES)
    add_home(parser)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--checkpoints",
        action="store_true",
        help="show checkpoints instead of events: one row per checkpoint and tier, with durations and speed",
    )
    kinds.add_argument(
        "--metrics",
        action="store_true",
        help="show metrics instead of events, such as the loss: one row per step and name",
    )
    parser.add_argument(
        "--lost", action="store_true", help="with --metrics: include steps that were lost in interruptions"
    )
    parser.add_argument(
        "--event",
        action="append",
        metavar="E",
        help="only events of this kind, such as committed; can be repeated",
    )
    parser.add_argument("--step", type=step_number, metavar="N", help="only this step")
    parser.add_argument("--tier", choices=TIERS, help="only this tier")
    parser.add_argument("--tail", type=count, metavar="K", help="only the last K rows")
    parser.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show events by time, checkpoints by save, or metrics by step."""
    store, _ = open_home(args.home)
    events, num_torn = read_lines(store)
    if num_torn:
        print(f"holdfast: ignored {plural(num_torn, 'line')} cut off by a crash", file=sys.stderr)
    rows = _rows(events, args)
    rows = [row for row in rows if args.step in (None, row.get("step"))]
    rows = [row for row in rows if args.tier in (None, row.get("tier"))]
    _show(rows[-args.tail :] if args.tail else rows, args)
    return 0


def _rows(lines: list[Event], args: argparse.Namespace) -> list[Event]:
    if args.metrics:
        return _metrics(lines, with_lost=args.lost)
    if args.checkpoints:
        return _checkpoints(lines)
    _check_events(args.event or (), {line["event"] for line in lines})
    rows = [_with_speed(line) for line in lines if args.event or line["event"] not in _HIDDEN]
    return [row for row in rows if not args.event or row["event"] in args.event]


def _check_events(asked: Iterable[str], found: set[str]) -> None:
    """Check the names of events."""
    known = sorted({*EVENTS, *(event for watch in default_watches() for event in watch.events), *found})
    for name in asked:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise InvalidInput(f"The event {name!r} does not exist.{hint} Events are: {', '.join(known)}.")


def _show(rows: list[Event], args: argparse.Namespace) -> None:
    columns = METRIC_COLUMNS if args.metrics else SAVE_COLUMNS if args.checkpoints else COLUMNS
    if args.json:
        print_json(rows)
    elif args.csv:
        print_csv(columns, ([row.get(column) for column in columns] for row in rows))
    elif not rows:
        print("no metrics" if args.metrics else "no checkpoints" if args.checkpoints else "no events")
    elif args.metrics:
        _print_metrics(rows)
    elif args.checkpoints:
        _print_checkpoints(rows)
    else:
        _print_events(rows)


# -- events ----------------------------------------------------------------------------------------------


def _with_speed(event: Event) -> Event:
    """Return the event with its tier and its speed."""
    num_bytes, seconds = _number(event, "bytes"), _number(event, "seconds")
    return {
        **event,
        "tier": tier_of(event),
        "bytes_per_s": num_bytes / seconds if num_bytes and seconds else None,
    }


def _number(event: Event, name: str) -> float:
    value = event.get(name)
    return value if isinstance(value, (int, float)) else 0


def _print_events(events: Iterable[Event]) -> None:
    columns = ("TIME", "ATTEMPT", "RANK", "EVENT", "STEP", "TIER", "SIZE", "SECONDS", "GB/S", "DETAIL")
    print_table(
        columns,
        map(_cells, events),
        right=("ATTEMPT", "RANK", "STEP", "SIZE", "SECONDS", "GB/S"),
        text="DETAIL",
        spare=("GB/S", "RANK", "TIER"),
    )


def _cells(event: Event) -> tuple[str, ...]:
    num_bytes, seconds = _number(event, "bytes"), _number(event, "seconds")
    return (
        format_time(event["t"]),
        *(
            str(event[name]) if event.get(name) is not None else "-"
            for name in ("attempt", "rank", "event", "step", "tier")
        ),
        format_bytes(num_bytes) if num_bytes else "-",
        format_duration(seconds) if seconds else "-",
        _format_speed(event["bytes_per_s"]),
        str(event.get("detail") or ""),
    )


def _format_speed(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}"


# -- checkpoints -----------------------------------------------------------------------------------------


def _checkpoints(lines: list[Event]) -> list[Event]:
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


def _print_checkpoints(rows: Iterable[Event]) -> None:
    columns = (
        "STEP",
        "ATTEMPT",
        "TIER",
        "TIME",
        "SIZE",
        "BLOCKED",
        "STAGED",
        "WRITTEN IN",
        "GB/S",
        "DURABLE IN",
        "OUTCOME",
    )
    cells = (
        (
            str(row["step"]),
            str(row["attempt"]),
            row["tier"] or "-",
            format_time(row["t"]),
            format_bytes(row["bytes"]) if row["bytes"] else "-",
            *(
                "-" if row[name] is None else format_duration(row[name])
                for name in ("blocked_s", "staged_s", "write_s")
            ),
            _format_speed(row["bytes_per_s"]),
            "-" if row["durable_s"] is None else format_duration(row["durable_s"]),
            f"{row['outcome']}: {row['detail']}" if row["detail"] else row["outcome"],
        )
        for row in rows
    )
    print_table(
        columns,
        cells,
        right=("STEP", "ATTEMPT", "SIZE", *columns[5:10]),
        text="OUTCOME",
        spare=("STAGED", "WRITTEN IN", "ATTEMPT", "GB/S"),
    )


# -- metrics ---------------------------------------------------------------------------------------------


def _metrics(lines: list[Event], *, with_lost: bool) -> list[Event]:
    events = parse_events(lines)
    rows: list[Event] = []
    for curve in collect_curves(events, [save.checkpoint_id for save in collect_saves(events)]):
        rows += [_number_row(curve.name, point, counts=True) for point in curve.counted]
        lost = (point for stretch in curve.lost for point in stretch)
        rows += [_number_row(curve.name, point, counts=False) for point in lost if with_lost]
    return sorted(rows, key=lambda row: (row["step"], row["attempt"]))


def _number_row(name: str, point: Point, *, counts: bool) -> Event:
    # JSON has no NaN and no infinity.
    value = point.value if math.isfinite(point.value) else str(point.value)
    return {"step": point.step, "attempt": point.attempt, "name": name, "value": value, "counts": counts}


def _print_metrics(rows: Iterable[Event]) -> None:
    cells = (
        (
            str(row["step"]),
            str(row["attempt"]),
            row["name"],
            f"{float(row['value']):.6g}",
            "" if row["counts"] else "lost",
        )
        for row in rows
    )
    print_table(
        ("STEP", "ATTEMPT", "NAME", "VALUE", ""), cells, right=("STEP", "ATTEMPT", "VALUE"), names=("NAME",)
    )
