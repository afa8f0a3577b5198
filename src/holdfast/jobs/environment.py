"""Environment of a job's commands: variables of SkyPilot and Holdfast, and functions for conda."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct

TAG = "HOLDFAST_NODE"  # variable that identifies the processes of a node: task id, attempt and rank

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""Variable with which printed lines are in the log at once, and not lost when the process is killed."""

_OF_SETUP = ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE")
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
_ACTIVATION = re.compile(r"\bconda\s+activate\b")


@cache
def read_packaged(name: str) -> str:
    """Return a script or table of the folder of jobs, such as k8s/pod.sh."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


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
    guard = read_packaged("node/refuse_conda.sh") if activates_conda(*scripts) else ""
    return f"{read_packaged('node/load_conda.sh')}if ! holdfast_load_conda; then :\n{guard}fi\n"


def activates_conda(*scripts: str) -> bool:
    """Return True if one of the scripts contains `conda activate`."""
    return any(_ACTIVATION.search(script) for script in scripts)
