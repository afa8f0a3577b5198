"""Jobs after a restart of the machine, which ends all their processes and has another boot id."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.jobs import timers
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

WAITS = "echo attempt $HOLDFAST_ATTEMPT is up; until [ -e go ]; do sleep 0.02; done"


def test_a_job_is_not_running_after_a_restart_of_the_machine_and_is_continued(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = harness.submit(WAITS)
    harness.wait_for_output(job, "attempt 1 is up")
    assert harness.wait(job, JobStatus.RUNNING).reason == ""
    harness.kill_all(job)
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another-boot\n")
    with monkeypatch.context() as patch:
        patch.setattr(timers, "_BOOT_ID", boot_id)
        (shown,) = harness.engine.jobs()  # also starts the controller
        assert shown.status is JobStatus.RECOVERING
        assert shown.reason, "why"
    harness.wait_for_output(job, "attempt 2 is up")
    harness.let_go(job)
    harness.succeed(job)
