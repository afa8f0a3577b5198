"""Jobs on a real Slurm of two nodes on this machine: notices, requeues, kills, and their cost."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Command, holdfast
from holdfast import open as open_run
from holdfast.errors import Conflict
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from jobs.harness import needs_namespaces
from jobs.slurm.harness import NOTIFIED, READY, SlurmHarness, command
from jobs.slurm.onebox import OneBox
from jobs.test_training import TOTAL, steps, uninterrupted
from jobs.wheels import contents, make_parent, write_wheel

__all__ = ["holdfast", "uninterrupted"]
TRAINING = Path(__file__).parent.parent / "training.py"
pytestmark = pytest.mark.slow
ONE = "resources: {cpus: 1}"
TWO = "num_nodes: 2\nresources: {cpus: 1}"


def training(folder: Path, *, total: int = TOTAL, step_s: float = 0.05) -> str:
    """Return a command that trains with a Checkpointer."""
    return f"{sys.executable} {TRAINING} {folder / 'home'} {total} --every 5 --step-s {step_s}"


def wait_for_steps(slurm: SlurmHarness, job: object, number: int) -> None:
    slurm.wait_for(job, lambda: len(steps(slurm.folder)) >= number, f"{number} steps")  # type: ignore[arg-type]


def test_two_nodes_communicate_and_return_as_the_same_job(slurm: SlurmHarness) -> None:
    """Status 75 requeues the job. Setup is not repeated on a node where it has succeeded."""
    run = """
    echo rank=$SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES task=$SKYPILOT_TASK_ID attempt=$HOLDFAST_ATTEMPT
    echo peers=$(echo "$SKYPILOT_NODE_IPS" | wc -l) restarts=${SLURM_RESTART_COUNT:-0} who=$WHO
    [ $HOLDFAST_ATTEMPT = 2 ] || exit 75
    """
    job = slurm.submit(run, head=TWO, setup="echo setting up $SKYPILOT_SETUP_NODE_RANK", WHO="me")
    ended = slurm.succeed(job)
    assert (ended.attempt, ended.recoveries) == (2, 1)
    for rank in range(2):
        log = slurm.log(job, rank)
        assert log.count(f"setting up {rank}") == 1
        for attempt in (1, 2):
            assert f"rank={rank} of 2 task={job.task_id} attempt={attempt}" in log
            assert f"peers=2 restarts={attempt - 1} who=me" in log


def test_a_job_of_higher_priority_costs_a_training_no_step(
    slurm: SlurmHarness, uninterrupted: Callable[[int], str]
) -> None:
    job = slurm.submit(training(slurm.folder), head=ONE)
    wait_for_steps(slurm, job, 7)
    slurm.take_node(command("squeue", "-h", "-j", slurm.slurm_id(job), "-o", "%N"))
    ended = slurm.succeed(job)
    assert (ended.recoveries, ended.step) == (1, TOTAL)
    assert [step for _, step in steps(slurm.folder)] == list(range(1, TOTAL + 1)), "each step was done once"
    assert {attempt for attempt, _ in steps(slurm.folder)} == {1, 2}
    assert "SIGUSR1" in slurm.files(job).changed.read_text() + slurm.describe(job)
    assert (slurm.folder / "final.txt").read_text() == uninterrupted(TOTAL)


def test_a_requeue_without_a_signal_before_sigterm_costs_no_step(slurm: SlurmHarness) -> None:
    """As where SlurmctldParameters lacks preempt_send_user_signal, or a user requeues the job."""
    job = slurm.submit(training(slurm.folder), head=ONE)
    wait_for_steps(slurm, job, 7)
    command("scontrol", "requeue", slurm.slurm_id(job))
    assert slurm.succeed(job).recoveries == 1
    assert [step for _, step in steps(slurm.folder)] == list(range(1, TOTAL + 1)), "each step was done once"


WITH_WORKERS = """
import sys, time, torch, holdfast
from pathlib import Path

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index): time.sleep(0.01); return torch.ones(4) * index

if __name__ == "__main__":
    folder, total = Path(sys.argv[1]), int(sys.argv[2])
    model = torch.nn.Linear(4, 2)
    early = iter(torch.utils.data.DataLoader(Data(), 4, num_workers=1))
    with holdfast.Checkpointer(folder / "home", {"model": model}, every=10**9) as ckpt:
        late = iter(torch.utils.data.DataLoader(Data(), 4, num_workers=1))
        for step in ckpt.steps(total):
            model(next(early) + next(late))
            with (folder / "progress.log").open("a") as log:
                print(f"0 {step + 1}", file=log)
