"""Notifications of a job: new statuses, sent to its commands and webhooks by a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from holdfast.errors import Corrupt, printable, redact
from holdfast.jobs import journal
from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.roles import Server
from holdfast.jobs.records import Submission
from holdfast.jobs.state_machine import JobState, exit_status
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.subscription import Subscription, is_webhook, label
from holdfast.system.backoff import doubled
from holdfast.system.environment import NOTIFY, NOTIFY_ON, read_progress
from holdfast.system.failpoint import failpoint
from holdfast.system.linux import locks
from holdfast.system.linux.program_runs import end_program, given_input
from holdfast.system.log import get_logger
from holdfast.system.units import plural

_log = get_logger("jobs")

_MAX_BYTES = 16 << 20
_MAX_REASON = 1000
_NOT_PASSED_ON = frozenset({NOTIFY, NOTIFY_ON, TAG, "HOLDFAST_PROGRESS"})
"""Variables of the launch that are not for its commands: the targets, and those of an outer job."""
_VARIABLES = {
    "job": "HOLDFAST_JOB",
    "name": "HOLDFAST_JOB_NAME",
    "engine": "HOLDFAST_JOB_ENGINE",
    "status": "HOLDFAST_JOB_STATUS",
    "reason": "HOLDFAST_JOB_REASON",
    "attempt": "HOLDFAST_ATTEMPT",
    "exit_status": "HOLDFAST_JOB_EXIT_STATUS",
    "step": "HOLDFAST_JOB_STEP",
    "text": "HOLDFAST_JOB_TEXT",
}
"""Variable of a command for each fact."""
_MAX_TRIES = 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 20.0
_POLL_S, _LOOK_S = 0.05, 0.25
_TIMEOUT_S, _TOTAL_S = 10.0, 20.0  # of a request: without an answer, and in all
_AGAIN = frozenset({408, 425, 429})  # statuses below 500 that may pass
_HOOK_LIMIT_S = 60.0


class NotificationPlan(Struct, frozen=True):
    """Targets of a job and their environment, with secrets. Removed once the last notification was sent."""

    job: int
    name: str
    engine: str
    task_id: str
    targets: tuple[str, ...]
    statuses: frozenset[JobStatus]
    environment: dict[str, str] = {}  # of the user who launched the job
    directory: str = "/"  # current one of the launch


class Notification(Struct, frozen=True):
    """New status of a job, to be sent."""

    id: str  # the same if it is recorded again after a kill
    status: JobStatus
    attempt: int
    recoveries: int
    reason: str
    exit_status: int | None  # once the job has ended
    step: int | None  # newest checkpoint that the job has reported
    unix_s: float
    is_wanted: bool  # False: only marks the end of the job
    failed_saves: int = 0  # that the job has reported


class Delivery(Struct, frozen=True):
    """Result of sending a notification to one target.

    Attributes:
        notification: id of the notification.
        status: status of the job.
        target: "command" or "webhook", and its position.
        error: why it was not sent; empty if it was.
        num_tries: number of times that it was tried.
        unix_s: time of the result.
    """

    notification: str
    status: JobStatus
    target: str
    error: str
    num_tries: int
    unix_s: float


def write_plan(folder: JobFolder, subscription: Subscription, submission: Submission) -> None:
    """Write the targets of a job, readable only by its owner. Without targets, write nothing."""
    if not subscription.targets:
        return
    job = (submission.number, submission.name, submission.engine, submission.task_id)
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    targets = (subscription.targets, subscription.statuses)
    plan = NotificationPlan(*job, *targets, environment, directory=str(Path.cwd()))
    journal.write_document(folder.notify_plan, plan)


def read_deliveries(folder: JobFolder) -> list[Delivery]:
    """Return all results so far, oldest first."""
    return journal.read_values(folder.deliveries, Delivery)


def _read_plan(folder: JobFolder) -> NotificationPlan | None:
    return journal.read_document(folder.notify_plan, NotificationPlan, max_bytes=_MAX_BYTES)


def _add_notification(folder: JobFolder, job_state: JobState) -> None:
    """Record the present status of a job, unless it is recorded or not wanted."""
    plan = _read_plan(folder)
    status = job_state.status
    if plan is None or not (status in plan.statuses or status.is_final):  # the end removes the targets
        return
    # An attempt that recovers is that of the one before.
    attempt = job_state.attempt - (status is JobStatus.RECOVERING and job_state.is_active)
    identity = "ENDED" if status.is_final else f"{status.value}-{attempt}"
    with journal.locked(folder.notifications) as fd:
        if any(one.id == identity for one in journal.read_values(folder.notifications, Notification)):
            return
        progress = read_progress(folder.progress)
        added = Notification(
            id=identity,
            status=status,
            attempt=attempt,
            recoveries=job_state.recoveries,
            reason=printable(redact(job_state.reason.partition("\n")[0]))[:_MAX_REASON],
            exit_status=exit_status(job_state) if status.is_final else None,
            step=progress.newest_step,
            unix_s=time.time(),
            is_wanted=status in plan.statuses,
            failed_saves=len(progress.failed_saves),
        )
        journal.append(fd, journal.encode(added))


def _outstanding(folder: JobFolder) -> list[tuple[Notification, dict[str, str]]]:
    """Return the notifications with the targets that lack them, and that of the job's end in any case."""
    plan = _read_plan(folder)
    if plan is None:
        return []
    targets = {label(target, number): target for number, target in enumerate(plan.targets)}
    done = {(one.notification, one.target) for one in read_deliveries(folder)}
    found: list[tuple[Notification, dict[str, str]]] = []
    for message in journal.read_values(folder.notifications, Notification):
        wanted = targets if message.is_wanted else {}
        missing = {name: target for name, target in wanted.items() if (message.id, name) not in done}
        if missing or message.status.is_final:
            found.append((message, missing))
    return found


