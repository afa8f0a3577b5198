"""`holdfast trust`: lists, adds and removes the homes whose compiled code may be run."""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.commands import argument, command, either
from holdfast.cli.homes import nearest_hint
from holdfast.cli.tables import print_result
from holdfast.errors import InvalidInput, NotFound


@command(
    "trust",
    """
    holdfast trust s3://my-bucket/runs
    holdfast trust runs/gpt
    holdfast trust --list
    holdfast trust --remove s3://my-bucket/runs
    """,
    argument("home HOME", "a home, or a folder or URL prefix of several homes", nargs="?"),
    either(
        argument("--list", "list the trusted homes"), argument("--remove", "remove the home from the list")
    ),
    argument("--allow-http", "trust it even if the code comes over http from another machine"),
)
def run(args: argparse.Namespace) -> None:
    """Change the list of the user, or show it."""
    from holdfast.watch.compiled.trust import distrust, file_path, trust, trusted

    home: str = args.home or ""
    if args.list == bool(home):
        raise InvalidInput("Give a home, or --list without a home.")
    if args.list:
        text = "\n".join(trusted()) or "no trusted homes"
    elif not args.remove:
        if "://" not in home and not Path(home).expanduser().exists():
            raise NotFound(f"{home} does not exist, so it was not trusted. {nearest_hint(home)}")
        line = trust(home, allow_http=args.allow_http)
        text = f"{line} is trusted: trainings load and run the compiled code in it ({file_path()})"
    elif distrust(home):
        text = f"{home} is no longer trusted"
    else:
        raise NotFound(
            f"{home} is not in {file_path()}. Nothing was removed. --list shows the trusted homes."
        )
    print_result(args, {"file": str(file_path()), "trusted": trusted()}, text)
