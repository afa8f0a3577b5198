"""`holdfast forget`: what goes, what stays, and that nothing of a living job or of a bucket ever goes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cli.conftest import Command
from holdfast.jobs.records import Records
from holdfast.jobs.state_folder import database
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    found = JobHarness(tmp_path)
    yield found
    found.leave()


def test_a_job_that_has_ended_goes_with_its_files(desk: JobHarness, holdfast: Command) -> None:
    first, second = (desk.submit("echo here > file") for _ in range(2))
    assert {desk.wait(job).status for job in (first, second)} == {JobStatus.SUCCEEDED}
    said = holdfast("forget", first.id, "--yes")
    assert (said.status, said.out.splitlines()[-1]) == (0, "forgot 1 job")
    assert [job.id for job in desk.engine.jobs()] == [second.id]
    assert not desk.files(first).path.exists()
    assert desk.files(second).path.exists()
    assert holdfast("forget", first.id, "--yes").status == 2
    third = desk.submit("true")
    assert third.id == 3, "no number is given twice"
    desk.wait(third)


def test_a_living_job_is_never_forgotten(desk: JobHarness, holdfast: Command) -> None:
    job = desk.submit("until [ -e go ]; do sleep 0.02; done")
    desk.wait(job, JobStatus.RUNNING)
    said = holdfast("forget", job.id, "--force", "--yes")
    assert said.status == 1
    assert "is RUNNING, so it was not removed" in said.err
    assert holdfast("forget", "--all-ended", "--json", "--yes").json == {
        "chosen": [],
        "forgotten": [],
        "kept": [],
    }
    assert desk.files(job).workdir(0).exists()
    (desk.files(job).workdir(0) / "go").touch()
    assert desk.wait(job).status is JobStatus.SUCCEEDED


def test_old_ones_are_chosen_by_their_end(desk: JobHarness, holdfast: Command) -> None:
    job = desk.submit("true")
    desk.wait(job)
    assert holdfast("forget", "--ended-before", "1h", "--dry-run").out == "no jobs\n"
    assert holdfast("forget", "--all-ended", "--dry-run", "--json").json["chosen"] == [job.id]
    assert len(desk.engine.jobs()) == 1
    assert holdfast("forget", "--all-ended", "--json", "--yes").json["forgotten"] == [job.id]
    assert holdfast("queue").out == "no jobs\n"
    assert holdfast("forget").status == 2


def test_what_is_in_a_bucket_stays_and_what_is_not_keeps_the_job(desk: JobHarness, holdfast: Command) -> None:
    head = "file_mounts: {plain: {name: plain, mode: MOUNT}, out: {name: cached, mode: MOUNT_CACHED}}"
    job = desk.submit("echo 1 > plain/a; echo 2 > out/b; ln -s b out/left-out", head=head)
    ended = desk.wait(job)
    assert ended.status is JobStatus.SUCCEEDED
    assert "left out" in ended.reason
    said = holdfast("forget", job.id, "--yes")
    assert said.status == 1
    assert "With --force these files are lost" in said.err
    assert desk.files(job).path.exists()
    assert holdfast("forget", job.id, "--force", "--yes").status == 0
    assert not desk.files(job).path.exists()
    buckets = desk.state / "buckets"
    assert [(buckets / name).read_text() for name in ("plain/a", "cached/b")] == ["1\n", "2\n"]


def test_a_removal_that_was_killed_is_finished_by_the_next(desk: JobHarness, holdfast: Command) -> None:
    first, second = (desk.submit("true") for _ in range(2))
    desk.wait(first)
    desk.wait(second)
    with Records(database(desk.state)) as records:
        records.hide(first.id)
    assert [job.id for job in desk.engine.jobs()] == [second.id]
    assert holdfast("forget", second.id, "--yes").status == 0
    assert list(desk.state.glob("jobs/*")) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="needs root, to mount")
def test_nothing_below_a_mount_is_removed(desk: JobHarness, holdfast: Command, tmp_path: Path) -> None:
    """Whatever is mounted in a job's folder is taken away first, or nothing is removed at all."""
    import subprocess

    job = desk.submit("true")
    desk.wait(job)
    data = tmp_path / "data"
    data.mkdir()
    (data / "precious").write_text("x")
    at = desk.files(job).path / "mounts" / "0"
    at.mkdir(parents=True)
    done = subprocess.run(["mount", "--bind", str(data), str(at)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("this machine lets nobody mount")
    assert holdfast("forget", job.id, "--yes").status == 0
    assert (data / "precious").read_text() == "x"
    assert not desk.files(job).path.exists()
