"""The task file for SkyPilot: the user's, with additions to save after a preemption notice; pure."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from holdfast.errors import HUNG_STATUS, PREEMPTED_STATUS
from holdfast.jobs.environment import add_notice_file
from holdfast.jobs.task.document import to_yaml
from holdfast.jobs.task.model import MountMode, Task
from holdfast.system.environment import PREEMPTION

TASK_ID = "HOLDFAST_TASK_ID"
"""Variable with Holdfast's id of the job. SkyPilot creates a new one whenever its controller restarts."""
JOB = "HOLDFAST_JOB"
HOOK_S = 60
"""Time limit of a hook, during which SkyPilot keeps the machine so that training can save."""

_OWN_ID = f'export SKYPILOT_TASK_ID="${TASK_ID}"  # the same after every recovery\n'


def add_holdfast_keys(task: Task, task_id: str, job: str) -> Task:
    """Return the task with a document for SkyPilot."""
    document: dict[str, Any] = copy.deepcopy(dict(task.document))
    document["run"] = _OWN_ID + task.run
    if task.setup:
        document["setup"] = _OWN_ID + task.setup
    if task.workdir is not None:
        document["workdir"] = task.workdir
    notice = notice_path(task_id)
    document["envs"] = {
        **document.get("envs", {}),
        TASK_ID: task_id,
        JOB: job,
        PREEMPTION: add_notice_file(task.envs.get(PREEMPTION, "auto"), notice),
    }
    document["resources"] = _with_free_status(document.get("resources") or {})
    document["config"] = _with_hook(document.get("config") or {}, notice)
    if task.file_mounts:
        mounts = document["file_mounts"]
        document["file_mounts"] = {target: _one_after_the_other(spec) for target, spec in mounts.items()}
    return dataclasses.replace(task, document=document)


def render_document(task: Task, task_id: str, job: str) -> str:
    """Return the file for `sky jobs launch`, without values of secrets."""
    return to_yaml(add_holdfast_keys(task, task_id, job))


def managed_name(name: str, job: str) -> str:
    """Return a name for the job that SkyPilot accepts and that no other job has."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    return f"{plain if plain[:1].isalpha() else f'job-{plain}'.rstrip('-')}-{job}"


def notice_path(task_id: str) -> str:
    """Return the path of notices on the job's machines."""
    return f"/tmp/holdfast-notice-{task_id}"


def _with_free_status(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources that do not count preemptions and hangs as errors, by their exit statuses."""
    asked = resources.get("job_recovery")
    recovery: dict[str, Any] = dict(asked) if isinstance(asked, Mapping) else {}
    if isinstance(asked, str):
        recovery["strategy"] = asked
    codes = recovery.get("recover_on_exit_codes")
    listed = codes if isinstance(codes, list) else [] if codes is None else [codes]
    recovery["recover_on_exit_codes"] = sorted({*listed, PREEMPTED_STATUS, HUNG_STATUS})
    return {**resources, "job_recovery": recovery}


def _with_hook(config: Mapping[str, Any], notice: str) -> dict[str, Any]:
    """Return a config with a hook that forwards SkyPilot's preemption event to the job."""
    run = f"touch {notice}\nsleep {HOOK_S - 5}"  # the machine is released when the hook exits
    hook = {"run": run, "events": ["preemption"], "timeout": HOOK_S}
    return {**config, "hooks": [*(config.get("hooks") or []), hook]}


def _one_after_the_other(spec: Any) -> Any:
    if not isinstance(spec, Mapping) or str(spec.get("mode")).upper() != MountMode.MOUNT_CACHED.value:
        return spec
    config = dict(spec.get("config") or {})
    cached = {"transfers": 1, **(config.get("mount_cached") or {})}
    return {**spec, "config": {**config, "mount_cached": cached}}
