"""Mounts at paths such as /checkpoints, which each job sees alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import Conflict, InvalidInput, Unsupported
from holdfast.jobs import describe
from holdfast.jobs.node.mounts import mount_plan
from holdfast.jobs.node.mounts.mount_records import private_note
from holdfast.jobs.task.parser import Overrides, parse_tasks
from jobs.harness import JobHarness, needs_namespaces

TARGET = f"/holdfast-test-{os.getpid()}"
pytestmark = needs_namespaces


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(Path("/").iterdir())
    yield
    assert set(Path("/").iterdir()) == before


def test_two_jobs_have_their_own_at_the_same_time(harness: JobHarness) -> None:
    jobs = {}
    for name in ("first", "second"):
        source = harness.folder / name
        source.mkdir()
        (source / "name").write_text(name)
        run = f"""
        cat {TARGET}/name; echo " is here"; touch {harness.folder}/{name}-looks
        until [ $(ls {harness.folder} | grep -c looks) = 2 ]; do sleep 0.1; done
        cat {TARGET}/name; echo " is still here"; echo changed > {TARGET}/name
        """
        jobs[name] = harness.submit(run, head=f'file_mounts: {{{TARGET}: "{source}"}}')
    for name, job in jobs.items():
        harness.succeed(job)
        assert f"{name} is here" in harness.log(job)
        assert f"{name} is still here" in harness.log(job)
        assert (harness.folder / name / "name").read_text() == name, "the copy was changed, not the source"


def test_a_bucket_of_this_machine_is_shared_and_outlives_the_jobs(harness: JobHarness) -> None:
    head = f"file_mounts: {{{TARGET}: {{name: a-bucket, mode: MOUNT}}}}"
    harness.run(f"echo saved > {TARGET}/checkpoint", head=head)
    job = harness.run(f"cat {TARGET}/checkpoint", head=head)
    assert "saved" in harness.log(job)
    assert (harness.state / "buckets" / "a-bucket" / "checkpoint").read_text() == "saved\n"


def test_setup_and_every_node_and_attempt_see_it(harness: JobHarness) -> None:
    harness.run(
        f"""
        echo $SKYPILOT_NODE_RANK-$HOLDFAST_ATTEMPT >> {TARGET}/deep/attempts-$SKYPILOT_NODE_RANK
        [ $HOLDFAST_ATTEMPT = 2 ] || exit 75
        """,
        setup=f"echo set up >> {TARGET}/deep/setup-$SKYPILOT_SETUP_NODE_RANK",
        head=f"num_nodes: 2\nfile_mounts: {{{TARGET}/deep: {{name: nodes, mode: MOUNT}}}}",
    )
    bucket = harness.state / "buckets" / "nodes"
    for rank in range(2):
        assert (bucket / f"setup-{rank}").read_text() == "set up\n"
        assert (bucket / f"attempts-{rank}").read_text() == f"{rank}-1\n{rank}-2\n"


def test_files_of_a_killed_node_reach_the_next_attempt_and_the_place(harness: JobHarness) -> None:
    place = harness.folder / "place"
    run = f"""
    echo $HOLDFAST_ATTEMPT >> {TARGET}/attempts
    if [ $HOLDFAST_ATTEMPT = 1 ]; then echo written; while true; do sleep 0.1; done; fi
    """
    job = harness.submit(run, head=f'file_mounts: {{{TARGET}: {{source: "{place}", mode: MOUNT_CACHED}}}}')
    harness.wait_for_output(job, "written")
    harness.kill_node(job, 0)
    harness.succeed(job)
    assert (place / "attempts").read_text() == "1\n2\n"


def test_the_commands_die_with_their_agent(harness: JobHarness) -> None:
    job = harness.submit(
        "[ $HOLDFAST_ATTEMPT = 2 ] && exit 0; echo begun; while true; do sleep 0.1; done",
        head=f"file_mounts: {{{TARGET}: {{name: agent, mode: MOUNT}}}}",
    )
    harness.wait_for_output(job, "begun")
    shells = harness.named(job, "run.sh")
    (agent,) = harness.roles(job, "agent")
    os.kill(agent.pid, 9)
    assert shells
    harness.succeed(job)
    assert not {one.pid for one in shells} & {one.pid for one in harness.named(job, "run.sh")}


def test_paths_of_checkpoints_are_described_as_they_are_outside(harness: JobHarness) -> None:
    job = harness.run(
        f"""echo '{{"home": "{TARGET}/run", "step": 7}}' >> $HOLDFAST_PROGRESS""",
        head=f"file_mounts: {{{TARGET}: {{name: progress, mode: MOUNT}}}}",
    )
    assert describe(job.id).checkpoints == {str(harness.state / "buckets" / "progress" / "run"): 7}


def test_a_launch_notes_what_the_job_alone_sees(harness: JobHarness) -> None:
    mounts = f"{TARGET}: {{name: noted, mode: MOUNT}}, ~/other: {{name: noted, mode: MOUNT}}"
    task = parse_tasks(f"file_mounts: {{{mounts}}}\nrun: 'true'", "task.yaml", Overrides()).only()
    noted = [one.key for one in harness.engine.unsupported_keys(task) if one.what == private_note()]
    assert noted == [f"file_mounts.{TARGET}"]


def refused(harness: JobHarness, target: str) -> None:
    harness.submit("true", head=f"file_mounts: {{{target}: {{name: refused, mode: MOUNT}}}}")


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("/etc", Conflict, "/etc already exists, and was not changed"),
        ("/proc/checkpoints", InvalidInput, "is of the kernel"),
        ("/sys/x/y", InvalidInput, "is of the kernel"),
        ("/dev/checkpoints", InvalidInput, "is of the kernel"),
    ],
)
def test_folders_with_files_and_paths_of_the_kernel_are_refused(
    harness: JobHarness, target: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        refused(harness, target)


@pytest.mark.parametrize(
    "further",
    [f"{TARGET}/deeper", f"{TARGET}/", f"/nowhere/..{TARGET}"],
    ids=["below", "with a slash", "by another path"],  # the same in all processes of pytest
)
def test_targets_at_or_below_one_another_are_refused(harness: JobHarness, further: str) -> None:
    mounts = f"{TARGET}: {{name: outer, mode: MOUNT}}, {further}: {{name: inner, mode: MOUNT}}"
    with pytest.raises(InvalidInput, match="at or below the target"):
        harness.submit("true", head=f"file_mounts: {{{mounts}}}")


def test_a_target_is_private_by_the_path_that_it_means(harness: JobHarness) -> None:
    target = f"{TARGET}/..{harness.folder}/out"
    harness.run("true", head=f"file_mounts: {{{target}: {{name: meant, mode: MOUNT}}}}")
    assert (harness.folder / "out").is_symlink(), "a link that all programs see"


def test_without_namespaces_it_is_refused_at_the_launch(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount_plan, "why_unavailable", lambda: "[Errno 1] Operation not permitted")
    with pytest.raises(Unsupported, match=r"not possible on this machine.*Choose a path below ~"):
        refused(harness, TARGET)
    assert not harness.engine.jobs()
