"""`holdfast completion`: prints the completion script of a shell."""

from __future__ import annotations

import argparse

from holdfast.cli.completion.candidates import complete
from holdfast.cli.completion.scripts import SCRIPTS
from holdfast.cli.options import Commands, command

_EXAMPLES = """
source <(holdfast completion bash)
holdfast completion zsh > ~/.zfunc/_holdfast
holdfast completion fish > ~/.config/fish/completions/holdfast.fish
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    details = "The script completes commands, options, homes and steps of this machine, and files."
    parser = command(commands, "completion", run, details=details, examples=_EXAMPLES)
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")
    # The script passes the line up to the cursor.
    parser.add_argument("--line", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Print the script, or the candidates that complete a line."""
    if args.line is None:
        print(SCRIPTS[args.shell].strip())
        return 0
    found = complete(args.line)
    print(found.kind)
    for candidate in found.values:
        text = candidate.text[found.num_fixed :] if args.shell == "bash" else candidate.text
        print(f"{text}\t{candidate.description}")
    return 0
