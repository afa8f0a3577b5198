"""`holdfast completion`: the completion script of a shell, and the candidates that it inserts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from argcomplete.completers import DirectoriesCompleter, FilesCompleter
from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode

from holdfast.cli import command_in, make_parser
from holdfast.cli.commands import COMMANDS, argument, command, short_summary
from holdfast.cli.tables import print_result

SHELLS = ("bash", "zsh", "fish")


def complete() -> None:
    """Print the candidates for the line that a shell passes in its variables, and end this process."""
    # With the command of the line alone, or with none while its name is typed.
    parser = make_parser(command_in(os.environ["COMP_LINE"].split()[1:]))
    (commands,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for name in () if commands.choices else COMMANDS:
        commands.add_parser(name, help=short_summary(name))
    for command_parser in commands.choices.values():
        for action in command_parser._actions:
            if action.choices is None:
                action.completer = COMPLETERS.get(action.dest, lambda **_: ())
    CompletionFinder()(parser, always_complete_options=False, exclude=("-h", "-o"))


def _complete_step(*, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the steps of the home on this machine that was given before, newest first."""
    names = sorted(path.name for path in Path(parsed_args.home or "").expanduser().glob("step-*"))
    return [str(int(name[5:])) for name in reversed(names) if name[5:].isdecimal()]


COMPLETERS = {
    **dict.fromkeys(("home", "homes", "a", "b", "local", "workdir"), DirectoriesCompleter()),
    **dict.fromkeys(("step", "before"), _complete_step),
    **dict.fromkeys(("args", "dest", "directory", "env_file", "keep"), FilesCompleter()),
    **dict.fromkeys(("output", "script", "source", "task"), FilesCompleter()),
}
"""Function that returns the candidates for an argument, by its name. Others have none."""


@command(
    "completion",
    """
    source <(holdfast completion bash)
    holdfast completion zsh > ~/.zfunc/_holdfast
    holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """,
    argument("shell", "the shell", choices=SHELLS),
    details="The script completes commands, options, folders and files, and the steps of a home.",
)
def run(args: argparse.Namespace) -> None:
    """Print the script."""
    script = shellcode(["holdfast"], use_defaults=False, shell=args.shell).strip()
    print_result(args, {"shell": args.shell, "script": script}, script)
