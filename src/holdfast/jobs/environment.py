"""Environment of a job's commands: variables of SkyPilot and Holdfast, and functions for conda; pure."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

TAG = "HOLDFAST_NODE"  # variable that identifies the processes of a node: task id, attempt and rank

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Variable with which printed lines are in the log at once, and not lost when the process is killed."""

_OF_SETUP = ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE")
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
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


class JobPipeline(Struct, frozen=True):
    """Pipeline of a job, which SkyPilot numbers as one job with several tasks."""

    job: int  # number of its first job
    task_ids: tuple[str, ...]  # of all its jobs, in their order


def tag(task_id: str, attempt: int | None = None, rank: int | None = None) -> str:
    """Return the tag prefix of a job, an attempt, or one of its nodes."""
    parts = (task_id, *(str(part) for part in (attempt, rank) if part is not None))
    return "/".join(parts) + ("" if rank is not None else "/")


def create_task_id(name: str, job: int, now_unix_s: float, task: int = 0) -> str:
    """Return a task id in the format of SkyPilot's managed jobs; `job` is the first one of a pipeline."""
    moment = datetime.datetime.fromtimestamp(now_unix_s, datetime.timezone.utc)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return f"sky-managed-{moment:%Y-%m-%d-%H-%M-%S-%f}_{plain}_{job}-{task}"


def container_base(base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a user that the containers of a job have too. Others are of this machine."""
    names = (name for name in base if name.startswith("HOLDFAST_") or name.lower() in _PROXIES)
    return {name: base[name] for name in names}


def sky_variables(task_id: str, addresses: Sequence[str], num_gpus: int) -> dict[str, str]:
    """Return SkyPilot's variables that are equal on all nodes of a job, as its commands see them."""
    return {
        "SKYPILOT_TASK_ID": task_id,
        "SKYPILOT_TASK_IDS": task_id,
        "SKYPILOT_JOB_RANK": "0",
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_NODES": str(len(addresses)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(num_gpus),
    }


def setup_variables(run: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `setup` has besides those of `run`."""
    return {name.replace("_", "_SETUP_", 1): run[name] for name in _OF_SETUP if name in run}


def add_notice_file(before: str, path: str) -> str:
    """Return the sources of notices, including the job's own file."""
    kept = [word for word in before.split(",") if word.strip() not in ("", "none")]
    return ",".join([*kept, f"file:{path}"])


def conda_start(*scripts: str) -> str:
    """Return commands that a shell runs before a job's own scripts. They load conda's functions.

    If the scripts contain `conda activate`, and conda is not installed by then, the shell ends with 127.

    Source: skypilot 0.14.1, sky/skylet/log_lib.py: commands run after conda's hook, whose functions are
        exported. SkyPilot also runs ~/.bashrc, which the shell that launches a job here has run already.
    """
    guard = _GUARD if activates_conda(*scripts) else ""
    return f"{_HOOK}if ! holdfast_load_conda; then :\n{guard}fi\n"


def activates_conda(*scripts: str) -> bool:
    """Return True if one of the scripts contains `conda activate`."""
    return any(_ACTIVATION.search(script) for script in scripts)