"""


def submit_with_workers(slurm: SlurmHarness, total: int) -> Job:
    """Submit a training that saves only at a notice, with loaders older and younger than its Checkpointer."""
    script = slurm.folder / "train.py"
    script.write_text(WITH_WORKERS)
    job = slurm.submit(f"{sys.executable} {script} {slurm.folder} {total}", head=ONE)
    wait_for_steps(slurm, job, 7)
    return job


@pytest.mark.parametrize(
    "words",
    [["scontrol", "requeue"], ["scancel", "--signal=USR1"], ["scancel", "--full", "--signal=USR1"]],
    ids=["requeue", "steps", "all"],
)
def test_a_notice_costs_a_training_with_loader_workers_no_step(slurm: SlurmHarness, words: list[str]) -> None:
    job = submit_with_workers(slurm, 60)
    command(*words, slurm.slurm_id(job))
    assert slurm.succeed(job).recoveries == 1
    assert [step for _, step in steps(slurm.folder)] == list(range(1, 61)), slurm.describe(job)


def test_a_cancellation_in_slurm_saves_a_training_with_loader_workers(slurm: SlurmHarness) -> None:
    job = submit_with_workers(slurm, 10**6)
    command("scancel", slurm.slurm_id(job))
    assert slurm.wait(job).status is JobStatus.CANCELLED, slurm.describe(job)
    assert open_run(slurm.folder / "home").step == steps(slurm.folder)[-1][1], slurm.describe(job)


@pytest.mark.parametrize("options", [["--batch"], [], ["--full"]], ids=["shell", "steps", "both"])
def test_a_notice_reaches_the_training_whichever_process_slurm_signals(
    slurm: SlurmHarness, options: list[str]
) -> None:
    """`B:` signals the batch shell alone, which has a child. Without it only srun's steps are signalled."""
    job = slurm.submit(NOTIFIED, head=ONE)
    slurm.wait_for_output(job, "ready")
    command("scancel", "--signal=USR1", *options, slurm.slurm_id(job))
    assert slurm.succeed(job).attempt == 2
    assert slurm.log(job).count("told") == 1


def test_a_job_near_its_time_limit_is_notified_and_requeued(slurm: SlurmHarness) -> None:
    """Slurm checks limits periodically, so its signal may come up to a minute early."""
    options = "{time: 1, signal: USR1@50, cpus_per_task: 1}"
    job = slurm.submit(NOTIFIED, head=f"config: {{slurm: {{sbatch_options: {options}}}}}")
    assert slurm.succeed(job).attempt == 2
    assert slurm.log(job).count("told") == 1
    assert "(SIGUSR1)" in slurm.files(job).changed.read_text()


def test_a_killed_runner_is_a_lost_node(slurm: SlurmHarness) -> None:
    job = slurm.submit(f"[ $HOLDFAST_ATTEMPT = 2 ] && exit 0\n{READY}", head=TWO)
    slurm.wait(job, JobStatus.RUNNING)
    processes.kill([slurm.runner(job, 1)])
    ended = slurm.succeed(job)
    assert (ended.attempt, ended.restarts_after_errors) == (2, 0)
    assert slurm.log(job, 0).count("ready") == 1


def test_a_killed_controller_is_replaced(slurm: SlurmHarness) -> None:
    """Its batch script, a shell that waits, requests it from Slurm."""
    job = slurm.submit(f"[ $HOLDFAST_ATTEMPT = 2 ] && exit 0\n{READY}", head=ONE)
    slurm.wait_for_output(job, "ready")
    processes.kill(slurm.roles(job, "controller"))
    assert slurm.succeed(job).attempt == 2
    assert slurm.log(job).count("ready") == 1


def test_errors_are_counted_and_the_allocation_is_kept(slurm: SlurmHarness) -> None:
    recovery = "{max_restarts_on_errors: 1, recover_on_exit_codes: [33]}"
    job = slurm.submit(
        "echo restarts=${SLURM_RESTART_COUNT:-0}; [ $HOLDFAST_ATTEMPT = 1 ] && exit 33; echo oh no; exit 3",
        head=f"resources: {{cpus: 1, job_recovery: {recovery}}}",
    )
    ended = slurm.wait(job, JobStatus.FAILED)
    assert (ended.attempt, ended.restarts_after_errors) == (3, 1), slurm.describe(job)
    assert "node 0 failed in run with status 3" in ended.reason
    assert "oh no" in ended.reason
    assert slurm.log(job).count("restarts=0") == 3


