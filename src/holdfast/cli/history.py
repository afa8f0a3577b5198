"""`holdfast history`: what happened in a run, event by event."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from holdfast.cli.inventory import open_home
from holdfast.cli.options import Commands, add_home, add_json, command, count, step_number
from holdfast.cli.tables import plural, print_csv, print_json, print_table, say_moment
from holdfast.errors import NotFound
from holdfast.quantity import say_bytes, say_seconds
from holdfast.store import Store

COLUMNS = ("t", "event", "step", "attempt", "rank", "bytes", "seconds", "detail")
"""Members of an event, in the order of the CSV."""

_EXAMPLES = """
holdfast history runs/gpt
holdfast history runs/gpt --event committed --event restored --tail 20
holdfast history runs/gpt --csv > history.csv
"""

Event = dict[str, Any]


def add_parser(commands: Commands) -> None:
    """Add the command."""
    job = "Show what happened in a run: saves, commits, restores, failures, with bytes and seconds."
    parser = command(commands, "history", run, job=job, examples=_EXAMPLES)
    add_home(parser)
    parser.add_argument(
        "--event", action="append", metavar="E", help="only this kind of event; may be repeated"
    )
    parser.add_argument("--step", type=step_number, metavar="N", help="only this step")
    parser.add_argument("--tail", type=count, metavar="K", help="only the last K events")
    parser.add_argument("--csv", action="store_true", help="print CSV instead of a table")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show events in the order of their clocks."""
    store, _ = open_home(args.home)
    events, num_torn = read_events(store)
    if num_torn:
        print(f"holdfast: left out {plural(num_torn, 'line')} that a crash has torn", file=sys.stderr)
    events = [event for event in events if args.step in (None, event.get("step"))]
    events = [event for event in events if not args.event or event["event"] in args.event]
    events = events[-args.tail :] if args.tail else events
    if args.json:
        print_json(events)
    elif args.csv:
        print_csv(COLUMNS, ([event.get(column) for column in COLUMNS] for event in events))
    elif events:
        columns = ("TIME", "ATTEMPT", "RANK", "EVENT", "STEP", "SIZE", "SECONDS", "GB/S", "DETAIL")
        print_table(
            columns, map(_cells, events), right=("ATTEMPT", "RANK", "STEP", "SIZE", "SECONDS", "GB/S")
        )
    else:
        print("no events")
    return 0


def read_events(store: Store) -> tuple[list[Event], int]:
    """All events of a home by time, and how many lines were left out because they are not whole.

    Raises:
        RetryLater: the store failed.
    """
    events: list[Event] = []
    num_torn = 0
    for entry in sorted(store.list("history/"), key=lambda entry: entry.name):
        if not entry.name.endswith(".jsonl"):
            continue
        try:
            text = store.get(entry.name)
        except NotFound:
            continue  # removed since it was listed
        for line in text.splitlines():
            event = _parse(line)
            if event is None:
                num_torn += 1
            else:
                events.append(event)
    return sorted(events, key=lambda event: event["t"]), num_torn


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if whole and isinstance(event.get("t"), (int, float)) else None


def _number(event: Event, name: str) -> float:
    value = event.get(name)
    return value if isinstance(value, (int, float)) else 0


def _cells(event: Event) -> tuple[str, ...]:
    num_bytes, seconds = _number(event, "bytes"), _number(event, "seconds")
    return (
        say_moment(event["t"]),
        *(
            str(event[name]) if event.get(name) is not None else "-"
            for name in ("attempt", "rank", "event", "step")
        ),
        say_bytes(num_bytes) if num_bytes else "-",
        say_seconds(seconds) if seconds else "-",
        f"{num_bytes / seconds / 1e9:.2f}" if num_bytes and seconds else "-",
        str(event.get("detail") or ""),
    )
