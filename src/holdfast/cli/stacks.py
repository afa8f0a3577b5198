"""`holdfast stacks`: shows the place of each rank of a training, now or when it hung."""

from __future__ import annotations

import argparse

from holdfast.checkpoint.home.history import read_lines
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.cli.commands import HOME, argument, command
from holdfast.cli.homes import open_home
from holdfast.cli.tables import format_time, print_result
from holdfast.errors import NotFound
from holdfast.system.documents import to_plain
from holdfast.system.units import format_duration, plural
from holdfast.watch.hang import incidents


@command(
    "stacks",
    """
    holdfast stacks runs/gpt
    holdfast stacks runs/gpt --full
    holdfast stacks s3://bucket/gpt --recorded
    """,
    *HOME,
    argument("--recorded", "show the newest hang in the history instead of the processes on this machine"),
    argument("--full", "also print the stacks of all threads"),
)
def run(args: argparse.Namespace) -> None:
    """Show ranks grouped by place; those that the others wait for are marked with '>'."""
    store, _ = open_home(args.home)
    if args.recorded:
        hangs = incidents.list_hangs(read_lines(store)[0])
        if not hangs:
            raise NotFound(f"The history of {args.home} has no hang.")
        hang, ranks = hangs[-1], hangs[-1].ranks
        title = f"attempt {hang.attempt} hung at {format_time(hang.unix_s)}"
        title += f" for {format_duration(hang.over_s)}" if hang.over_s is not None else ""
    else:
        ranks = list(incidents.capture_host(absolute_place(args.home)).values())
        if not ranks:
            raise NotFound(
                f"No training on this machine saves to {args.home}. Run this on a machine of the training, "
                "as its user; or add --recorded to see the newest hang in the history."
            )
        title = f"{plural(len(ranks), 'rank')} on this machine"
    groups = incidents.group_ranks(ranks)
    lines = [f"{title}:", *(f"  {line}" for line in incidents.describe_groups(groups))]
    for rank in ranks if args.full else ():
        lines += ["", *incidents.format_stacks(rank)]
    rows = [{**to_plain(group), "kind": group.kind.value} for group in groups]
    print_result(args, {"groups": rows, "ranks": [to_plain(rank) for rank in ranks]}, "\n".join(lines))
