"""Scratch folders on the disks of nodes: their place, their owner, and what others put at their path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import Conflict, InvalidInput, RetryLater
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.scratch import (
    ScratchOwner,
    open_scratch,
    read_scratch_owner,
    remove_scratch,
    scratch_folder,
    scratch_parent,
)

STRANGER = 65531
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "state" / "jobs" / "3")


@pytest.fixture
def scratch(tmp_path: Path, job: JobFolder) -> JobFolder:
    """Return the scratch folder of a job on a disk where all users may create folders."""
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o1777)
    return scratch_folder(disk, job, "task")


@pytest.fixture
def owner(job: JobFolder) -> ScratchOwner:
    return ScratchOwner("task", str(job.path), "n1")


def test_a_scratch_folder_is_private_and_found_again(scratch: JobFolder, owner: ScratchOwner) -> None:
    for _ in range(2):
        open_scratch(scratch, owner)
    assert scratch.path.stat().st_mode & 0o777 == 0o700
    assert read_scratch_owner(scratch) == owner
    assert remove_scratch(scratch)
    assert not scratch.path.exists()


@pytest.mark.parametrize("what", ["link", "file", "open", pytest.param("stranger", marks=as_root)])
def test_what_others_have_put_at_the_path_is_not_used(
    tmp_path: Path, scratch: JobFolder, owner: ScratchOwner, what: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "link":
        scratch.path.symlink_to(elsewhere)
    elif what == "file":
        scratch.path.touch()
    else:
        scratch.path.mkdir(mode=0o700 if what == "stranger" else 0o755)
    if what == "stranger":
        os.chown(scratch.path, STRANGER, STRANGER)
    with pytest.raises(Conflict, match="is not a private folder of yours"):
        open_scratch(scratch, owner)
    assert list(elsewhere.iterdir()) == []
    assert what in ("link", "file") or list(scratch.path.iterdir()) == []


def test_a_folder_of_another_machine_or_job_is_not_used(scratch: JobFolder, owner: ScratchOwner) -> None:
    open_scratch(scratch, owner)
    with pytest.raises(Conflict, match="belongs to n1, and this is n2: each node needs a folder of its own"):
        open_scratch(scratch, ScratchOwner(owner.task_id, owner.job, "n2"))
    with pytest.raises(Conflict, match="belongs to the job in"):
        open_scratch(scratch, ScratchOwner("other", owner.job, "n1"))


def test_a_parent_in_which_others_may_replace_folders_is_not_used(
    scratch: JobFolder, owner: ScratchOwner
) -> None:
    scratch.path.parent.chmod(0o777)
    with pytest.raises(Conflict, match="can be changed by other users"):
        open_scratch(scratch, owner)
    assert not scratch.path.exists()


def test_the_parent_is_the_node_s_own_folder_for_temporary_files(tmp_path: Path) -> None:
    def parent(**environment: str) -> Path:
        return scratch_parent(environment)

    assert parent() == Path("/tmp")
    assert parent(TMPDIR=str(tmp_path)) == tmp_path
    assert parent(TMPDIR="/nowhere/at/all") == Path("/tmp"), "of the shell that launched the job"
    assert parent(TMPDIR="/nowhere", SLURM_TMPDIR=str(tmp_path)) == tmp_path
    named = parent(HOLDFAST_SCRATCH=f"{tmp_path}/disks/${{SLURMD_NODENAME}}", SLURMD_NODENAME="n1")
    assert named == tmp_path / "disks" / "n1"
    assert named.is_dir()
    for wrong in ("scratch", f"{tmp_path}/$NOT_SET"):
        with pytest.raises(InvalidInput, match="HOLDFAST_SCRATCH: expected an absolute path"):
            parent(HOLDFAST_SCRATCH=wrong)
    with pytest.raises(RetryLater, match="Cannot create /proc/nowhere"):
        parent(HOLDFAST_SCRATCH="/proc/nowhere")


def test_jobs_of_other_state_folders_have_other_scratch_folders(tmp_path: Path, job: JobFolder) -> None:
    other = JobFolder(tmp_path / "other" / "jobs" / "3")
    found = {scratch_folder(tmp_path, one, task).path for one in (job, other) for task in ("a", "b")}
    assert len(found) == 4
