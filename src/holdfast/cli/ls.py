"""`holdfast ls`: lists the checkpoints of a run, newest first."""

from __future__ import annotations

import argparse
import math
from collections import Counter

from holdfast.checkpoint.home.inventory import INCOMPLETE, SUPERSEDED, Inventory, Row, take_inventory
from holdfast.cli.homes import open_home, open_tiers, read_run_id
from holdfast.cli.options import Commands, add_home, add_json, command
from holdfast.cli.tables import format_age, print_json, print_table, print_text
from holdfast.errors import NotFound
from holdfast.system.units import format_bytes, plural

_EXAMPLES = """
holdfast ls runs/gpt
holdfast ls runs/gpt --all
holdfast ls runs/gpt --sort loss
holdfast ls runs/gpt --healthy
holdfast ls s3://bucket/run --local /nvme/run
holdfast ls runs/gpt --json | jq '.checkpoints[] | select(.is_newest).step'
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "ls", run, examples=_EXAMPLES)
    add_home(parser)
    parser.add_argument("--all", action="store_true", help="show superseded and incomplete checkpoints too")
    parser.add_argument("--healthy", action="store_true", help="show only checkpoints of healthy states")
    parser.add_argument(
        "--local",
        metavar="DIR",
        help="local folder of this host: list its checkpoints too, and the tiers that hold each checkpoint",
    )
    parser.add_argument(
        "--sort",
        metavar="METRIC",
        help="show the values of a recorded metric, such as loss: best first if the run keeps its best "
        "checkpoints by it, otherwise lowest first; see --reverse",
    )
    parser.add_argument("--reverse", action="store_true", help="reverse the order")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List a home. Only manifests and file sizes are read."""
    if args.local is None:
        store, home = open_home(args.home)
        inventory = take_inventory(store, home, read_run_id(store))
    else:
        store, home, tiers = open_tiers(args.home, args.local)
        inventory = take_inventory(store, home, read_run_id(store), tiers)
    rows = [row for row in inventory.rows if args.all or row.state not in (SUPERSEDED, INCOMPLETE)]
    listed = rows
    if args.healthy:
        rows = [row for row in rows if row.health.healthy]
    if args.sort is not None:
        rows = _sorted_by_metric(rows, args.sort, store.url, reverse=args.reverse)
    elif args.reverse:
        rows.reverse()
    if args.json:
        shown = [row.as_json() for row in rows]
        print_json({"home": store.url, "run": inventory.run_id, "checkpoints": shown})
        return 0
    if rows:
        columns = ("STEP", "ATTEMPT", "RANKS", "SIZE", "AGE", "STATE")
        health = ("HEALTH",) if any(row.health.healthy is not None for row in rows) else ()
        where = () if args.local is None else ("TIERS",)
        metric = () if args.sort is None else (args.sort,)
        print_table(
            (*columns[:3], *map(str.upper, metric), *columns[3:], *health, *where),
            (_cells(row, metric, health, where) for row in rows),
            right=(*columns[:4], *map(str.upper, metric)),
            text="TIERS" if where else None,
            spare=("RANKS", "ATTEMPT", "HEALTH"),
        )
    else:
        print("no checkpoints")
    _print_notes(inventory, rows, listed)
    return 0


def _sorted_by_metric(rows: list[Row], metric: str, url: str, *, reverse: bool) -> list[Row]:
    """Return rows by the value of a metric, those without a number last."""
    if rows and not any(metric in row.metrics for row in rows):
        known = ", ".join(sorted({name for row in rows for name in row.metrics})) or "none"
        raise NotFound(
            f"No checkpoint in {url} has a value of {metric!r}. Recorded metrics of checkpoints: {known}. "
            "Values are those given to record() for the step of a save.",
            key=metric,
        )
    values = {id(row): row.metrics.get(metric, math.nan) for row in rows}
    with_value = [row for row in rows if not math.isnan(values[id(row)])]
    modes = {row.checkpoint_id: row.metric_modes[metric] for row in rows if metric in row.metric_modes}
    reverse ^= bool(modes) and modes[max(modes)] == "max"
    without = [row for row in rows if math.isnan(values[id(row)])]
    return [*sorted(with_value, key=lambda row: values[id(row)], reverse=reverse), *without]


def _cells(
    row: Row, metric: tuple[str, ...], health: tuple[str, ...], where: tuple[str, ...]
) -> tuple[str, ...]:
    return (
        str(row.step),
        str(row.attempt),
        "-" if row.ranks is None else str(row.ranks),
        *(_format_metric(row, name) for name in metric),
        format_bytes(row.num_bytes),
        format_age(row.created_unix_s),
        f"{row.state}, newest" if row.is_newest else row.state,
        *(row.health.word for _ in health),
        *(", ".join(row.tiers) for _ in where),
    )


def _format_metric(row: Row, name: str) -> str:
    """Return a value as text, with its step where it was recorded for another one."""
    if name not in row.metrics:
        return "-"
    step = row.metric_steps.get(name)
    return f"{row.metrics[name]:.6g}" + ("" if step is None else f" (step {step})")


def _print_notes(inventory: Inventory, rows: list[Row], listed: list[Row]) -> None:
    """Print the defects of the listed checkpoints, and the numbers of the others.

    Args:
        listed: the rows, with those that are left out since they are not known to be healthy.
    """
    for row in rows:
        if row.reason and row.state != INCOMPLETE:
            print_text(f"step {row.step}, attempt {row.attempt}: {row.reason}")
        if row.health.healthy is False:
            print_text(f"step {row.step}, attempt {row.attempt}: unhealthy: {'; '.join(row.health.reasons)}")
    if len(listed) > len(rows):
        print(f"{plural(len(listed) - len(rows), 'checkpoint')} not known to be healthy not shown")
    hidden = Counter(row.state for row in inventory.rows if row not in listed)
    if hidden:
        what = " and ".join(f"{number} {state}" for state, number in sorted(hidden.items()))
        print(f"{what} not shown; use --all to show {'it' if hidden.total() == 1 else 'them'}")
    if inventory.home.foreign:
        print(f"{plural(len(inventory.home.foreign), 'foreign file')}, such as {inventory.home.foreign[0]}")
