"""The command line: finds the command, runs it, and turns errors into one line and an exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

from holdfast import __version__
from holdfast.cli.commands import COMMANDS, add_command, list_commands, load_command, nearest
from holdfast.errors import Corrupt, HoldfastError, Unsupported

FOUND, TROUBLE, INTERRUPTED, CUT_OFF = 1, 2, 130, 141
"""Exit statuses other than 0: damage, a difference or something left undone was found; an error; Ctrl-C; the
output was closed."""
_RAW = ("demo", "launch", "logs")
"""Commands whose output is not escaped: the output of a job, and moving bars."""
_READING = ("ls", "show", "verify", "diff", "export", "history", "metrics", "report")
_ANYWHERE = ("completion", "version")
"""Commands that run on macOS too, and on Windows too."""
_WITH_COMMAND_LINE = ("launch",)
"""Commands that run another command line, after `--`."""


def print_note(text: object) -> None:
    """Print a line on stderr, after the name of the program."""
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


class CommandParser(argparse.ArgumentParser):
    """Parser whose errors are two lines, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print why a command line is refused, and end this process."""
        command = self.prog.partition(" ")[2]
        print_note(f"{command}: {message}" if command else message)
        print(f"`{self.prog} --help` lists all {'options' if command else 'commands'}.", file=sys.stderr)
        self.exit(TROUBLE)


def make_parser(only: str | None = None) -> CommandParser:
    """Return the parser of the whole command line. With `only`, it has that command alone, or none."""
    parser = CommandParser(
        prog="holdfast",
        usage="holdfast [--help] [--version] COMMAND ...",
        description="Inspect and manage the checkpoints of training runs, and run trainings as jobs.\n"
        + list_commands(),
        epilog="`holdfast COMMAND --help` has details and examples.\nHOME is the home of a Checkpointer.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    subparsers = parser.add_subparsers(prog="holdfast", help=argparse.SUPPRESS)
    for name in COMMANDS if only is None else {only} & {*COMMANDS}:
        add_command(subparsers, name)
    return parser


def _explain_rest(parser: argparse.ArgumentParser, rest: Sequence[str]) -> str:
    """Return why the words that a command does not take are refused."""
    actions = parser._actions
    if option := next((word.partition("=")[0] for word in rest if word.startswith("-")), ""):
        known = [name for action in actions for name in action.option_strings]
        return f"there is no option {option}.{nearest(option, known)}"
    takes = [f"one {action.metavar or action.dest}" for action in actions if not action.option_strings]
    hint = " A shell replaces runs/* by all that match: run it once for each." if "one HOME" in takes else ""
    return f"expected {' and '.join(takes) or 'no argument'}, found also {', '.join(rest)}.{hint}"


def command_in(words: Sequence[str]) -> str:
    """Return the command of a command line; empty without one."""
    return next((word for word in words if not word.startswith("-")), "")


def _nearest_command(name: str) -> str:
    """Return a text that suggests the command for an action, or one that is spelled like it."""
    does_it = [one for one, text in COMMANDS.items() if text.lower().startswith(f"{name} ")]
    return f" Did you mean {does_it[0]}?" if does_it else nearest(name, COMMANDS)


def _parse(parser: CommandParser, command: str, words: list[str]) -> argparse.Namespace:
    """Return the arguments of a command, or end this process with the reason why they are refused."""
    command_line = None
    if command in _WITH_COMMAND_LINE and "--" in words:
        # argparse would not distinguish `launch -- a` from `launch a`.
        end = words.index("--")
        words, command_line = words[:end], words[end + 1 :]
    args, rest = parser.parse_known_args(words)
    if rest:
        own = getattr(args, "parser", parser)  # of the command
        own.error(_explain_rest(own, rest))
    args.command_line = command_line
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of this process by default, and return the exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    if "_ARGCOMPLETE" in os.environ:  # a shell completes a line
        load_command("completion").complete()
    command = command_in(words)
    if sys.platform != "linux" and (text := _refusal(command)):
        print_note(text)
        return TROUBLE
    parser = make_parser(command)  # other commands are not imported
    if command and command not in COMMANDS:
        parser.error(f"there is no command {command!r}.{_nearest_command(command)}")
    args = _parse(parser, command, words)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return TROUBLE
    try:
        with _escaped(command), _limited(args):
            status = args.run(args) or 0
            sys.stdout.flush()
    except HoldfastError as error:
        print_note(error)
        return FOUND if isinstance(error, Corrupt) else TROUBLE
    except KeyboardInterrupt:
        print_note("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # `holdfast show | head`
        _discard_output_that_cannot_be_written()
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


def _escaped(command: str) -> AbstractContextManager[object]:
    """Escape control characters in the output of a command, unless its output is raw."""
    if command in _RAW:
        return contextlib.nullcontext()
    from holdfast.cli.tables import Printable

    return contextlib.redirect_stdout(Printable(sys.stdout))


def _limited(args: argparse.Namespace) -> AbstractContextManager[object]:
    """Apply `--patience`, if the command has that option, to all requests in the block."""
    if not hasattr(args, "patience"):
        return contextlib.nullcontext()
    from holdfast.checkpoint.store.command_limit import command_limit

    return command_limit.limited(args.patience, print_note)
