"""Notifier of a job: a process that sends its notifications, and then removes their targets."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from holdfast.errors import Corrupt
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.roles import Role
from holdfast.jobs.notifications import targets
from holdfast.jobs.notifications.outbox import (
    Delivery,
    Notification,
    NotificationPlan,
    add_delivery,
    add_notification,
    facts_of,
    read_deliveries,
    read_notifications,
    read_plan,
    variables_of,
)
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.task.subscription import is_webhook, label
from holdfast.system.backoff import doubled
from holdfast.system.environment import count_failed_saves, read_progress
from holdfast.system.failpoint import failpoint
from holdfast.system.linux import locks
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_MAX_TRIES = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 20.0
_POLL_S = 0.05


def announce(folder: JobFolder, job_state: JobState, *, log: Path) -> None:
    """Record the present status of a job, and start its notifier.

    Without targets, does nothing. Never raises for a disk that failed: the job continues, and the next call
    tries again.

    Args:
        log: file for the notifier's messages.
    """
    if not folder.notify_plan.exists():
        return
    try:
        step = max(read_progress(folder.progress).values(), default=None)
        add_notification(folder, job_state, step=step, failed_saves=count_failed_saves(folder.progress))
        if outstanding(folder):
            Role("notifier", folder.path, folder.notifier_lock).start(log)
    except FileNotFoundError:
        return  # the job is being removed
    except Corrupt as error:
        _log.warning("no more notifications of the job in %s: %s", folder.path, error)
        folder.notify_plan.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot send notifications of the job in %s: %s", folder.path, error)


def wait_for_notifier(folder: JobFolder, *, limit_s: float) -> None:
    """Wait until the notifier of a job has ended.

    Blocks: at most `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    while locks.is_held(folder.notifier_lock) and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def outstanding(folder: JobFolder) -> list[Notification]:
    """Return the notifications that some target has not got, and that of the job's end."""
    plan = read_plan(folder)
    if plan is None:
        return []
    done = _done(folder)
    labels = [label(target, number) for number, target in enumerate(plan.targets)]
    return [
        one
        for one in read_notifications(folder)
        if one.status.is_final or any((one.id, name) not in done for name in labels)
    ]


def serve(path: Path) -> None:
    """Run the notifier of the job in a folder, with the notifier's inherited lock.

    Blocks: while a target does not answer, at most some minutes for each notification.
    """
    folder, lock = JobFolder(path), locks.INHERITED_FD
    with suppress(FileNotFoundError):  # the job was removed
        if (plan := read_plan(folder)) is not None:
            os.environ.update(plan.environment)  # such as the proxies of the user
        while True:
            _send_all(folder)
            os.close(lock)
            # A status that was recorded just before did not start another notifier.
            again = locks.acquire(folder.notifier_lock) if outstanding(folder) else None
            if again is None:
                return
            lock = again


def _send_all(folder: JobFolder) -> None:
    """Send all that is outstanding. After the end of the job, remove its targets."""
    plan = read_plan(folder)
    while plan is not None and (todo := outstanding(folder)):
        for one in todo:
            _send(folder, plan, one)
            if one.status.is_final:
                folder.notify_plan.unlink(missing_ok=True)
                return


def _done(folder: JobFolder) -> set[tuple[str, str]]:
    return {(one.notification, one.target) for one in read_deliveries(folder)}


def _send(folder: JobFolder, plan: NotificationPlan, one: Notification) -> None:
    """Send a notification to all targets that have not got it."""
    if not one.is_wanted:
        return
    done = _done(folder)
    facts = facts_of(plan, one)
    for number, target in enumerate(plan.targets):
        name = label(target, number)
        if (one.id, name) in done:
            continue
        if is_webhook(target):
            error, num_tries = _post(target, json.dumps(facts).encode())
        else:
            given = json.dumps(facts).encode() + b"\n"
            environment = {**plan.environment, **variables_of(facts)}
            error = targets.run_hook(target, given, environment=environment, directory=plan.directory)
            num_tries = 1
        failpoint("jobs.notified")
        add_delivery(folder, Delivery(one.id, one.status, name, error, num_tries, time.time()))
        if error:
            _log.warning("the notification %s was not sent to %s: %s", one.status.value, name, error)


def _post(url: str, body: bytes) -> tuple[str, int]:
    """Send a POST with retries, and return why it failed and the number of tries."""
    for num_tries in range(1, _MAX_TRIES + 1):
        error, may_pass = targets.post(url, body)
        if not (error and may_pass) or num_tries == _MAX_TRIES:
            return error, num_tries
        time.sleep(doubled(num_tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    raise AssertionError
