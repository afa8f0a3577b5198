"""Command-line arguments shared by several commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from holdfast.cli.commands import COMMANDS, short_summary
from holdfast.errors import InvalidInput
from holdfast.system.units import parse_duration

Commands = Any
"""Return value of `add_subparsers`; its class is private to argparse."""


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    examples: str,
    details: str = "",
) -> argparse.ArgumentParser:
    """Add a command, and return its parser.

    Args:
        examples: command lines for the end of its help.
        details: sentences for its help, after its summary.
    """
    parser = commands.add_parser(
        name,
        help=short_summary(name),
        description=f"{COMMANDS[name]} {details}".rstrip(),
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_home(parser: argparse.ArgumentParser) -> None:
    """Add HOME and `--patience`."""
    parser.add_argument("home", metavar="HOME", help="folder or URL that holds the checkpoints of the run")
    add_patience(parser)


def add_patience(parser: argparse.ArgumentParser) -> None:
    """Add `--patience`, the time limit for a store that does not answer."""
    parser.add_argument(
        "--patience",
        type=duration,
        default="20s",
        metavar="TIME",
        help="how long to retry when a bucket does not answer, such as 5m (default: 20s)",
    )


def duration(text: str) -> float:
    """Parse a duration such as "20s" or "5m" into seconds."""
    try:
        return parse_duration(text, "--patience")
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_step(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add `--step` and `--attempt`, which choose a checkpoint."""
    parser.add_argument("--step", type=step_number, metavar="N", help=f"step (default: {default})")
    add_attempt(parser, default="the newest")


def add_attempt(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add `--attempt`, for a step that several attempts have saved."""
    parser.add_argument(
        "--attempt", type=step_number, metavar="A", help=f"only of this attempt (default: {default})"
    )


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Add `--filter`, a pattern of names."""
    parser.add_argument("--filter", metavar="GLOB", help="only names that match, such as 'model.*.weight'")


def add_prefixes(parser: argparse.ArgumentParser) -> None:
    """Add `--only`, the prefixes of the names to take."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="PREFIX",
        help="only this name and the names below it, such as model; can be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def check_can_agree(args: argparse.Namespace, what_was_done: str) -> None:
    """Check that `--yes` was given or that the command can ask on the terminal.

    Args:
        args: with `yes` and `json`.
        what_was_done: the end of the message, such as "Nothing was deleted."
    """
    if not args.yes and (args.json or not sys.stdin.isatty()):
        why = "--json does not ask" if args.json else "standard input is not a terminal"
        raise InvalidInput(f"Add --yes: {why}. {what_was_done}")


def agrees(question: str) -> bool:
    """Ask on the terminal, and return True if the answer is yes."""
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def step_number(text: str) -> int:
    """Parse the number of a step, an attempt or a rank, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """Parse a number of things, 1 or more."""
    number = step_number(text)
    if not number:
        raise argparse.ArgumentTypeError("expected at least 1")
    return number
