"""Jobs that train with a Checkpointer: what they save, and what notices and kills cost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.store import open_store
from holdfast.jobs.engine import Job
from holdfast.jobs.history import list_attempts, read_changes
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from holdfast.watch.report.summary import read_summary
from jobs.harness import JobHarness
from nursery import shared
from servers import reserve_port

Digest = Callable[[int], str]
TRAINING = Path(__file__).parent / "training.py"
SPIKING = Path(__file__).parents[1] / "checkpointer" / "spiking.py"
TOTAL = 60
EVERY = 5
PAUSE = ("--pause-at", "40")
"""Options of a training that cannot end before its job is preempted."""
RESTARTS = "resources: {job_recovery: {max_restarts_on_errors: 1000}}"


def command(folder: Path, *options: str, total: int = TOTAL, launcher: str = sys.executable) -> str:
    return f"{launcher} {TRAINING} {folder}/home {total} --every {EVERY} {' '.join(options)}"


def torchrun(folder: Path, port: int, *options: str) -> str:
    nodes = "--nnodes $SKYPILOT_NUM_NODES --node_rank $SKYPILOT_NODE_RANK --nproc_per_node 1"
    master = f'--master_port {port} --master_addr $(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    launcher = f"{sys.executable} -m torch.distributed.run {nodes} {master}"
    return command(folder, *options, launcher=launcher)


def steps(folder: Path) -> list[tuple[int, int]]:
    """Return (attempt, step) of every completed step, in order."""
    log = folder / "progress.log"
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(attempt), int(step)) for attempt, step in lines]


def wait_for_steps(harness: JobHarness, job: Job, number: int, *, attempt: int | None = None) -> None:
    """Wait until a number of steps is completed, in all attempts or in one."""

    def is_there() -> bool:
        assert not harness.engine.job(job.id).status.is_final, harness.describe(job)
        return len([1 for one, _ in steps(harness.folder) if attempt in (None, one)]) >= number

    harness.wait_for(job, is_there, f"{number} steps")


def check_recovery(harness: JobHarness, job: Job) -> Job:
    """Check that a job succeeds in its second attempt, which was not counted as an error."""
    ended = harness.wait(job)
    found = (ended.status, ended.recoveries, ended.restarts_after_errors)
    assert found == (JobStatus.SUCCEEDED, 1, 0), harness.describe(job)
    return ended


def check_steps(harness: JobHarness) -> None:
    """Check that each step was done once."""
    assert [step for _, step in steps(harness.folder)] == list(range(1, TOTAL + 1))


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Digest:
    """Return the digest after an uninterrupted training, by its number of steps."""
    found: dict[int, str] = {}

    def digest(total: int) -> str:
        if total not in found:
            folder = tmp_path_factory.mktemp("uninterrupted")
            done = shared().run([str(TRAINING), str(folder / "home"), str(total), "--every", str(EVERY)])
            assert done.returncode == 0, done.stderr
            found[total] = (folder / "final.txt").read_text()
        return found[total]

    return digest


def test_a_preemption_with_notice_costs_no_step(harness: JobHarness, uninterrupted: Digest) -> None:
    job = harness.submit(command(harness.folder, *PAUSE))
    wait_for_steps(harness, job, 7)
    harness.engine.preempt(job.id, lead_s=600)
    assert check_recovery(harness, job).step == TOTAL
    check_steps(harness)
    assert {attempt for attempt, _ in steps(harness.folder)} == {1, 2}
    assert (harness.folder / "final.txt").read_text() == uninterrupted(TOTAL)


@pytest.mark.slow
def test_the_next_attempt_begins_with_all_modules_imported(
    harness: JobHarness, uninterrupted: Digest
) -> None:
    """Its processes belong to the job as others do: after its end only standbys are left, for two minutes."""
    envs = {"HOLDFAST_STANDBY": "1", "HOLDFAST_KEEP_IN_MEMORY": "2m"}
    job = harness.submit(command(harness.folder, *PAUSE), **envs)
    harness.wait_for(job, lambda: standbys(harness), "a standby that listens")
    harness.engine.preempt(job.id, lead_s=600)
    assert check_recovery(harness, job).step == TOTAL
    assert b"holdfast.watch.standby" not in (harness.folder / "parent-1").read_bytes()
    assert b"holdfast.watch.standby" in (harness.folder / "parent-2").read_bytes()
    assert (harness.folder / "final.txt").read_text() == uninterrupted(TOTAL)
    harness.wait_for(job, lambda: not standbys(harness), "the end of the standby of a complete training")


def standbys(harness: JobHarness) -> list[str]:
    """Return the sockets on which standbys of this test's training listen."""
    found = []
    for process in processes.snapshot().values():
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if b"holdfast.watch.standby" in words and str(harness.state).encode() in environment:
                found.append(words[words.index(b"holdfast.watch.standby") + 1].decode())
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [name for name in found if any(line.endswith(f"@{name}") and "00010000" in line for line in lines)]


