"""Shell functions for `conda activate` in the commands of a job; pure.

Source: skypilot 0.14.1, sky/skylet/log_lib.py: commands run after conda's hook, whose functions are exported.
SkyPilot also runs ~/.bashrc, of a machine that it has set up itself. A job here has the environment of the
shell that launched it, which has run that file already.
"""

from __future__ import annotations

import re

_ACTIVATION = re.compile(r"\bconda\s+activate\b")
_HOOK = r"""# holdfast: makes `conda activate` work in this shell and in those that it starts
holdfast_load_conda() {
  local program base hook=etc/profile.d/conda.sh flags=$-
  for program in "${CONDA_EXE:-}" "$(type -P conda)" "${HOME:-}"/{miniconda3,miniforge3,anaconda3}/bin/conda \
    /opt/conda/bin/conda; do
    if [ ! -x "$program" ]; then continue; fi
    base=${program%/*/*}
    if [ ! -r "$base/$hook" ]; then base=$("$program" info --base 2>/dev/null) || continue; fi
    if [ ! -r "$base/$hook" ]; then continue; fi
    unset -f conda
    set -a
    . "$base/$hook"
    case $flags in *a*) ;; *) set +a ;; esac
    return 0
  done
  return 1
}
"""
_GUARD = r"""conda() {  # otherwise `conda activate` would fail, and the commands after it would run
  if holdfast_load_conda; then conda "$@"; return; fi
  if [ "${1:-}" != activate ]; then echo 'bash: conda: command not found' >&2; return 127; fi
  echo "holdfast: \`conda $*\` cannot work, so the job ends here: conda is not installed on $(uname -n)." >&2
  echo 'Install it (https://conda-forge.org/download), or remove the line and launch the job from a' \
    'shell in which the environment is active: a job has the PATH of that shell.' >&2
  exit 127
}
"""


def conda_start(*scripts: str) -> str:
    """Return commands that a shell runs before a job's own.

    They load conda's functions. Where conda is not installed, `conda activate` ends the shell with 127,
    unless the job has installed conda by then.

    Args:
        scripts: all commands of the job. Only if they contain `conda activate` is a missing `conda` replaced.
    """
    guard = _GUARD if activates_conda(*scripts) else ""
    return f"{_HOOK}if ! holdfast_load_conda; then :\n{guard}fi\n"


def activates_conda(*scripts: str) -> bool:
    """Return True if one of the scripts contains `conda activate`."""
    return any(_ACTIVATION.search(script) for script in scripts)
