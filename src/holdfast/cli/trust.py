"""`holdfast trust`: says which homes may bring compiled code, which is run."""

from __future__ import annotations

import argparse

from holdfast.cli.options import Commands, add_json, command
from holdfast.cli.tables import print_json
from holdfast.errors import InvalidInput, NotFound

_EXAMPLES = """
holdfast trust s3://my-bucket/runs
holdfast trust runs/gpt
holdfast trust --list
holdfast trust --remove s3://my-bucket/runs
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    job = "Trust a home, or all homes in a folder: compiled code that lies there is loaded, and so run."
    parser = command(commands, "trust", run, job=job, examples=_EXAMPLES)
    parser.add_argument(
        "home", metavar="HOME", nargs="?", help="a home, or what the addresses of homes begin with"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="list what is trusted")
    which.add_argument("--remove", action="store_true", help="trust it no longer")
    parser.add_argument(
        "--allow-http", action="store_true", help="also if the code comes over http from another machine"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the user's list, or show it."""
    # Not above: help must not wait for it.
    from holdfast.compiled.trust import distrust, file_path, trust, trusted

    home: str = args.home or ""
    if args.list == bool(home):
        message = "Say which home, or --list, which takes none."
        raise InvalidInput(message)
    if args.list:
        said = "\n".join(trusted()) or "no home is trusted"
    elif not args.remove:
        line = trust(home, allow_http=args.allow_http)
        said = f"{line} is trusted: compiled code that is there is run. ({file_path()})"
    elif distrust(home):
        said = f"{home} is trusted no longer"
    else:
        raise NotFound(f"{home} is not in {file_path()}, so nothing was removed. --list shows what is.")
    if args.json:
        print_json({"file": str(file_path()), "trusted": trusted()})
    else:
        print(said)
    return 0
