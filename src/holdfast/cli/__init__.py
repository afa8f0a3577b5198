"""The command line: finds the command, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from holdfast import __version__
from holdfast.cli.commands import COMMANDS, add_command, short_summary
from holdfast.errors import Corrupt, HoldfastError, Unsupported

FOUND, TROUBLE, INTERRUPTED, CUT_OFF = 1, 2, 130, 141
"""Exit statuses other than 0: damage, a difference or something left undone was found; an error; Ctrl-C; the
output was closed."""
_RAW = ("demo", "launch", "logs")
"""Commands whose output is not escaped: the output of a job, and a moving screen."""
_READING = ("ls", "show", "verify", "diff", "export", "history", "metrics", "report")
_ANYWHERE = ("completion", "version")
"""Commands that run on macOS too, and on Windows too."""
_WITH_COMMAND_LINE = ("launch",)
"""Commands that run another command line, after `--`."""


def print_note(text: object) -> None:
    """Print a line on stderr, after the name of the program."""
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line.

    With `only`, the module of that command alone is imported. The others have no options then, only a line.
    """
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description="Inspect and manage the checkpoints of training runs, and run trainings as jobs.",
        epilog="`holdfast COMMAND --help` has details and examples. HOME is the home of a Checkpointer.",
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in COMMANDS:
        if only in (None, name):
            add_command(subparsers, name)
        else:
            subparsers.add_parser(name, help=short_summary(name))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of this process by default, and return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in words if not word.startswith("-")), "")
    if sys.platform != "linux" and (text := _refusal(command)):
        print_note(text)
        return TROUBLE
    parser = make_parser(command)  # other commands are not imported
    command_line = None
    if command in _WITH_COMMAND_LINE and "--" in words:
        # argparse would not distinguish `launch -- a` from `launch a`.
        end = words.index("--")
        words, command_line = words[:end], words[end + 1 :]
    args = parser.parse_args(words)
    args.command_line = command_line
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return TROUBLE
    try:
        with _escaped(command), _limited(args):
            status = args.run(args)
            sys.stdout.flush()
    except HoldfastError as error:
        print_note(error)
        return FOUND if isinstance(error, Corrupt) else TROUBLE
    except KeyboardInterrupt:
        print_note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # `holdfast show | head`: discard the buffered output, so that Python does not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF
    except OSError as error:
        print_note(f"the system refused a file operation: {error}")
        _discard_output_that_cannot_be_written()
        return TROUBLE
    return status


def _refusal(command: str) -> str:
    """Return why a command does not run on this operating system; empty if it does."""
    from holdfast.system.environment import require_linux

    runs = _ANYWHERE if sys.platform == "win32" else (*_ANYWHERE, *_READING)
    try:
        if command in COMMANDS and command not in runs:
            require_linux(f"holdfast {command}")
    except Unsupported as error:
        return str(error)
    return ""


def _discard_output_that_cannot_be_written() -> None:
    """Discard buffered output if writing it fails, so that Python does not fail at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _escaped(command: str) -> Iterator[None]:
    """Escape control characters in the output of a command, unless its output is raw."""
    if command in _RAW:
        yield
        return
    from holdfast.cli.tables import Printable

    out = sys.stdout
    sys.stdout = Printable(out)  # pyright: ignore[reportAttributeAccessIssue] it writes text
    try:
        yield
    finally:
        sys.stdout = out


@contextlib.contextmanager
def _limited(args: argparse.Namespace) -> Iterator[None]:
    """Apply `--patience`, if the command has that option, to all requests in the block."""
    if not hasattr(args, "patience"):
        yield
        return
    from holdfast.checkpoint.store.command_limit import command_limit

    with command_limit.limited(args.patience, print_note):
        yield
