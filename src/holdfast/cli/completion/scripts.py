"""Completion scripts of bash, zsh and fish. Each asks `holdfast completion` for the candidates.

The answer has the kind of the candidates in its first line, then a candidate and its description per line,
with a tab between them.
"""

from __future__ import annotations

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
