"""`holdfast completion`: the completion script of a shell, and the candidates that it inserts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable
from pathlib import Path

from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode
from typing_extensions import override

from holdfast.cli import command_in, make_parser
from holdfast.cli.commands import COMMANDS, argument, command, short_summary
from holdfast.cli.tables import print_result

_RUN, _STEP = "holdfast.json", re.compile(r"step-(\d{8,})")  # as in `holdfast.checkpoint.format.names`
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
                action.completer = COMPLETERS.get(action.dest, _complete_nothing)
    Finder()(parser, always_complete_options=False, exclude=("-h", "-o"))


class Finder(CompletionFinder):
    """Finder of candidates, also behind an @ in bash."""

    @override
    def quote_completions(
        self, completions: list[str], cword_prequote: str, last_wordbreak_pos: int | None
    ) -> list[str]:
        """Quote the candidates. Of the characters that end a word in bash, it replaces only @ itself."""
        if last_wordbreak_pos is not None and completions and completions[0][last_wordbreak_pos] == "@":
            last_wordbreak_pos -= 1
        return super().quote_completions(completions, cword_prequote, last_wordbreak_pos)


def _complete_nothing(**_: object) -> Iterable[str]:
    return ()


def _complete_step(*, parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the steps of the home that was given before."""
    return map(str, _steps(parsed_args.home or ""))


def _complete_side(*, prefix: str, **_: object) -> Iterable[str]:
    """Return homes, or after a home and @ its steps."""
    home, at, _step = prefix.partition("@")
    return [f"{home}@{step}" for step in _steps(home)] if at else _complete_home(prefix=prefix)


def _complete_home(*, prefix: str, **_: object) -> Iterable[str]:
    """Return homes and other folders."""
    parent, _slash, _name = prefix.rpartition("/")
    return () if (Path(parent).expanduser() / _RUN).exists() else _paths(prefix, with_files=False)


def _complete_file(*, prefix: str, **_: object) -> Iterable[str]:
    """Return files and folders."""
    return _paths(prefix, with_files=True)


def _paths(prefix: str, *, with_files: bool) -> list[str]:
    """Return the paths that begin with `prefix`. A folder that is not a home ends with a slash."""
    parent, slash, name = prefix.rpartition("/")
    return [
        f"{parent}{slash}{path.name}{'/' if path.is_dir() and not (path / _RUN).exists() else ''}"
        for path in sorted(_entries(parent + slash))
        if path.name.startswith(name) and (name or path.name[0] != ".") and (with_files or path.is_dir())
    ]


def _steps(home: str) -> list[int]:
    """Return the steps in a home on this machine, newest first."""
    found = [_STEP.fullmatch(path.name) for path in _entries(home)]
    return sorted((int(one[1]) for one in found if one), reverse=True)


def _entries(folder: str) -> list[Path]:
    try:
        return list(Path(folder).expanduser().iterdir())
    except (OSError, RuntimeError):
        return []


COMPLETERS = {
    **dict.fromkeys(("home", "homes"), _complete_home),
    **dict.fromkeys(("a", "b"), _complete_side),
    **dict.fromkeys(("step", "before"), _complete_step),
    **dict.fromkeys(("args", "dest", "directory", "env_file", "keep", "local"), _complete_file),
    **dict.fromkeys(("output", "script", "source", "task", "workdir"), _complete_file),
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
    details="The script completes commands, options, homes and steps of this machine, and files.",
)
def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = shellcode(["holdfast"], use_defaults=False, shell=args.shell).strip()
    print_result(args, {"shell": args.shell, "script": script}, script)
    return 0
