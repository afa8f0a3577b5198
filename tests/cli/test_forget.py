"""`holdfast forget`: ended jobs are removed; running jobs and buckets are not touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.conftest import Command
from holdfast.jobs.records import Records
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness


def test_an_ended_job_is_removed_with_its_files(jobs: JobHarness, holdfast: Command) -> None:
    first, second = (jobs.run("echo here > file") for _ in range(2))
    result = holdfast("forget", first.id, "--yes")
    assert (result.status, result.out.splitlines()[-1]) == (0, "removed 1 job")
    assert [job.id for job in jobs.engine.jobs()] == [second.id]
    assert not jobs.files(first).path.exists()
    assert jobs.files(second).path.exists()
    result = holdfast("forget", first.id, second.id, "no-such", "--yes")
    assert (result.status, result.out.splitlines()[-1]) == (2, "removed 1 job"), "what exists is removed"
    assert f"Job {first.id} does not exist" in result.err
    assert "no job named 'no-such'" in result.err
    assert jobs.run("true").id == 3, "no number is given twice"


def test_a_running_job_is_never_removed(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.submit("until [ -e go ]; do sleep 0.02; done")
    jobs.wait(job, JobStatus.RUNNING)
    holdfast("forget", job.id, "--force", "--yes").refused("is RUNNING, so it was not removed", status=1)
    found = holdfast("forget", "--all-ended", "--json", "--yes").json
    assert found == {"chosen": [], "forgotten": [], "kept": []}
    jobs.let_go(job)
    jobs.succeed(job)


def test_old_ones_are_chosen_by_their_end(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.run("true")
    assert holdfast("forget", "--ended-before", "1h", "--dry-run").out == "no jobs\n"
    assert holdfast("forget", "--all-ended", "--dry-run", "--json").json["chosen"] == [job.id]
    assert len(jobs.engine.jobs()) == 1
    assert holdfast("forget", "--all-ended", "--json", "--yes").json["forgotten"] == [job.id]
    assert holdfast("queue").out == "no jobs\n"
    assert holdfast("forget").status == 2


def test_buckets_are_kept_and_a_job_with_files_that_were_not_uploaded_too(
    jobs: JobHarness, holdfast: Command
) -> None:
    head = "file_mounts: {plain: {name: plain, mode: MOUNT}, out: {name: cached, mode: MOUNT_CACHED}}"
    job = jobs.run("echo 1 > plain/a; echo 2 > out/b; ln -s b out/left-out", head=head)
    assert "left out" in job.reason
    holdfast("forget", job.id, "--yes").refused("With --force these files are lost", status=1)
    assert jobs.files(job).path.exists()
    assert holdfast("forget", job.id, "--force", "--yes").status == 0
    assert not jobs.files(job).path.exists()
    buckets = jobs.state / "buckets"
    assert [(buckets / name).read_text() for name in ("plain/a", "cached/b")] == ["1\n", "2\n"]


def test_a_killed_removal_is_finished_by_the_next_one(jobs: JobHarness, holdfast: Command) -> None:
    first, second = (jobs.run("true") for _ in range(2))
    Records(jobs.state).set_aside(first.id)
    assert [job.id for job in jobs.engine.jobs()] == [second.id]
    assert holdfast("forget", second.id, "--yes").status == 0
    assert [path for path in jobs.state.glob("jobs/*") if path.is_dir()] == []
    assert jobs.submit("true").id == second.id + 1, "no number is used twice"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root, to mount")
def test_nothing_below_a_mount_is_removed(jobs: JobHarness, holdfast: Command, tmp_path: Path) -> None:
    """A mount in the folder of a job is unmounted first, or nothing is removed."""
    job = jobs.run("true")
    data = tmp_path / "data"
    data.mkdir()
    (data / "precious").write_text("x")
    at = jobs.files(job).path / "mounts" / "0"
    at.mkdir(parents=True)
    done = subprocess.run(["mount", "--bind", str(data), str(at)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("this machine lets nobody mount")
    assert holdfast("forget", job.id, "--yes").status == 0
    assert (data / "precious").read_text() == "x"
    assert not jobs.files(job).path.exists()
