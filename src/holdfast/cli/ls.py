"""`holdfast ls`: lists the checkpoints of a run, newest first."""

from __future__ import annotations

import argparse
import math
from collections import Counter

from holdfast.checkpoint.home.inventory import INCOMPLETE, SUPERSEDED, Inventory, Row, take_inventory
from holdfast.cli.commands import HOME, argument, command
from holdfast.cli.homes import open_tiers, read_run_id
from holdfast.cli.tables import Column, format_age, print_json, print_table, print_text
from holdfast.errors import NotFound
from holdfast.system.units import format_bytes, plural


@command(
    "ls",
    """
    holdfast ls runs/gpt
    holdfast ls runs/gpt --all
    holdfast ls runs/gpt --sort loss
    holdfast ls runs/gpt --healthy
    holdfast ls s3://bucket/run --local /nvme/run
    holdfast ls runs/gpt --json | jq '.checkpoints[] | select(.is_newest).step'
    """,
    *HOME,
    argument("--all", "show superseded and incomplete checkpoints too"),
    argument("--healthy", "show only checkpoints of healthy states"),
    argument(
        "--local DIR",
        "local folder of this host: list its checkpoints too, and the tiers that hold each checkpoint",
    ),
    argument(
        "--sort METRIC",
        "show the values of a recorded metric, such as loss: best first if the run keeps its best "
        "checkpoints by it, otherwise lowest first; see --reverse",
    ),
    argument("--reverse", "reverse the order"),
)
def run(args: argparse.Namespace) -> None:
    """List a home. Only manifests and file sizes are read."""
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
        return
    if rows:
        print_table(_columns(rows, metric=args.sort, has_tiers=args.local is not None), rows)
    else:
        print("no checkpoints")
    _print_notes(inventory, rows, listed)


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


def _columns(rows: list[Row], *, metric: str | None, has_tiers: bool) -> list[Column]:
    columns = [
        Column("STEP", lambda row: row.step, "right"),
        Column("ATTEMPT", lambda row: row.attempt, "right", spare=2),
        Column("RANKS", lambda row: row.ranks, "right", spare=1),
        Column("SIZE", lambda row: format_bytes(row.num_bytes), "right"),
        Column("AGE", lambda row: format_age(row.created_unix_s)),
        Column("STATE", lambda row: f"{row.state}, newest" if row.is_newest else row.state),
    ]
    if metric is not None:
        columns.insert(3, Column(metric.upper(), lambda row: _format_metric(row, metric), "right"))
    if any(row.health.healthy is not None for row in rows):
        columns.append(Column("HEALTH", lambda row: row.health.word, spare=3))
    if has_tiers:
        columns.append(Column("TIERS", lambda row: ", ".join(row.tiers), "text"))
    return columns


def _format_metric(row: Row, name: str) -> str | None:
    """Return a value as text, with its step where it was recorded for another one."""
    if name not in row.metrics:
        return None
    step = row.metric_steps.get(name)
    return f"{row.metrics[name]:.6g}" + ("" if step is None else f" (step {step})")


def _print_notes(inventory: Inventory, rows: list[Row], listed: list[Row]) -> None:
    """Print the defects of the rows, and the number of others. `listed` has the unhealthy ones too."""
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
