"""Python interface of jobs: a function for each command, with the same names and rules."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.errors import HoldfastError, InvalidInput, NotFound, RetryLater, TimedOut
from holdfast.jobs.description import JobDescription, describe_job
from holdfast.jobs.engine import Job, Line, all_of, each, sorted_out
from holdfast.jobs.folder import state_dir
from holdfast.jobs.machines import MachineEvent, NodeStanding, add_events, judge, read_events
from holdfast.jobs.output import OutputSelection
from holdfast.jobs.registry import all_jobs, find_engine, get_engine
from holdfast.jobs.status import JobStatus
from holdfast.system.units import Duration, parse_duration, parse_timeout, plural

_PATIENCE_S = 300.0
"""Time for which `wait` asks again for the state of a job that cannot be read."""


def launch(
    task: str | Path,
    *,
    name: str | None = None,
    envs: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    on: str = "local",
    priority: int | None = None,
    notify: str | Sequence[str] | None = None,
    notify_on: str | Sequence[str] | None = None,
) -> Job:
    """Submit a task file as a job, which continues without this process.

    Args:
        task: path of the file, in SkyPilot's format.
        name: name of the job. Default: from the file.
        envs: variables of `envs` to set.
        secrets: variables of `secrets` to set.
        on: engine: "local", "slurm" or "sky".
        priority: of jobs that wait on this machine, a greater one comes first, from -1000 to 1000. Default:
            from the file, or 0.
        notify: shell commands and http or https URLs that are notified of new statuses. Default: those in
            `HOLDFAST_NOTIFY`.
        notify_on: statuses to notify of, such as "running"; "ended" means all final ones, and "failed" all
            failures. Default: those in `HOLDFAST_NOTIFY_ON`, or "ended" and "recovering".

    Raises:
        HoldfastError: the file is invalid, or the job cannot run there. Nothing was started.

    Blocks: while the workdir is copied.
    """
    from holdfast.jobs.task.parser import Overrides, load_tasks

    overrides = Overrides(name, dict(envs or {}), dict(secrets or {}), priority=priority)
    engine, file = get_engine(on), load_tasks(task, overrides)
    file.only()  # raises for a pipeline
    return engine.submit_file(engine.subscribed(file, notify, notify_on))[0]


def queue(*, on: str | None = None, statuses: Collection[JobStatus | str] = ()) -> list[Job]:
    """Return the jobs: those that have not ended first, newest first.

    Args:
        on: only this engine's. Default: all engines'.
        statuses: only jobs with one of these. Default: all.

    Raises:
        InvalidInput: an engine or status is unknown.
    """
    wanted = {_status(one) for one in statuses}
    jobs = get_engine(on).jobs() if on is not None else all_jobs()
    found = [job for job in jobs if not wanted or job.status in wanted]
    return sorted(found, key=lambda job: (job.status.is_final, -job.id))


def job(which: int | str) -> Job:
    """Return the job with a number, or the newest with a name.

    Raises:
        NotFound: the job does not exist.
    """
    return find(which)[-1]


def find(which: int | str, *, only_active: bool = False) -> list[Job]:
    """Return the job with a number, or all jobs with a name, oldest first.

    Args:
        only_active: of several with the name, only those that have not ended.

    Raises:
        NotFound: the job does not exist.
    """
    if isinstance(which, int) or which.isdecimal():
        return [find_engine(int(which)).job(int(which))]
    named = [one for one in all_jobs() if one.name == which]
    active = [one for one in named if not one.status.is_final]
    if not named or (only_active and not active):
        without = " that has not ended" if named else ""
        raise NotFound(f"There is no job named {which!r}{without}. See `holdfast queue`.")
    return active if only_active else named


def logs(
    which: int | str, *, follow: bool = False, node: int | None = None, tail: int | None = None
) -> Iterator[Line]:
    """Yield the lines of a job's output, of all its attempts.

    Those of several nodes are in the order of their times.

    Args:
        which: number of the job, or name of the newest.
        follow: also yield new lines until the job has ended.
        node: only this node's, counted from 0.
        tail: begin with this number of lines at each node's end.

    Raises:
        NotFound: the job or the node does not exist.

    Blocks: with `follow`, until the job has ended.
    """
    found = job(which)
    return get_engine(found.engine).lines(found.id, OutputSelection(follow=follow, node=node, tail=tail))


def cancel(*which: int | str, every: bool = False) -> list[Job]:
    """Cancel jobs. Each gets a notice, so that it can save, and ends in the background.

    Args:
        which: numbers or names. A name means all jobs with it that have not ended.
        every: cancel all jobs that have not ended.

    Raises:
        NotFound: a job does not exist. All others were cancelled.
        Conflict: a numbered job has ended. All others were cancelled.
    """
    return all_of(cancel_each(*which, every=every))


def cancel_each(*which: int | str, every: bool = False) -> list[Job | HoldfastError]:
    """Cancel all jobs that can be, see `cancel`, and return each, or its error."""
    found, errors = sorted_out(each(lambda word: find(word, only_active=True), which))
    chosen = {one.id: one for jobs in found for one in jobs}
    if every:
        chosen |= {one.id: one for one in all_jobs() if not one.status.is_final}
    results: dict[int, Job | HoldfastError] = {}
    for engine in dict.fromkeys(one.engine for one in chosen.values()):
        numbers = [one.id for one in chosen.values() if one.engine == engine]
        results |= zip(numbers, get_engine(engine).cancel_all(numbers), strict=True)
    return [*(results[number] for number in chosen), *errors]


def preempt(which: int | str, *, lead: Duration = "30s") -> Job:
    """Simulate a preemption of a job: a notice now, and the kill of all its processes after the lead.

    Raises:
        NotFound: the job does not exist.
        Conflict: the job has no process to preempt.
    """
    lead_s = 0.0 if lead == 0 else parse_duration(lead, "lead")
    found = job(which)
    return get_engine(found.engine).preempt(found.id, lead_s=lead_s)


def wait(*which: int | str, timeout: Duration | None = None) -> list[Job]:
    """Wait until jobs have ended, and return them.

    Args:
        which: numbers or names. A name means all jobs with it that have not ended, or else the newest.
        timeout: longest time to wait. Default: no limit.

    Raises:
        NotFound: a job does not exist. All others have ended.
        RetryLater: the state of a job could not be read for five minutes. All others have ended.
        TimedOut: the time is over.

    Blocks: until the jobs have ended.
    """
    limit_s = parse_timeout(timeout, "timeout")
    found, errors = _awaited(which)
    ended = {one.id: one for one in all_of([*_ended(found, limit_s), *errors])}
    return [ended[one.id] for one in found]


def wait_each(*which: int | str, timeout: Duration | None = None) -> Iterator[Job | HoldfastError]:
    """Yield errors of jobs that cannot be waited for, then the others as they end; see `wait`."""
    limit_s = parse_timeout(timeout, "timeout")
    found, errors = _awaited(which)
    yield from errors
    yield from _ended(found, limit_s)


def _awaited(which: Sequence[int | str]) -> tuple[list[Job], list[HoldfastError]]:
    found, errors = sorted_out(each(find, which))
    active = ([one for one in jobs if not one.status.is_final] or jobs[-1:] for jobs in found)
    return list({one.id: one for jobs in active for one in jobs}.values()), errors


def _ended(jobs: list[Job], limit_s: float | None) -> Iterator[Job | HoldfastError]:
    """Yield jobs as they end, and an error for those that do not in time."""
    deadline_s = None if limit_s is None else time.monotonic() + limit_s
    left = {one.id: one for one in jobs}
    failing_since_s: dict[int, float] = {}  # of jobs whose state could not be read the last time
    while True:
        for ended in [job for job in left.values() if job.status.is_final]:
            yield left.pop(ended.id)
        remaining_s = None if deadline_s is None else deadline_s - time.monotonic()
        if not left or (remaining_s is not None and remaining_s <= 0):
            break
        poll_s = min(get_engine(one.engine).poll_s for one in left.values())
        time.sleep(poll_s if remaining_s is None else min(poll_s, remaining_s))
        for job in list(left.values()):
            try:
                left[job.id] = get_engine(job.engine).job(job.id)
                failing_since_s.pop(job.id, None)
            except HoldfastError as error:
                now_s = time.monotonic()
                is_new = now_s - failing_since_s.setdefault(job.id, now_s) < _PATIENCE_S
                if isinstance(error, RetryLater) and is_new:
                    continue  # the scheduler may be busy or starting again, while the job goes on
                del left[job.id]
                yield error
    if left:
        listed = ", ".join(f"job {one.id} is {one.status.value}" for one in left.values())
        yield TimedOut(f"{plural(len(left), 'job')} did not end in time: {listed}.")


def describe(which: int | str) -> JobDescription:
    """Return everything that is recorded about a job: attempts, durations, checkpoints, last lines, paths.

    Raises:
        NotFound: the job does not exist.
    """
    return describe_job(job(which))


def forget(*which: int | str, force: bool = False) -> None:
    """Remove jobs that have ended, with their files and output. Contents of buckets stay.

    Args:
        which: numbers or names. A name means all jobs with it.
        force: remove them even if this loses files that are not in a bucket.

    Raises:
        NotFound: a job does not exist. All others were removed.
        Conflict: a job has not ended or, without `force`, has files that are not in their bucket. All others
            were removed.
    """
    found, errors = sorted_out(each(find, which))
    jobs = {one.id: one for jobs in found for one in jobs}
    results = each(lambda job: get_engine(job.engine).forget(job.id, force=force), jobs.values())
    all_of([*results, *errors])


def _status(value: JobStatus | str) -> JobStatus:
    try:
        return JobStatus(value.upper() if not isinstance(value, JobStatus) else value)
    except ValueError:
        names = ", ".join(one.value for one in JobStatus)
        raise InvalidInput(f"Unknown status {value!r}. Expected one of: {names}.") from None


def nodes() -> list[NodeStanding]:
    """Return the machines of the jobs of the last 30 days, the most conspicuous first."""
    return judge(read_events(state_dir()))


def clear_node(name: str) -> None:
    """Forget the lost attempts and failed checks of a machine.

    Raises:
        NotFound: nothing is remembered about it.
        RetryLater: the record cannot be written.
    """
    state = state_dir()
    if name not in {one.machine for one in read_events(state)}:
        raise NotFound(f"Nothing is remembered about a node named {name!r}. See `holdfast nodes`.")
    try:
        add_events(state, [MachineEvent(time.time(), name)])
    except OSError as error:
        what = f"Cannot write the record of nodes in {state}: {error}"
        raise RetryLater(f"{what}. Nothing was changed.") from error
