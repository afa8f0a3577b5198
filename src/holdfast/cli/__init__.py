"""The command line: finds the command, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import keyword
import os
import sys
from collections.abc import Iterator, Sequence

from holdfast.cli.tables import Printable
from holdfast.errors import Corrupt, HoldfastError
from holdfast.store.haste import haste

COMMANDS = (
    *("ls", "show", "verify", "diff", "import", "export", "history", "report", "rm", "drain", "demo"),
    *("launch", "queue", "logs", "cancel", "preempt", "forget", "trust", "tune", "check"),
)
"""Every command, in the order of the help; each is a file of this folder with `add_parser` and `run`.

A command that is called like a word of Python, or like a module that comes with it, has an underscore after
its file's name.
"""

_RAW = ("demo", "launch", "logs")  # a job's own output passes as it is

FOUND, TROUBLE, INTERRUPTED, CUT_OFF = 1, 2, 130, 141
"""Exit statuses besides 0: damage or difference found; could not be done; Ctrl-C; nobody reads the output."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description="Looks after training runs: their checkpoints, without a model, and their jobs.",
        epilog="`holdfast COMMAND --help` tells more, with examples. HOME is a Checkpointer's home.",
    )
    parser.add_argument("--version", action="version", version=f"holdfast {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        file = f"{name}_" if keyword.iskeyword(name) or name in sys.stdlib_module_names else name
        importlib.import_module(f"holdfast.cli.{file}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; default this process's.

    Returns:
        Exit status: 0 done, 1 damage or a difference was found, 2 it could not be done.

    Raises:
        SystemExit: the command line cannot be understood (2), or asked for help only (0).
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return TROUBLE
    try:
        with _printable(args), haste.limited(getattr(args, "patience", None), _say):
            status = args.run(args)
            sys.stdout.flush()
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return FOUND if isinstance(error, Corrupt) else TROUBLE
    except KeyboardInterrupt:
        print("holdfast: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `holdfast show | head`: what is still buffered goes nowhere, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    return status


def _say(line: str) -> None:
    print(f"holdfast: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _printable(args: argparse.Namespace) -> Iterator[None]:
    """Escape control characters in what a command prints, but for a job's own output and the moving demo."""
    out = sys.stdout
    if args.run.__module__.rpartition(".")[2] not in _RAW:
        sys.stdout = Printable(out)  # pyright: ignore[reportAttributeAccessIssue] it writes text
    try:
        yield
    finally:
        sys.stdout = out


def _version() -> str:
    return importlib.import_module("holdfast").__version__
