"""State of a job from Slurm's answer and its controller's record, reports and orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.records import JobRequest
from holdfast.jobs.slurm.commands import Queued
from holdfast.jobs.slurm.engine import current_state
from holdfast.jobs.slurm.job_files import (
    Inbox,
    JobFiles,
    NodeReport,
    NodeUploads,
    Orders,
    SlurmJobState,
    UploadTerms,
    as_line,
)
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.status import JobStatus

RAN = JobState(JobStatus.RUNNING, attempt=1, is_active=True)
DONE = JobState(JobStatus.SUCCEEDED, attempt=2)
UPLOADS = NodeUploads("n2", "/scratch/holdfast-0-3-x", "1 left out", is_settled=True)
REPORTS = [
    NodeReport(0),
    NodeReport(1, True, True, "Slurm (SIGUSR1)", 60.0, 1.5, 2),
    NodeReport(1, outcome=Outcome(Phase.RUN, 75), uploads=UPLOADS, uploading="2 waiting"),
    NodeReport(3, outcome=Outcome(Phase.SETUP, killed_by=15, is_stopped=True)),
]
ORDERS = [
    Orders(),
    Orders("holdfast cancel", 1.5, kills=True, kills_keepers=True, opens_mounts=True),
    Orders(uploads=UploadTerms(None, removes=True)),
    Orders(uploads=UploadTerms(12.5, removes=False)),
]


@pytest.mark.parametrize(
    ("job_state", "state", "cancelled", "expected"),
    [
        (JobState(), "PENDING", False, JobStatus.PENDING),
        (JobState(), "RUNNING", False, JobStatus.STARTING),
        (JobState(), "PENDING", True, JobStatus.CANCELLING),
        (JobState(), "CANCELLED", True, JobStatus.CANCELLED),
        (JobState(), "FAILED", False, JobStatus.FAILED_CONTROLLER),
        (RAN, "RUNNING", False, JobStatus.RUNNING),
        (RAN, "COMPLETING", False, JobStatus.RUNNING),
        (RAN, "PENDING", False, JobStatus.RECOVERING),
        (RAN, "PREEMPTED", False, JobStatus.RECOVERING),
        (RAN, "NODE_FAIL", False, JobStatus.RECOVERING),
        (RAN, "REQUEUE_HOLD", False, JobStatus.RECOVERING),
        (RAN, "CANCELLED", False, JobStatus.CANCELLED),
        (RAN, "CANCELLED by 0", False, JobStatus.CANCELLED),
        (RAN, "TIMEOUT", False, JobStatus.FAILED_CONTROLLER),
        (RAN, "COMPLETED", False, JobStatus.FAILED_CONTROLLER),
        (RAN, None, False, JobStatus.FAILED_CONTROLLER),
        (RAN, None, True, JobStatus.CANCELLED),
        (DONE, None, True, JobStatus.SUCCEEDED),
        (DONE, "FAILED", False, JobStatus.SUCCEEDED),
    ],
)
def test_the_status_of_a_job(
    job_state: JobState, state: str | None, cancelled: bool, expected: JobStatus
) -> None:
    """An exit status alone is never trusted: a job is complete only if its controller has recorded it."""
    queued = None if state is None else Queued(state, "Resources")
    found = current_state(job_state, queued, is_cancelled=cancelled, output="/x/slurm.log")
    assert found.status is expected
    if expected is JobStatus.FAILED_CONTROLLER:
        assert "/x/slurm.log" in found.reason


@pytest.mark.parametrize(
    ("queued", "is_cancelled", "reason"),
    [
        (None, True, "cancelled; node 0: 2 files"),
        (Queued("RUNNING", ""), False, ""),
        (Queued("PENDING", "BeginTime"), False, "waits in Slurm (BeginTime)"),
    ],
)
def test_the_reason_names_what_the_job_waits_for_or_lacks(
    queued: Queued | None, is_cancelled: bool, reason: str
) -> None:
    missing = "node 0: 2 files"
    found = current_state(RAN, queued, is_cancelled=is_cancelled, output="", missing=missing)
    assert found.reason == reason


@pytest.mark.parametrize(("kind", "values"), [(NodeReport, REPORTS), (Orders, ORDERS)])
@given(st.data())
def test_reports_and_orders_are_parsed_however_the_bytes_are_split(
    kind: type[Any], values: list[Any], data: st.DataObject
) -> None:
    sent = data.draw(st.lists(st.sampled_from(values)))
    received = b"slurmstepd: hello\n" + b"".join(map(as_line, sent))
    inbox, found = Inbox(kind), []
    for cut in [*data.draw(st.lists(st.integers(1, 40))), len(received)]:
        found += inbox.feed(received[:cut])
        received = received[cut:]
    assert found == sent
    assert inbox.others == ["slurmstepd: hello"]


def test_the_files_of_a_job_are_read_back_as_written(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.create()
    assert files.read_state() == SlurmJobState()
    uploads = {0: NodeUploads("n1", "/x"), 1: UPLOADS}
    state = SlurmJobState(RAN, 2, "17", 5, 1, 0, ("n1", "n2"), ("n3",), uploads, 1.0, None)
    files.write_state(state)
    assert files.read_state() == state
    assert files.read_requests() == []
    files.request("preempt", 1.5)
    files.request("cancel", 0.0)
    assert files.read_requests() == [JobRequest("preempt", 1.5), JobRequest("cancel", 0.0)]
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("*.json")} == {0}, "they contain secrets"
