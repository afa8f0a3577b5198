"""Notifier of a job: a process that sends its notifications to webhooks and commands, within time limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from holdfast.errors import Corrupt
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.roles import ProcessRole
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
from holdfast.system.linux.program_runs import end_program, given_input
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
            ProcessRole("notifier", folder.path, folder.notifier_lock).start(log)
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
            error = run_hook(target, given, environment=environment, directory=plan.directory)
            num_tries = 1
        failpoint("jobs.notified")
        add_delivery(folder, Delivery(one.id, one.status, name, error, num_tries, time.time()))
        if error:
            _log.warning("the notification %s was not sent to %s: %s", one.status.value, name, error)


def _post(url: str, body: bytes) -> tuple[str, int]:
    """Send a POST with retries, and return why it failed and the number of tries."""
    for num_tries in range(1, _MAX_TRIES + 1):
        error, may_pass = post(url, body)
        if not (error and may_pass) or num_tries == _MAX_TRIES:
            return error, num_tries
        time.sleep(doubled(num_tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
    raise AssertionError


_TIMEOUT_S = 10.0
_TOTAL_S = 20.0
_MAX_ANSWER_BYTES = 64 << 10
_AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 that may pass."""
_LIMIT_S = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refusal of redirects: another server must not receive the message."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Follow nothing, so that the response is an error."""
        return


def post(url: str, body: bytes) -> tuple[str, bool]:
    """Send a POST, and return why it failed and whether it may succeed later. No reason: it was accepted.

    The reason never contains the URL or its host. The proxies of the environment are used. Only for a main
    thread, as the limit of the whole request is a signal.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        request = urllib.request.Request(url, body, headers, method="POST")
        with _limited(_TOTAL_S), opener.open(request, timeout=_TIMEOUT_S) as response:
            response.read(_MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered with status {error.code}", error.code >= 500 or error.code in _AGAIN
    except urllib.error.URLError as error:
        return _reason(error.reason), True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _reason(error), True
    return "", False


def _reason(error: object) -> str:
    """Return a failure without the names of hosts that some messages contain."""
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({type(error).__name__})"
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the request failed ({type(error).__name__})"


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds, also if the server sends single bytes."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_hook(command: str, given: bytes, *, environment: Mapping[str, str], directory: str) -> str:
    """Run a command, and return why it failed; empty if it succeeded. Its output is this process's.

    Args:
        given: its standard input, which it may ignore.
    """
    try:
        with given_input(given) as stdin:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=stdin,
                env=dict(environment),
                cwd=directory if Path(directory).is_dir() else "/",
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        return f"it could not be started: {error.strerror if isinstance(error, OSError) else 'invalid text'}"
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_program(process)
        return f"it did not end within {_LIMIT_S:.0f} s, and was killed"
    status = process.returncode
    return "" if status == 0 else f"exit status {status}" if status > 0 else f"killed by signal {-status}"
