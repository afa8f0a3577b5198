"""Environment of a job's commands: variables of SkyPilot and Holdfast, and functions for conda; pure."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from holdfast.system.environment import PREEMPTION, PROGRESS

TAG = "HOLDFAST_NODE"  # variable that identifies the processes of a node: task id, attempt and rank

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Variable with which printed lines are in the log at once, and not lost when the process is killed."""

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


class Node(Struct, frozen=True):
    """Settings of one node in one attempt that determine its environment."""

    task_id: str
    job: int
    name: str
    attempt: int
    rank: int
    addresses: tuple[str, ...]  # of all nodes, by rank
    num_gpus: int  # per node
    user: str
    notice: str  # path of the file for preemption notices
    progress: str  # path of the file where training records its steps
    grace_s: float  # time limit for a last save
    cloud: str = "local"  # SkyPilot's name for the place
    pipeline: JobPipeline | None = None
    port: int | None = None  # chosen for the rendezvous of its nodes


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


def run_environment(
    node: Node, base: Mapping[str, str], task: Mapping[str, str], *, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of `run`. Holdfast's variables override the task's, and these those of `base`.

    Without `gpus`, the choice of GPUs is left to the job.
    """
    ips = "\n".join(node.addresses)
    cluster = {"cluster_name": node.name, "cloud": node.cloud, "region": None, "zone": None}
    pipeline = node.pipeline or JobPipeline(node.job, (node.task_id,))
    ours = {
        "SKYPILOT_TASK_ID": node.task_id,
        "SKYPILOT_TASK_IDS": "\n".join(pipeline.task_ids),
        "SKYPILOT_MANAGED_JOB_ID": str(pipeline.job),
        "SKYPILOT_INTERNAL_JOB_ID": str(node.job),
        "SKYPILOT_JOB_RANK": "0",
        "SKYPILOT_NODE_RANK": str(node.rank),
        "SKYPILOT_NODE_IPS": ips,
        "SKYPILOT_NUM_NODES": str(len(node.addresses)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(node.num_gpus),
        "SKYPILOT_USER": node.user,
        "SKYPILOT_CLUSTER_INFO": json.dumps(cluster),
        "HOLDFAST_JOB": str(node.job),
        "HOLDFAST_ATTEMPT": str(node.attempt),
        TAG: tag(node.task_id, node.attempt, node.rank),
        PROGRESS: node.progress,
        PREEMPTION: add_notice_file({**base, **task}.get(PREEMPTION, "auto"), node.notice),
    }
    # torchrun kills its workers after 30 s by default, even if the notice leaves more time.
    defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(node.grace_s))}
    ports = {"MASTER_PORT": str(node.port)} if node.port is not None else {}
    if ports and len(node.addresses) > 1:  # with one node, torchrun itself finds a free port
        ports["PET_MASTER_PORT"] = str(node.port)  # torchrun's default for its option
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {**defaults, **base, **UNBUFFERED, **ports, **task, **devices, **ours}


def setup_environment(
    node: Node, base: Mapping[str, str], task: Mapping[str, str], *, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of `setup`; see `run_environment`."""
    return {
        **run_environment(node, base, task, gpus=gpus),
        "SKYPILOT_SETUP_NODE_RANK": str(node.rank),
        "SKYPILOT_SETUP_NODE_IPS": "\n".join(node.addresses),
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": str(node.num_gpus),
    }


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