def test_a_failed_setup_has_its_own_status(slurm: SlurmHarness) -> None:
    setup = "echo no network; exit 4"
    assert "no network" in slurm.run("echo never", head=ONE, setup=setup, ends=JobStatus.FAILED_SETUP).reason


def test_a_cancelled_job_may_save_first(slurm: SlurmHarness) -> None:
    job = slurm.submit(f"trap 'echo saved; exit 75' TERM\n{READY}", head=ONE)
    slurm.wait_running(job, "ready")
    assert slurm.cancel(job).attempt == 1
    assert slurm.log(job).count("saved") == 1
    with pytest.raises(Conflict, match="has already ended"):
        slurm.engine.cancel(job.id)


def test_a_pending_job_can_be_cancelled(slurm: SlurmHarness) -> None:
    all_of_it = "num_nodes: 2\nconfig: {slurm: {sbatch_options: {exclusive: }}}"
    blocker = slurm.submit("sleep 1000", head=all_of_it)
    slurm.wait(blocker, JobStatus.RUNNING)
    job = slurm.submit("echo never", head=ONE)
    assert slurm.engine.job(job.id).status is JobStatus.PENDING
    assert "waits in Slurm" in slurm.engine.job(job.id).reason
    with pytest.raises(Conflict, match="no process"):
        slurm.engine.preempt(job.id, lead_s=1)
    slurm.cancel(job)
    slurm.cancel(blocker)


@needs_namespaces
def test_every_node_has_the_private_mounts_of_its_job(slurm: SlurmHarness) -> None:
    target = f"/holdfast-test-{os.getpid()}"
    slurm.run(
        f"echo $SKYPILOT_NODE_RANK > {target}/deep/$SKYPILOT_NODE_RANK",
        head=f"{TWO}\nfile_mounts: {{{target}/deep: {{name: private, mode: MOUNT}}}}",
    )
    bucket = slurm.folder / "state" / "buckets" / "private"
    assert {path.name: path.read_text() for path in bucket.iterdir()} == {"0": "0\n", "1": "1\n"}
    assert not Path(target).exists()


