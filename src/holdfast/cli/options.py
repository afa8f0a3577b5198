"""Options that several commands share, so that they are called and told alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from holdfast.errors import InvalidInput
from holdfast.units import parse_duration

Commands = Any
"""What `add_subparsers` returns; argparse keeps its class to itself."""


def command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], *, job: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: what `add_subparsers` returned.
        name: the word that calls it.
        run: does it, and returns the exit status.
        job: one sentence about what it does.
        examples: lines for the end of its help.
    """
    parser = commands.add_parser(
        name,
        help=job[0].lower() + job[1:].rstrip("."),
        description=job,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_home(parser: argparse.ArgumentParser) -> None:
    """The place of the run."""
    parser.add_argument("home", metavar="HOME", help="folder or URL that holds the run's checkpoints")
    add_patience(parser)


def add_patience(parser: argparse.ArgumentParser) -> None:
    """How long a store may not answer."""
    parser.add_argument(
        "--patience",
        type=duration,
        default="20s",
        metavar="TIME",
        help="how long a bucket that does not answer is tried again, such as 5m (default: 20s)",
    )


def duration(text: str) -> float:
    """A duration in seconds, read as in "20s" or "5m"."""
    try:
        return parse_duration(text, "--patience")
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_step(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Which checkpoint: --step and --attempt."""
    parser.add_argument("--step", type=step_number, metavar="N", help=f"which step (default: {default})")
    add_attempt(parser, default="the newest")


def add_attempt(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Whose checkpoint of a step, where several attempts saved it."""
    parser.add_argument(
        "--attempt", type=step_number, metavar="A", help=f"only this attempt's (default: {default})"
    )


def add_filter(parser: argparse.ArgumentParser) -> None:
    """Names to be looked at."""
    parser.add_argument("--filter", metavar="GLOB", help="only names that match, such as 'model.*.weight'")


def add_prefixes(parser: argparse.ArgumentParser) -> None:
    """What of a checkpoint is taken."""
    parser.add_argument(
        "--only",
        action="append",
        metavar="PREFIX",
        help="only names at or below this one, such as model; can be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Output for programs."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def check_can_agree(args: argparse.Namespace, what_was_done: str) -> None:
    """Refuse to delete anything that a person has not agreed to.

    Args:
        args: with `yes` and `json`.
        what_was_done: the end of the message, such as "Nothing was deleted."

    Raises:
        InvalidInput: --yes is missing, and there is nobody to ask: standard input is no terminal, or the
            output is JSON.
    """
    if not args.yes and (args.json or not sys.stdin.isatty()):
        why = "--json asks no question" if args.json else "there is no terminal at which to ask"
        raise InvalidInput(f"Add --yes: {why}. {what_was_done}")


def agrees(question: str) -> bool:
    """Return whether the person at the terminal says yes."""
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def step_number(text: str) -> int:
    """A number of steps or of an attempt, 0 or more."""
    if not text.isdecimal():
        message = f"expected a whole number, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def count(text: str) -> int:
    """A number of things, 1 or more."""
    number = step_number(text)
    if not number:
        message = "expected at least 1"
        raise argparse.ArgumentTypeError(message)
    return number
