"""The task file as it is handed to SkyPilot: the user's, with what makes a preemption cost nothing; pure."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from holdfast.errors import PREEMPTED_STATUS
from holdfast.jobs.task.contents import MountMode, Task
from holdfast.jobs.task.handover import to_yaml
from holdfast.surroundings import NOTICES

TASK_ID = "HOLDFAST_TASK_ID"
"""Variable with the id that we mint: SkyPilot makes another one whenever its controller is started anew."""
JOB = "HOLDFAST_JOB"
HOOK_S = 60
"""How long a hook may keep a machine that goes, so that the training in it can save."""

_OWN_ID = f'export SKYPILOT_TASK_ID="${TASK_ID}"  # the same after every recovery\n'


def handed_task(task: Task, task_id: str, job: str) -> Task:
    """The task with a document for SkyPilot.

    Args:
        task: as the user wrote it.
        task_id: minted once for the job.
        job: number of the job.
    """
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
        NOTICES: _with_file(task.envs.get(NOTICES, "auto"), notice),
    }
    document["resources"] = _with_free_status(document.get("resources") or {})
    document["config"] = _with_hook(document.get("config") or {}, notice)
    if task.file_mounts:
        document["file_mounts"] = _in_order(document["file_mounts"])
    return dataclasses.replace(task, document=document)


def handed_text(task: Task, task_id: str, job: str) -> str:
    """The file that `sky jobs launch` is given; without values of secrets."""
    return to_yaml(handed_task(task, task_id, job))


def outer_name(name: str, job: str) -> str:
    """What SkyPilot is to call the job: a name that it takes, and that no other job of ours has."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")
    return f"{plain if plain[:1].isalpha() else f'job-{plain}'.rstrip('-')}-{job}"


def notice_path(task_id: str) -> str:
    """Where the hook puts a notice, on the job's machines."""
    return f"/tmp/holdfast-notice-{task_id}"


def _with_file(notices: str, path: str) -> str:
    return f"{notices},file:{path}" if notices not in ("", "none") else f"file:{path}"


def _with_free_status(resources: Mapping[str, Any]) -> dict[str, Any]:
    """With the status of a training that has saved and wants to go on among those that cost nothing."""
    asked = resources.get("job_recovery")
    recovery: dict[str, Any] = dict(asked) if isinstance(asked, Mapping) else {}
    if isinstance(asked, str):
        recovery["strategy"] = asked
    codes = recovery.get("recover_on_exit_codes")
    listed = codes if isinstance(codes, list) else [] if codes is None else [codes]
    recovery["recover_on_exit_codes"] = sorted({*listed, PREEMPTED_STATUS})
    return {**resources, "job_recovery": recovery}


def _with_hook(config: Mapping[str, Any], notice: str) -> dict[str, Any]:
    """With a hook that says to the job what SkyPilot says to hooks only."""
    run = f"touch {notice}\nsleep {HOOK_S - 5}"  # the machine goes when the hook ends
    hook = {"run": run, "events": ["preemption"], "timeout": HOOK_S}
    return {**config, "hooks": [*(config.get("hooks") or []), hook]}


def _in_order(mounts: Mapping[str, Any]) -> dict[str, Any]:
    """With write-back caches that upload one file after the other, unless the user has chosen."""
    return {target: _one_after_the_other(spec) for target, spec in mounts.items()}


def _one_after_the_other(spec: Any) -> Any:
    if not isinstance(spec, Mapping) or str(spec.get("mode")).upper() != MountMode.MOUNT_CACHED.value:
        return spec
    config = dict(spec.get("config") or {})
    cached = {"transfers": 1, **(config.get("mount_cached") or {})}
    return {**spec, "config": {**config, "mount_cached": cached}}
