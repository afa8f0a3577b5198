"""What becomes of a task on SkyPilot that its file does not say."""

from __future__ import annotations

from holdfast.jobs.effects import value_at
from holdfast.jobs.engine import Effect
from holdfast.jobs.task.contents import FileMount, MountMode, Task

_NOT_DURABLE = (
    "a file there is in the bucket some time after it was written, and a machine that goes before takes it "
    "along; give the bucket's URL to the training as its home instead"
)


def effects(task: Task) -> list[Effect]:
    """Keys whose meaning is another than a reader may think, and those that are added."""
    found = [
        Effect("resources.job_recovery", _line(task, "resources.job_recovery", "resources"), _recovery()),
        Effect("config.hooks", _line(task, "config.hooks", "config"), _hook()),
        Effect(
            "run", _line(task, "run"), "SKYPILOT_TASK_ID is one id of ours, the same after every recovery"
        ),
    ]
    found += [
        Effect(f"file_mounts.{mount.target}", mount.line, _cached(mount))
        for mount in task.file_mounts
        if mount.mode is MountMode.MOUNT_CACHED
    ]
    return sorted(found, key=lambda effect: effect.line)


def _recovery() -> str:
    return "status 75 is added to recover_on_exit_codes: a training that has saved and wants to go on"


def _hook() -> str:
    return "a hook is added that tells the training of a preemption (Kubernetes, first node)"


def _cached(mount: FileMount) -> str:
    chosen = value_at(mount.spec, "config.mount_cached.transfers")
    order = "" if chosen is not None else "one file is uploaded after the other (transfers: 1); "
    return order + _NOT_DURABLE


def _line(task: Task, *keys: str) -> int:
    return next((task.lines[key] for key in keys if key in task.lines), 1)
