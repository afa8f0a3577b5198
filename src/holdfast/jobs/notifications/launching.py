"""Subscription of the tasks of a launch, or its refusal by the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from holdfast.errors import Unsupported
from holdfast.jobs.engine import Engine
from holdfast.jobs.task.model import TaskFile
from holdfast.jobs.task.subscription import subscribe
from holdfast.system.environment import NOTIFY
from holdfast.system.log import get_logger

_log = get_logger("jobs")


def with_subscription(
    file: TaskFile, engine: Engine, targets: Sequence[str] | None, statuses: Sequence[str] | None
) -> TaskFile:
    """Return the tasks with the subscription of their launch; see `subscribe`.

    Raises:
        InvalidInput: a target or status is invalid.
        Unsupported: the engine does not send notifications.
    """
    subscription = subscribe(targets, statuses)
    if not subscription.targets:
        return file
    if not engine.can_notify and targets is None:
        _log.warning("jobs on %s do not send notifications: %s is ignored", engine.name, NOTIFY)
        return file
    if not engine.can_notify:
        raise Unsupported(
            f"--notify: jobs on {engine.name} do not send notifications, as no controller of Holdfast runs "
            "there. Use --on local or slurm, or have the task itself send a message. Nothing was started."
        )
    tasks = tuple(dataclasses.replace(task, subscription=subscription) for task in file.tasks)
    return dataclasses.replace(file, tasks=tasks)
