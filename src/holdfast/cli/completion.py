"""`holdfast completion`: prints the completion script of a shell."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct

from holdfast.cli.commands import COMMANDS, add_command, argument, command, short_summary
from holdfast.cli.tables import print_result

Kind: TypeAlias = Literal["words", "paths", "files"]

HOMES, SIDES, STEPS, FILES = "homes", "sides", "steps", "files"
VALUES = {
    **dict.fromkeys(("home", "homes"), HOMES),
    **dict.fromkeys(("a", "b"), SIDES),
    **dict.fromkeys(("step", "before"), STEPS),
    **dict.fromkeys(("args", "dest", "directory", "env_file", "keep", "local"), FILES),
    **dict.fromkeys(("output", "script", "source", "task", "workdir"), FILES),
}
"""Kind of the values of an argument, by the name of the argument. Others have no candidates."""
_RUN, _STEP = "holdfast.json", re.compile(r"step-(\d{8,})")  # as in `holdfast.checkpoint.format.names`


class Completions(Struct, frozen=True):
    """All candidates for the last argument of a line."""

    kind: Kind  # "words", "paths", or "files" if the shell itself is to complete the names of files
    values: dict[str, str]  # the candidates, with their descriptions
    num_fixed: int = 0  # length of the part of the argument that bash does not replace


def complete(line: str) -> Completions:
    """Return the candidates that complete a line, which ends at the cursor."""
    *words, last = _split(line)
    before = words[1:]
    command = next((word for word in before if not word.startswith("-")), None)
    kind: Kind = "words"
    if command is None:
        values = {name: short_summary(name) for name in COMMANDS}
        values |= {"--help": "show the help", "--version": "show the version"}
    elif command in COMMANDS:
        kind, values = _complete_argument(command, before[before.index(command) + 1 :], last)
    else:
        values = {}
    found = {text: description for text, description in values.items() if text.startswith(last)}
    # bash completes from the last of these characters; only of @ it replaces the character too.
    num_fixed = max(last.rfind("=") + 1, last.rfind(":") + 1, last.rfind("@"))
    return Completions(kind, found, max(0, num_fixed))


def _split(line: str) -> list[str]:
    """Split a line into its words. The last one is empty if the line ends between two words."""
    for ending in ("x", "x'", 'x"'):  # the x keeps an empty last word; a quote may be open
        with contextlib.suppress(ValueError):
            *words, last = shlex.split(line + ending)
            while words and re.match(r"\w+=", words[0]):  # assignments before the command
                del words[0]
            return [*words, last[:-1]]
    return ["", ""]


def _complete_argument(command: str, before: Sequence[str], last: str) -> tuple[Kind, dict[str, str]]:
    """Return the candidates for an argument of a command."""
    actions = arguments_of(command)
    options = {word: action for action in actions for word in action.option_strings}
    positionals = [action for action in actions if not action.option_strings]
    given: dict[str, str] = {}  # values of arguments
    option: argparse.Action | None = None  # whose value comes next
    may_be_option = True
    for word in before:
        if option is not None:
            option = None
        elif word == "--" and may_be_option:
            may_be_option = False
        elif word.startswith("-") and may_be_option:
            option = options.get(word)
            option = option if option is not None and option.nargs is None else None
        elif positionals:
            given.setdefault(positionals[0].dest, word)
            if positionals[0].nargs not in ("*", argparse.REMAINDER):
                del positionals[0]
                # What follows a script are the arguments of the script.
                may_be_option &= not positionals or positionals[0].nargs != argparse.REMAINDER
    name, equals, value = last.partition("=")
    if option is not None or not may_be_option or not last.startswith("-"):
        return _complete_value(option or next(iter(positionals), None), last, given)
    if not equals:
        names = {action.option_strings[-1]: action.help or "" for action in options.values()}
        return "words", dict(sorted(names.items()))
    kind, values = _complete_value(options.get(name), value, given)
    return kind, {f"{name}={text}": description for text, description in values.items()}


def arguments_of(command: str) -> list[argparse.Action]:
    """Return the arguments and options of a command."""
    commands = argparse.ArgumentParser().add_subparsers()
    add_command(commands, command)
    return [one for one in commands.choices[command]._actions if one.help != argparse.SUPPRESS]


def _complete_value(
    action: argparse.Action | None, last: str, given: dict[str, str]
) -> tuple[Kind, dict[str, str]]:
    """Return the values of an argument."""
    if action is None:
        return "words", {}
    if action.choices is not None:
        return "words", dict.fromkeys(map(str, action.choices), "")
    kind = VALUES.get(action.dest)
    if kind == FILES:
        return "files", {}
    if kind == STEPS:
        return "words", dict.fromkeys(map(str, _steps(given.get("home"))), "")
    if kind == SIDES and "@" in last:
        home = last.partition("@")[0]
        return "words", dict.fromkeys((f"{home}@{step}" for step in _steps(home)), "")
    return ("paths", _homes(last)) if kind in (HOMES, SIDES) else ("words", {})


def _steps(home: str | None) -> list[int]:
    """Return the steps in a home on this machine, newest first."""
    if home is None:
        return []
    try:
        found = [_STEP.fullmatch(path.name) for path in Path(home).expanduser().iterdir()]
    except (OSError, RuntimeError):
        return []
    return sorted((int(one[1]) for one in found if one), reverse=True)


def _homes(prefix: str) -> dict[str, str]:
    """Return the folders whose path begins with `prefix`. A folder that is not a home ends with a slash."""
    parent, slash, name = prefix.rpartition("/")
    try:
        root = Path(parent + slash).expanduser()
        folders = [] if _is_home(root) else sorted(path for path in root.iterdir() if path.is_dir())
    except (OSError, RuntimeError):
        return {}
    shown = [path for path in folders if name or not path.name.startswith(".")]
    return {
        f"{parent}{slash}{path.name}{'' if _is_home(path) else '/'}": "home" if _is_home(path) else ""
        for path in shown
    }


def _is_home(folder: Path) -> bool:
    return (folder / _RUN).exists()


_BASH = r"""
_holdfast() {
    local kind="" text description
    COMPREPLY=()
    {
        read -r kind
        while IFS=$'\t' read -r text description; do
            COMPREPLY+=("$text")
        done
    } < <("$1" completion bash --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    case $kind in
        files) compopt -o default ;;
        paths) compopt -o filenames ;;
    esac
}
complete -F _holdfast holdfast
"""

_ZSH = r"""
#compdef holdfast
_holdfast() {
    local kind line
    local -a lines texts shown
    lines=("${(@f)$("${words[1]}" completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    kind=$lines[1]
    if [[ $kind == files ]]; then
        _files
        return
    fi
    for line in "${(@)lines[2,-1]}"; do
        texts+=("${line%%$'\t'*}")
        shown+=("${line/$'\t'/  }")
    done
    if [[ $kind == paths ]]; then
        compadd -f -S '' -a texts
    else
        compadd -l -d shown -a texts
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _holdfast "$@"
else
    compdef _holdfast holdfast
fi
"""

_FISH = r"""
function __holdfast_candidates
    set -l lines (holdfast completion fish --line (commandline -cp | string collect) 2>/dev/null)
    set -l kind $lines[1]
    set -e lines[1]
    if test "$kind" = files
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $lines
    end
end
complete -c holdfast -f -a '(__holdfast_candidates)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""Script of each shell."""


@command(
    "completion",
    """
    source <(holdfast completion bash)
    holdfast completion zsh > ~/.zfunc/_holdfast
    holdfast completion fish > ~/.config/fish/completions/holdfast.fish
    """,
    argument("shell", "the shell", choices=tuple(SCRIPTS)),
    argument("--line TEXT", argparse.SUPPRESS),  # the script passes the line up to the cursor
    details="The script completes commands, options, homes and steps of this machine, and files.",
)
def run(args: argparse.Namespace) -> int:
    """Print the script, or the candidates that complete a line."""
    if args.line is None:
        script = SCRIPTS[args.shell].strip()
        print_result(args, {"shell": args.shell, "script": script}, script)
        return 0
    found = complete(args.line)
    print(found.kind)
    for text, description in found.values.items():
        print(f"{text[found.num_fixed :] if args.shell == 'bash' else text}\t{description}")
    return 0
