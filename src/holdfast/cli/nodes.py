"""`holdfast nodes`: lists the machines of jobs, with the attempts that they have lost."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from holdfast.cli.jobs import print_errors
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import format_time, print_json, print_table
from holdfast.jobs.engine import each
from holdfast.jobs.interface import clear_node, nodes
from holdfast.jobs.machines.judgement import NodeStanding

_EXAMPLES = """
holdfast nodes
holdfast nodes --json | jq -r '.[] | select(.stands_out) | .name'
holdfast nodes --clear gpu-17
"""
_COLUMNS = ("NODE", "ATTEMPTS", "LOST", "CHECKS", "CHANCE", "STANDS OUT", "LAST TROUBLE", "WHY")


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "A node stands out if it has lost attempts so often that chance does not explain it, or if a check "
        "on it returned a wrong result. On Slurm, new attempts leave such nodes out. "
        "CHECKS counts failed checks; CHANCE is the probability that some node loses this many attempts "
        "by chance. Events expire after 30 days."
    )
    parser = command(commands, "nodes", run, details=details, examples=_EXAMPLES)
    parser.add_argument(
        "--clear",
        action="append",
        default=[],
        metavar="NAME",
        help="forget what is recorded about a node, so that jobs use it again; can be repeated",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List the nodes, or clear some."""
    results = zip(args.clear, each(clear_node, args.clear), strict=True)
    failed = {name: one for name, one in results if one is not None}
    cleared = [name for name in args.clear if name not in failed]
    found = nodes()
    if args.json:
        print_json([asdict(one) for one in found])
    elif args.clear:
        print(f"cleared: {', '.join(cleared) or 'no node'}")
    elif not found:
        print("no attempts in the last 30 days")
    else:
        print_table(
            _COLUMNS,
            map(_cells, found),
            right=("ATTEMPTS", "LOST", "CHECKS", "CHANCE"),
            names=("NODE",),
            text="WHY",
            spare=("LAST TROUBLE", "CHANCE"),
        )
    return print_errors(failed.values())


def _cells(one: NodeStanding) -> tuple[str, ...]:
    return (
        one.name,
        str(one.attempts),
        str(one.lost),
        str(sum(one.failed_checks.values())),
        _chance(one),
        "yes" if one.stands_out else "no",
        "-" if one.lost_unix_s is None else format_time(one.lost_unix_s),
        "; ".join(one.reasons),
    )


def _chance(one: NodeStanding) -> str:
    if not one.lost:
        return "-"
    return f"{one.chance:.3f}" if one.chance >= 0.001 else "<0.001"