def _facts_of(plan: NotificationPlan, message: Notification) -> dict[str, str | int | float | None]:
    reason = f": {message.reason}" if message.reason else ""
    failed = f"; {plural(message.failed_saves, 'save')} failed" if message.failed_saves else ""
    host, status = socket.gethostname(), message.status.value
    same = ("reason", "attempt", "recoveries", "exit_status", "step", "failed_saves", "unix_s")
    return {
        "text": f"job {plan.job} ({printable(plan.name)}) on {host} is {status}{reason}{failed}",
        **{name: getattr(plan, name) for name in ("job", "name", "engine", "task_id")},
        "host": host,
        "status": status,
        **{name: getattr(message, name) for name in same},
    }


def announce(folder: JobFolder, job_state: JobState, *, log: Path) -> None:
    """Record the present status of a job, and start its notifier, if it has targets.

    Never raises for a disk that failed: the job continues, and the next call tries again.
    """
    if not folder.notify_plan.exists():
        return
    try:
        _add_notification(folder, job_state)
        if _outstanding(folder):
            Server("notifier", folder.path, log, lock=folder.notifier_lock).start()
    except FileNotFoundError:
        return  # the job is being removed
    except Corrupt as error:
        _log.warning("no more notifications of the job in %s: %s", folder.path, error)
        folder.notify_plan.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot send notifications of the job in %s: %s", folder.path, error)


def wait_for_notifier(folder: JobFolder, *, limit_s: float) -> None:
    """Wait until the notifier of a job has ended."""
    until_s = time.monotonic() + limit_s
    while locks.is_held(folder.notifier_lock) and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def serve(path: Path) -> None:
    """Run the notifier of the job in a folder, with the notifier's inherited lock."""
    folder, lock = JobFolder(path), locks.INHERITED_FD
    with suppress(FileNotFoundError):  # the job was removed
        if (plan := _read_plan(folder)) is not None:
            os.environ.update(plan.environment)  # such as the proxies of the user
        while True:
            _send_all(folder)
            os.close(lock)
            # A status that was recorded just before did not start another notifier.
            again = locks.acquire(folder.notifier_lock) if _outstanding(folder) else None
            if again is None:
                return
            lock = again


def _send_all(folder: JobFolder) -> None:
    """Send all that is outstanding, to all targets at once. After the end of the job, remove its targets."""
    plan = _read_plan(folder)
    if plan is None:
        return
    sending: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(len(plan.targets)) as pool:
        while True:
            for name in [name for name, sender in sending.items() if sender.done()]:
                sending.pop(name).result()  # raises its error
            todo = _outstanding(folder)
            queues = {
                name: (target, [message for message, missing in todo if name in missing])
                for _, targets in todo
                for name, target in targets.items()
            }
            if not queues:
                break
            for name, (target, messages) in queues.items():
                if name not in sending:
                    sending[name] = pool.submit(_send_in_order, folder, plan, name, target, messages)
            wait(sending.values(), _LOOK_S, FIRST_COMPLETED)
    if todo:  # the end of the job, which all targets have
        folder.notify_plan.unlink(missing_ok=True)


def _send_in_order(
    folder: JobFolder, plan: NotificationPlan, name: str, target: str, messages: list[Notification]
) -> None:
    """Send notifications to one target, one after the other, and record the results."""
    for message in messages:
        error, num_tries = _send(plan, target, _facts_of(plan, message))
        failpoint("jobs.notified")
        delivery = Delivery(message.id, message.status, name, error, num_tries, time.time())
        journal.append_value(folder.deliveries, delivery)
        if error:
            _log.warning("the notification %s was not sent to %s: %s", message.status.value, name, error)


def _send(plan: NotificationPlan, target: str, facts: Mapping[str, object]) -> tuple[str, int]:
    """Send facts to a target. Return why that failed, and the number of tries."""
    given = json.dumps(facts).encode()
    if not is_webhook(target):
        shown = {name: "" if facts[key] is None else str(facts[key]) for key, name in _VARIABLES.items()}
        environment = {**plan.environment, **shown}
        return run_hook(target, given + b"\n", environment=environment, directory=plan.directory), 1
    num_tries = 1
    while True:
        error, may_pass = post(target, given)
        if not (error and may_pass) or num_tries == _MAX_TRIES:
            return error, num_tries
        time.sleep(doubled(num_tries, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
        num_tries += 1


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refusal of redirects: another server must not receive the message."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Follow nothing, so that the response is an error."""
        return


def post(url: str, body: bytes) -> tuple[str, bool]:
    """Send a POST, and return why it failed, without names of hosts, and whether it may succeed later."""
    results: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
    # A server that sends single bytes would never reach the limit of its socket.
    threading.Thread(target=lambda: results.put(_post(url, body)), daemon=True).start()
    try:
        return results.get(timeout=_TOTAL_S)
    except queue.Empty:
        return _reason(TimeoutError()), True


def _post(url: str, body: bytes) -> tuple[str, bool]:
    headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        request = urllib.request.Request(url, body, headers, method="POST")
        opener.open(request, timeout=_TIMEOUT_S).close()
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


def run_hook(command: str, given: bytes, *, environment: Mapping[str, str], directory: str) -> str:
    """Run a command, and return why it failed; empty if it succeeded. Its output is this process's."""
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
        process.wait(_HOOK_LIMIT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_program(process)
        return f"it did not end within {_HOOK_LIMIT_S:.0f} s, and was killed"
    status = process.returncode
    return "" if status == 0 else f"exit status {status}" if status > 0 else f"killed by signal {-status}"
