"""Records of jobs: one folder and number each, read whatever else is damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import to_builtins

from holdfast.errors import Conflict, Corrupt, InvalidInput, NotFound
from holdfast.jobs.folder import JobFolder, job_folder, state_dir
from holdfast.jobs.journal import append_value
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.records import JobSpec, Records, StoredState, Submission
from holdfast.jobs.registry import find_engine, get_engine
from holdfast.jobs.state_machine import JobState, RestartPolicy
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import Timers

SPEC = JobSpec(num_nodes=1, num_gpus=0, has_setup=False, user="me")


def submit(records: Records, *, engine: str = "local", name: str = "n") -> int:
    """Record a job, and return its number."""
    number = records.reserve()
    records.complete(Submission(number, name, f"id-{number}", engine, SPEC, RestartPolicy(), 1.0))
    return number


def test_records_are_read_back_as_written(tmp_path: Path) -> None:
    policy = RestartPolicy(2, 3, frozenset({33}))
    records = Records(tmp_path)
    number = records.reserve()
    with pytest.raises(NotFound):
        records.get(number)
    records.complete(Submission(number, "name", "task-id", "local", SPEC, policy, 1.0))
    job_state = JobState(JobStatus.RUNNING, 2, True, 1, outcomes={0: Outcome(Phase.RUN, code=1)}, reason="x")
    due = Timers(kill_unix_s=7.5, kill_keepers=True)
    records.ask(number, "preempt", 1.5)
    (request,) = records.requests(records.get(number))
    assert (request.kind, request.lead_s) == ("preempt", 1.5)
    records.save(records.get(number).with_state(unix_s=2.0, job_state=job_state, due=due, step_before=9))
    found = Records(tmp_path).get(number)
    assert (found.state.job_state, found.state.due, found.job.policy, found.job.spec) == (
        job_state,
        due,
        policy,
        SPEC,
    )
    assert (found.job.task_id, found.state.step_before) == ("task-id", 9)
    assert (found.state.started_unix_s, found.state.ended_unix_s) == (2.0, None)


def test_jobs_of_all_engines_share_one_sequence_of_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    records = Records(tmp_path)
    for engine in ("slurm", "local", "sky"):
        submit(records, engine=engine)
    records.set_engine_job_id(1, "4711")
    found = [(one.job.number, one.job.engine, one.state.engine_job_id) for one in records.all()]
    assert found == [(1, "slurm", "4711"), (2, "local", None), (3, "sky", None)]
    assert [one.job.number for one in records.all("sky")] == [3]
    records.withdraw(3)
    assert records.unreadable() == []
    with pytest.raises(NotFound):
        records.get(3)
    assert (find_engine(1).name, find_engine(2).name) == ("slurm", "local")
    with pytest.raises(NotFound, match="Job 3 does not exist"):
        find_engine(3)
    with pytest.raises(InvalidInput, match="Unknown engine 'nomad'"):
        get_engine("nomad")


def test_numbers_are_never_used_twice(tmp_path: Path) -> None:
    """Not at the same time, nor after the newest job was removed, nor after the counter was lost."""
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: Records(tmp_path).reserve(), range(200)))
    assert sorted(found) == list(range(1, 201))
    records = Records(tmp_path)
    number = submit(records)
    records.set_aside(number)
    assert records.reserve() == number + 1
    counter = tmp_path / "jobs" / "last-number"
    for damaged in (b"", b"\0" * 4, b"7\n", b"nonsense", b"9" * 60):
        counter.write_bytes(damaged)
        number = records.reserve()
        assert number == max(found) + 3
        found.append(max(found) + 1)
    counter.unlink()
    assert records.reserve() == number + 1


@pytest.mark.parametrize("name", ["9" * 15, f".removing-{'9' * 15}"])
def test_a_stray_folder_with_the_greatest_number_blocks_no_launch(tmp_path: Path, name: str) -> None:
    records = Records(tmp_path)
    submit(records)
    (tmp_path / "jobs" / name).mkdir()
    assert [submit(records), submit(records)] == [2, 3]
    (tmp_path / "jobs" / "last-number").write_bytes(b"9" * 15)
    assert submit(records) == 4
    assert [one.job.number for one in records.all()] == [1, 2, 3, 4]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    records = Records(tmp_path)
    submit(records)
    job_state = JobState(JobStatus.STARTING, 1, True)
    record = records.save(records.get(1).with_state(unix_s=2.0, job_state=job_state))
    folder = job_folder(tmp_path, 1)
    begun = b'{"unix_s": 3.0, "job_state": '
    for torn in (begun + b'{"sta', begun + b"7}\n", b"\0" * 99, b"[]\n"):
        with folder.states.open("ab") as file:
            file.write(torn)
        assert records.get(1).state.job_state == job_state
        record = records.save(record.with_state(unix_s=4.0, job_state=job_state))
        assert records.get(1).state.job_state == job_state
    with folder.requests.open("ab") as file:
        file.write(b'{"id": "x", "kind": "can')
    records.ask(1, "cancel")
    assert [one.kind for one in records.requests(record)] == ["cancel"]


def test_damaged_records_are_reported_and_cost_no_other_job(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for _ in range(3):
        submit(records)
    for path in job_folder(tmp_path, 2).submissions:
        path.write_bytes(b"\0" * path.stat().st_size)
    assert [one.job.number for one in records.all()] == [1, 3]
    (message,) = records.unreadable()
    assert "job 2 is damaged" in message
    with pytest.raises(Corrupt, match="not touched"):
        records.get(2)
    assert records.reserve() == 4


def in_place(make: Callable[[Path], object]) -> Callable[[JobFolder], None]:
    """Return a function that replaces both submissions of a job."""

    def replace(folder: JobFolder) -> None:
        for path in folder.submissions:
            path.unlink()
            make(path)

    return replace


def as_text(make: Callable[[Path], str]) -> Callable[[JobFolder], None]:
    """Return a function that replaces the text of both submissions of a job."""
    return in_place(lambda path: path.write_text(make(path)))


def as_path(make: Callable[[Path], object]) -> Callable[[JobFolder], None]:
    """Return a function that replaces the folder of a job."""

    def replace(folder: JobFolder) -> None:
        shutil.rmtree(folder.path)
        make(folder.path)

    return replace


def submission_of_1(path: Path) -> str:
    """Return the submission of job 1, whose folder is beside the given one's."""
    return (path.parent.parent / "1" / path.name).read_text()


