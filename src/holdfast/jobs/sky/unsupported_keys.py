"""Task-file keys that SkyPilot interprets differently from what users may expect."""

from __future__ import annotations

from holdfast.jobs.engine import UnsupportedKey
from holdfast.jobs.task.model import FileMount, MountMode, Task
from holdfast.jobs.unsupported_keys import value_at

_RECOVERY = "status 75 is added to recover_on_exit_codes: training has saved and wants to be restarted"
_HOOK = "a hook is added that forwards preemption events to the training (Kubernetes, first node)"
_NOT_DURABLE = (
    "files reach the bucket some time after they were written, and are lost if the machine is preempted "
    "before that; give the bucket's URL to the training as its home instead"
)


def unsupported_keys(task: Task) -> list[UnsupportedKey]:
    """Return keys with a surprising meaning, and keys that Holdfast adds."""
    found = [
        UnsupportedKey(
            "resources.job_recovery", _line(task, "resources.job_recovery", "resources"), _RECOVERY
        ),
        UnsupportedKey("config.hooks", _line(task, "config.hooks", "config"), _HOOK),
        UnsupportedKey(
            "run", _line(task, "run"), "SKYPILOT_TASK_ID is Holdfast's id, the same after every recovery"
        ),
    ]
    found += [
        UnsupportedKey(f"file_mounts.{mount.target}", mount.line, _cached(mount))
        for mount in task.file_mounts
        if mount.mode is MountMode.MOUNT_CACHED
    ]
    return sorted(found, key=lambda found_key: found_key.line)


def _cached(mount: FileMount) -> str:
    chosen = value_at(mount.spec, "config.mount_cached.transfers")
    order = "" if chosen is not None else "one file is uploaded after the other (transfers: 1); "
    return order + _NOT_DURABLE


def _line(task: Task, *keys: str) -> int:
    return next((task.lines[key] for key in keys if key in task.lines), 1)