@pytest.mark.slow
def test_a_training_that_hangs_starts_again_by_itself(harness: JobHarness, uninterrupted: Digest) -> None:
    job = harness.submit(command(harness.folder, "--hang-at", "12"))
    assert harness.wait(job).status is JobStatus.SUCCEEDED, harness.describe(job)
    assert (harness.folder / "final.txt").read_text() == uninterrupted(TOTAL)
    assert next(step for attempt, step in steps(harness.folder) if attempt == 2) == 11
    first = list_attempts(read_changes(harness.files(job)))[0]
    assert first.reason.startswith("node 0 hung (rank 0 in training.py:")
    assert "THE TRAINING HANGS" in harness.log(job)


@pytest.mark.slow
def test_a_training_that_diverges_ends_with_that_reason(harness: JobHarness) -> None:
    """However many restarts after errors are allowed: each would resume in the same spike."""
    words = [
        *(sys.executable, str(SPIKING), str(harness.folder / "home"), "300", "--poison", "400", "100000000"),
        *("--on-spike", "rollback", "--max-rollbacks", "1"),
    ]
    job = harness.wait(harness.submit(" ".join(words), head=RESTARTS), JobStatus.FAILED)
    assert job.reason.startswith("node 0 diverged: loss is ")
    assert "again after 1 rollback in a row\n" in job.reason
    assert len(list_attempts(read_changes(harness.files(job)))) == 1


@pytest.mark.slow
def test_a_training_that_hangs_at_the_same_place_ends_with_that_reason(harness: JobHarness) -> None:
    job = harness.submit(command(harness.folder, "--hang-at", "12", "--hangs", "9"))
    ended = harness.wait(job)
    # The first attempt may not have reported its last save: that of the second then counts as progress.
    assert (ended.status, ended.attempt in (2, 3)) == (JobStatus.FAILED, True), harness.describe(job)
    expected = "the training hung twice at the same place, without a newer checkpoint: rank 0 in training.py:"
    assert ended.reason.startswith(expected)


@pytest.mark.slow
def test_two_nodes_start_again_after_one_has_hung(harness: JobHarness) -> None:
    """The launcher between the job and its training replaces the exit status."""
    run = torchrun(harness.folder, reserve_port(), "--hang-at", "12")
    job = harness.submit(run, head="num_nodes: 2")
    assert harness.wait(job).status is JobStatus.SUCCEEDED, harness.describe(job)
    first = list_attempts(read_changes(harness.files(job)))[0]
    assert "hung (rank 1 in training.py:" in first.reason, first.reason
    assert (harness.folder / "final.txt").exists()


@pytest.mark.essential
def test_the_loss_of_a_node_costs_only_the_steps_after_the_last_save(
    harness: JobHarness, uninterrupted: Digest
) -> None:
    job = harness.submit(command(harness.folder, *PAUSE))
    harness.wait_for(job, lambda: (harness.engine.job(job.id).step or 0) >= 2 * EVERY, "two saves")
    saved = harness.engine.job(job.id).step or 0
    harness.kill_node(job, 0)
    check_recovery(harness, job)
    first = min(step for attempt, step in steps(harness.folder) if attempt == 2)
    assert first > saved, "what was durable is not done again"
    assert (harness.folder / "final.txt").read_text() == uninterrupted(TOTAL)