def submission_of(path: Path, **change: object) -> str:
    """Return the submission of job 2 with a change."""
    return json.dumps({**json.loads(submission_of_1(path)), "number": 2, **change})


TOO_MANY = {**to_builtins(SPEC), "num_nodes": 10**12}

STRANGE: dict[str, Callable[[JobFolder], object]] = {
    "a file as the folder": as_path(Path.touch),
    "a FIFO as the folder": as_path(os.mkfifo),
    "a link to itself as the folder": as_path(lambda path: path.symlink_to(path)),
    "folders as the submission": in_place(Path.mkdir),
    "FIFOs as the submission": in_place(os.mkfifo),
    "a deep submission": as_text(lambda path: "[" * 200_000),
    "deep members": as_text(lambda path: '{"version": 1, "x": %s' % ("[" * 200_000)),
    "digits": as_text(lambda path: '{"version": %s}' % ("9" * 5000)),
    "a number below 0": as_text(lambda path: submission_of_1(path).replace(": 1,", ": -1,")),
    "an unknown engine": as_text(lambda path: submission_of(path, engine="../x")),
    "a time before 1970": as_text(lambda path: submission_of(path, submitted_unix_s=-1e18)),
    "a time beyond all calendars": as_text(lambda path: submission_of(path, submitted_unix_s=1e300)),
    "too many nodes": as_text(lambda path: submission_of(path, spec=TOO_MANY)),
    "a copy of job 1": as_text(lambda path: submission_of_1(path)),
    "a file as the attempts": lambda folder: (folder.path / "attempts").touch(),
    "a folder as the states": lambda folder: [folder.states.unlink(), folder.states.mkdir()],
    "a FIFO as the states": lambda folder: [folder.states.unlink(), os.mkfifo(folder.states)],
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_folder_costs_no_other_job(tmp_path: Path, name: str) -> None:
    records = Records(tmp_path)
    for _ in range(3):
        submit(records)
    STRANGE[name](job_folder(tmp_path, 2))
    assert [one.job.number for one in records.all()] == [1, 3]
    (message,) = records.unreadable()
    assert "job 2" in message
    assert records.reserve() == 4


def test_records_of_a_newer_version_are_rejected_unchanged(tmp_path: Path) -> None:
    records = Records(tmp_path)
    submit(records)
    path = job_folder(tmp_path, 1).submissions[0]
    path.write_text(path.read_text().replace('"version": 1', '"version": 9, "more": {}'))
    before = path.read_text()
    with pytest.raises(Conflict, match="newer version"):
        records.get(1)
    assert path.read_text() == before


def test_a_journal_without_its_newest_attempt_is_not_believed(tmp_path: Path) -> None:
    """An old copy has the state of an earlier attempt."""
    records = Records(tmp_path)
    submit(records)
    folder = job_folder(tmp_path, 1)
    append_value(folder.states, StoredState(2.0, JobState(JobStatus.RUNNING, 1, True)))
    records.ask(1, "preempt", 0.0)
    folder.attempt(4).mkdir(parents=True)
    found, state = records.get(1), records.get(1).state.job_state
    assert (state.status, state.attempt, state.recoveries) == (JobStatus.RECOVERING, 4, 3)
    assert state.is_active
    assert records.requests(found) == [], "an old preemption is not repeated"
    records.ask(1, "cancel")
    assert [one.kind for one in records.requests(records.get(1))] == ["cancel"]


@pytest.mark.parametrize("kind", ["a file", "below a file", "a long name"])
def test_a_folder_that_cannot_be_made_is_an_error_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "file").write_text("x")
    name = {"a file": "file", "below a file": "file/jobs", "a long name": "a" * 3000}[kind]
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / name))
    with pytest.raises(InvalidInput, match="Set HOLDFAST_STATE to a folder of yours") as caught:
        state_dir()
    assert len(str(caught.value)) < 500
