"""`holdfast drain`: waits until all files of a write-back directory are in its bucket."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from holdfast.cli import FOUND, print_note
from holdfast.cli.commands import argument, command, either
from holdfast.cli.tables import Column, print_result, print_table
from holdfast.errors import RetryLater
from holdfast.system.units import format_bytes, parse_duration

if TYPE_CHECKING:
    from holdfast.jobs.writeback import DirectoryStatus

_MAX_ROWS = 20


@command(
    "drain",
    """
    holdfast drain /checkpoints
    holdfast drain /checkpoints --timeout 90s || echo "some files are missing"
    holdfast drain /checkpoints --status --json | jq .is_drained
    """,
    argument("directory DIR", "the write-back directory"),
    either(argument("--status", "show the status without waiting"), argument("--wait", "wait (default)")),
    argument("--timeout T", "longest time to wait, such as 90s or 5m (default: no limit)"),
    details="Files that are not are listed, and the exit status is 1.",
)
def run(args: argparse.Namespace) -> int:
    """Wait, or show the status. The exit status is 0 only if all files are in the bucket."""
    from holdfast.jobs.writeback import status_of, wait_until_settled

    limit_s = None if args.timeout is None else parse_duration(args.timeout, "--timeout")
    if args.status:
        status = status_of(args.directory)
    else:
        try:
            status = wait_until_settled(args.directory, timeout_s=limit_s)
        except RetryLater:
            if limit_s is None:
                raise
            status = status_of(args.directory)  # the time is over: list the rest
    print_result(args, status.as_json(), lambda: _print(status))
    return 0 if status.is_drained else FOUND


def _print(status: DirectoryStatus) -> None:
    states = {"waiting": status.waiting, "just changed": status.unread, "being written": status.written}
    states["left out"] = status.left_out
    rows = [(one, state) for state, found in states.items() for one in found]
    if rows:
        columns = (
            Column("NAME", lambda row: row[0].name, "name"),
            Column("SIZE", lambda row: format_bytes(row[0].num_bytes) if row[0].num_bytes else None, "right"),
            Column("STATE", lambda row: row[1]),
            Column("WHY", lambda row: row[0].why or None, "text"),
        )
        print_table(columns, rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        print(f"... {len(rows)} in all")
    print(status.summary())
    if status.trouble:
        print_note(status.trouble)
    if not status.is_running and status.num_unsent:
        print_note(
            f"the uploader is {status.uploader}. The remaining files are uploaded after the directory has "
            "been mounted again."
        )
