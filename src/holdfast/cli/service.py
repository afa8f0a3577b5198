"""`holdfast service`: continues the jobs of this user after a restart of the machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from holdfast.cli.jobs import job_row
from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_fields, print_json
from holdfast.jobs.folder import state_dir
from holdfast.jobs.records import Records
from holdfast.jobs.service.installation import Service, install, start, status, uninstall
from holdfast.system.units import plural

_EXAMPLES = """
holdfast service install
holdfast service status --json
HOLDFAST_STATE=/data/jobs holdfast service uninstall
"""
_NOT_INSTALLED = 1
"""Exit status of `status` without a service."""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = (
        "Each state folder (HOLDFAST_STATE) has a service of its own.\n\n"
        "actions:\n"
        "  install    continue the jobs on this machine when it starts, by a systemd user unit\n"
        "  uninstall  remove the unit; jobs continue\n"
        "  status     show what is installed, and the line for cron where systemd is not running;\n"
        "             exit status 1 if nothing is installed\n"
        "  start      start the controllers of all jobs that have not ended, as the service does"
    )
    parser = command(commands, "service", run, details=details, examples=_EXAMPLES)
    parser.add_argument("action", choices=tuple(_ACTIONS), metavar="ACTION", help=", ".join(_ACTIONS))
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run an action."""
    return _ACTIONS[args.action](args)


def _install(args: argparse.Namespace) -> int:
    found = install()
    if args.json:
        print_json(asdict(found))
        return 0
    print(f"installed: systemd continues the jobs in {found.state} when this machine starts")
    print(f"to see it: holdfast service status ({found.unit})")
    _warn(found)
    return 0


def _uninstall(args: argparse.Namespace) -> int:
    existed = uninstall()
    if args.json:
        print_json({"removed": existed})
    else:
        print("removed; the jobs continue" if existed else "it was not installed, so nothing was removed")
    return 0


def _status(args: argparse.Namespace) -> int:
    found = status()
    if args.json:
        print_json(asdict(found))
    else:
        print_fields(_fields(found), width=12)
        _warn(found)
    return 0 if found.unit else _NOT_INSTALLED


def _start(args: argparse.Namespace) -> int:
    jobs = start()
    for message in Records(state_dir()).unreadable():
        print(f"holdfast: {message}", file=sys.stderr)
    if args.json:
        print_json([job_row(job) for job in jobs])
    elif not jobs:
        print("no jobs to continue")
    else:
        for job in jobs:
            print(f"job {job.id} ({job.name}) is {job.status.value}")
    return 0


_ACTIONS = {"install": _install, "uninstall": _uninstall, "status": _status, "start": _start}


def _fields(found: Service) -> list[tuple[str, str]]:
    numbers = f": {', '.join(map(str, found.starts))}" if found.starts else ""
    jobs = f"{plural(len(found.starts), 'job')} now{numbers}"
    place = f"by systemd ({found.unit})" if found.unit else "no; see `holdfast service install`"
    return [
        ("service", found.name),
        ("installed", place),
        ("jobs in", found.state),
        ("continues", jobs),
        ("runs", found.command),
        ("for cron", found.cron_line or "too long for cron"),
    ]


def _warn(found: Service) -> None:
    for problem in found.problems:
        print(f"holdfast: {problem}", file=sys.stderr)