def test_every_node_has_a_virtual_environment_of_its_own(
    slurm: SlurmHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = [write_wheel(tmp_path, "own"), write_wheel(tmp_path, "shared")]
    programs = make_parent(tmp_path / "parent", wheels[1])
    before = contents(programs.parent)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_USER", "1")
    job = slurm.run(
        "own-show; shared-show; [ $HOLDFAST_ATTEMPT = 2 ] || exit 75",
        head=TWO,
        setup=f"pip install --no-index --find-links {tmp_path} own",
    )
    for rank in range(2):
        log = slurm.log(job, rank)
        (venv,) = slurm.files(job).workdir(rank).parent.glob("venv.*")
        for name in ("own", "shared"):
            assert log.count(f"{name} 1.0 by {venv}/bin/python") == 2, log
        assert log.count("Successfully installed own") == 1
    assert contents(programs.parent) == before


def test_a_cancellation_in_slurm_is_reported_as_such(slurm: SlurmHarness) -> None:
    job = slurm.submit(READY, head=ONE)
    slurm.wait_for_output(job, "ready")
    command("scancel", slurm.slurm_id(job))
    assert slurm.wait(job, JobStatus.CANCELLED).reason == "cancelled in Slurm"


def test_processes_without_a_handler_for_sigusr1_survive_it(slurm: SlurmHarness) -> None:
    """Slurm may signal every process of a job. Those without a handler live on until the job ends."""
    run = f"""
    [ $HOLDFAST_ATTEMPT = 2 ] && exit 0
    {sys.executable} -c 'import time; print("deaf", flush=True); time.sleep(1000)' &
    trap 'kill -0 $! && echo still there; exit 75' TERM
    {READY}
    """
    job = slurm.submit(run, head=ONE)
    slurm.wait_for_output(job, "deaf")
    slurm.wait_for_output(job, "ready")
    os.kill(slurm.runner(job, 0).pid, signal.SIGUSR1)
    for process in processes.descendants(slurm.runner(job, 0).pid, processes.snapshot()):
        processes.send(process, signal.SIGUSR1)
    slurm.succeed(job)
    assert "still there" in slurm.log(job)


def test_commands_find_a_job_by_its_id_alone(slurm: SlurmHarness, holdfast: Command) -> None:
    task = slurm.folder / "task.yaml"
    task.write_text("name: here\nrun: echo hello from here\n")
    holdfast("launch", task)
    task.write_text(f"name: there\nresources: {{cpus: 1}}\nrun: |\n  trap 'exit 75' TERM\n  {READY}\n")
    said = holdfast("launch", task, "--on", "slurm")
    assert said.out.startswith("job 2 (there) was submitted")
    job = slurm.engine.job(2)
    slurm.wait(job, JobStatus.RUNNING)
    rows = holdfast("queue", "--json").json
    found = [(row["id"], row["engine"], row["name"]) for row in rows]
    assert found == [(2, "slurm", "there"), (1, "local", "here")]
    assert [row["id"] for row in holdfast("queue", "--on", "slurm", "--json").json] == [2]
    assert holdfast("preempt", 2, "--lead", "60").status == 0
    slurm.wait(job, JobStatus.RUNNING, attempt=2)
    assert holdfast("forget", 2, "--yes").status == 1  # it lives
    assert holdfast("cancel", 2).status == 0
    out = holdfast("logs", 2, "-f").out
    assert out.count("ready") == 2
    assert "hello from here" in holdfast("logs", 1, "-f").out
    assert slurm.wait(job).status is JobStatus.CANCELLED
    assert holdfast("forget", 2, "--yes").status == 0
    assert [row["id"] for row in holdfast("queue", "--json").json] == [1]
    assert not slurm.files(job).path.exists()


def test_the_queue_while_slurm_is_away_has_one_short_message(
    slurm: SlurmHarness, cluster: OneBox, holdfast: Command
) -> None:
    """The jobs continue, and can be cancelled once it is back."""
    jobs = [slurm.submit(f"trap 'exit 75' TERM\n{READY}", head=ONE) for _ in range(2)]
    for job in jobs:
        slurm.wait_for_output(job, "ready")
    with cluster.without_controller():
        shown = holdfast("queue")
        rows = shown.out.splitlines()[1:]
        assert [row.rstrip().endswith("Slurm does not answer") for row in rows] == [True] * 2, shown
        assert len(shown.err.splitlines()) == 1, shown
        assert "Unable to contact slurm controller" in shown.err
    for job in jobs:
        slurm.wait(job, JobStatus.RUNNING)
        slurm.engine.cancel(job.id)
    for job in jobs:
        assert slurm.wait(job).status is JobStatus.CANCELLED, slurm.describe(job)


def test_a_checkpoint_that_the_keeper_commits_after_a_crash_is_shown(
    slurm: SlurmHarness, holdfast: Command
) -> None:
    script = slurm.folder / "train.py"
    script.write_text(
        "import os, signal, torch, holdfast\n"
        f"ckpt = holdfast.Checkpointer({str(slurm.folder / 'home')!r}, {{'x': torch.zeros(8)}})\n"
        "ckpt.save(1).wait_durable()\nckpt.save(2).wait_staged()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = slurm.submit(f"{sys.executable} {script}", head=ONE)
    assert slurm.wait(job).status is JobStatus.FAILED, slurm.describe(job)
    assert open_run(slurm.folder / "home").step == 2
    assert [row["step"] for row in holdfast("queue", "--json").json] == [2]
    described = holdfast("describe", job.id, "--json").json
    assert (described["job"]["step"], list(described["checkpoints"].values())) == (2, [2])


def test_random_kills_do_not_change_the_result(
    slurm: SlurmHarness, uninterrupted: Callable[[int], str]
) -> None:
    """Of trainer, keeper, controller and runner. CHAOS_KILLS sets their number."""
    chance = random.Random(20261124)
    num_kills = int(os.environ.get("CHAOS_KILLS", "20"))
    total = 30 * num_kills
    head = "resources: {cpus: 1, job_recovery: {max_restarts_on_errors: 1000}}"
    job = slurm.submit(training(slurm.folder, total=total, step_s=0.01), head=head)
    killed: Counter[str] = Counter()
    while sum(killed.values()) < num_kills:
        before = len(steps(slurm.folder))
        # Most kills come once an attempt has trained for a while, some while it still starts.
        if chance.random() < 0.8:
            wait_for_steps(slurm, job, before + chance.randrange(5, 15))
        assert not slurm.engine.job(job.id).status.is_final, slurm.describe(job)
        what = chance.choice(["training.py", "holdfast.checkpoint.keeper", "controller", "runner"])
        is_role = what in ("controller", "runner")
        if found := slurm.roles(job, what) if is_role else slurm.named(job, what):
            processes.kill(found)
            killed[what] += 1
    slurm.succeed(job)
    assert len(killed) == 4, killed
    assert (slurm.folder / "final.txt").read_text() == uninterrupted(total)
