"""`holdfast completion`: prints the completion script of a shell."""

from __future__ import annotations

import argparse

from holdfast.cli.completion.candidates import complete
from holdfast.cli.options import Commands, command

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