@pytest.mark.slow
def test_a_launcher_that_replaces_the_status_of_a_preemption_does_not_make_it_an_error(
    harness: JobHarness, uninterrupted: Digest
) -> None:
    """As torchrun does, which exits with 1. The notice comes from outside of the job."""
    job = harness.submit(f"{command(harness.folder, *PAUSE)} || exit 1")
    wait_for_steps(harness, job, 7)
    for process in harness.of_job(job):
        if str(TRAINING).encode() in (Path("/proc") / str(process.pid) / "cmdline").read_bytes().split(b"\0"):
            os.kill(process.pid, signal.SIGTERM)
    check_recovery(harness, job)
    check_steps(harness)
    assert (harness.folder / "final.txt").read_text() == uninterrupted(TOTAL)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_nodes_train_together_and_survive_a_notice(harness: JobHarness) -> None:
    """With torchrun on two loopback addresses, whose exit with 1 after a notice is not an error."""
    job = harness.submit(torchrun(harness.folder, reserve_port(), *PAUSE), head="num_nodes: 2")
    wait_for_steps(harness, job, 7)
    harness.engine.preempt(job.id, lead_s=600)
    check_recovery(harness, job)
    check_steps(harness)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("node", [0, 1])
def test_two_nodes_survive_the_loss_of_one(harness: JobHarness, node: int) -> None:
    """Including the one whose rank commits, while the other's keeper waits for it."""
    job = harness.submit(torchrun(harness.folder, reserve_port(), *PAUSE), head="num_nodes: 2")
    wait_for_steps(harness, job, 13)
    harness.kill_node(job, node)
    check_recovery(harness, job)
    assert steps(harness.folder)[-1] == (2, TOTAL)


@pytest.mark.slow
def test_chaos(harness: JobHarness, uninterrupted: Digest, request: pytest.FixtureRequest) -> None:
    """Random kills of trainer, keeper, controller and node do not change the result."""
    chance = random.Random(20261121)
    num_kills = int(os.environ.get("CHAOS_KILLS", "100"))
    total = 30 * num_kills
    job = harness.submit(command(harness.folder, "--step-s", "0.01", total=total), head=RESTARTS)
    killed: dict[str, int] = {}
    while sum(killed.values()) < num_kills:
        before = len(steps(harness.folder))
        # Most kills come once an attempt has trained for a while, some while it still starts.
        if chance.random() < 0.8:
            wait_for_steps(harness, job, before + chance.randrange(EVERY, 3 * EVERY))
        assert not harness.engine.job(job.id).status.is_final, harness.describe(job)
        what = chance.choice(["trainer", "keeper", "controller", "node"])
        if kill(harness, job, what):
            killed[what] = killed.get(what, 0) + 1
        harness.engine.jobs()  # as somebody does who looks how it goes
    harness.succeed(job)
    assert set(killed) == {"trainer", "keeper", "controller", "node"}, killed
    assert (harness.folder / "final.txt").read_text() == uninterrupted(total)
    (curve,) = read_summary(open_store(str(harness.folder / "home"))).curves
    assert [point.step for point in curve.counted] == list(range(1, total + 1)), "one value for each step"


def kill(harness: JobHarness, job: Job, what: str) -> bool:
    """Kill one part of a job. Return False if it was not running."""
    if what == "trainer":
        return kill_all(harness.named(job, "training.py"))
    if what == "keeper":
        return kill_all(harness.named(job, "holdfast.checkpoint.keeper"))
    if what == "controller":
        return kill_all(harness.roles(job, "controller"))
    try:
        harness.kill_node(job, 0)
    except FileNotFoundError:
        return False  # between two attempts
    return True


def kill_all(found: list[processes.Process]) -> bool:
    """Kill processes. Return False if there were none."""
    processes.kill(found)
    return bool(found)
