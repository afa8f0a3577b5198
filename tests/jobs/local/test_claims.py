"""Claims of jobs: GPUs, CPUs and memory belong to one job at a time, whatever is killed."""

from __future__ import annotations

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.local.claims import locked, read_claims
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.node import processes
from holdfast.jobs.node.job_secrets import has_secrets
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import Overrides, parse_tasks
from jobs.harness import JobHarness

HOLD = 'echo "has $CUDA_VISIBLE_DEVICES"; until [ -e $GO ]; do sleep 0.05; done'
"""Command that shows its GPUs and runs until a file exists."""


@pytest.fixture(autouse=True)
def _machine(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the machine four GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")


def hold(harness: JobHarness, gpus: int, go: str = "go", **head: object) -> Job:
    """Submit a job that keeps its GPUs until the file `go` exists."""
    lines = [f"resources: {{accelerators: A100:{gpus}}}"] if gpus else []
    lines += [f"{key}: {value}" for key, value in head.items()]
    return harness.submit(HOLD, head="\n".join(lines), GO=str(harness.folder / go))


def shown(harness: JobHarness, job: Job, node: int = 0) -> list[str]:
    """Return the GPUs that a node has shown in each attempt."""
    words = [line for line in harness.log(job, node).splitlines() if line.startswith("has ")]
    return [line.removeprefix("has ") for line in words]


def release(harness: JobHarness, go: str = "go") -> None:
    """End the jobs that wait for a file."""
    (harness.folder / go).touch()


def test_a_job_has_its_gpus_alone_and_others_wait_for_them(harness: JobHarness) -> None:
    first = hold(harness, 3, "one")
    harness.wait_for_output(first, "has 0,1,2")
    second = hold(harness, 2)
    third = hold(harness, 1)
    assert second.status is JobStatus.PENDING
    assert second.reason == f"waits for 2 GPUs (1 free); job {first.id} has the rest"
    waiting = harness.engine.job(third.id)
    assert waiting.status is JobStatus.PENDING
    assert waiting.reason.endswith(f"job {first.id} has the rest, and job {second.id} comes first")
    release(harness, "one")
    harness.wait_for_output(second, "has ")
    harness.wait_for_output(third, "has ")
    assert harness.engine.job(second.id).gpus == (("0", "1"),)
    assert (shown(harness, second), shown(harness, third)) == (["0,1"], ["2"])
    release(harness)
    assert harness.wait(second).status is harness.wait(third).status is JobStatus.SUCCEEDED


def test_nodes_of_one_job_have_different_gpus(harness: JobHarness) -> None:
    job = hold(harness, 2, num_nodes=2)
    for node, gpus in enumerate(("0,1", "2,3")):
        harness.wait_for_output(job, f"has {gpus}", node=node)
    assert hold(harness, 1).reason.startswith("waits for 1 GPU (0 free)")
    release(harness)


def test_more_gpus_than_the_machine_has_are_refused(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unsupported, match=r"expected at most 4 GPUs, .*, found 6 on 2 nodes"):
        hold(harness, 3, num_nodes=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a machine without GPUs divides none
    release(harness)
    job = hold(harness, 8)
    harness.succeed(job)


def test_only_the_visible_gpus_are_given(harness: JobHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    first = hold(harness, 1)
    harness.wait_for_output(first, "has 2")
    assert hold(harness, 2).reason.startswith("waits for 2 GPUs (1 free)")
    release(harness)


def test_the_task_cannot_choose_gpus_of_another_job(harness: JobHarness) -> None:
    release(harness)
    job = hold(harness, 1, envs="{CUDA_VISIBLE_DEVICES: '3'}")
    harness.succeed(job)
    assert shown(harness, job) == ["0"]


def test_cpus_and_memory_are_divided_if_they_are_asked_for(harness: JobHarness) -> None:
    first = hold(harness, 0, resources="{cpus: 9999+}")
    harness.wait(first, JobStatus.RUNNING)
    second = harness.submit("true", head="resources: {cpus: 1}")
    assert second.reason.startswith("waits for 1 CPU (0 free)")
    third = hold(harness, 0, resources="{memory: 900000+}")
    harness.wait(third, JobStatus.RUNNING)
    fourth = harness.submit("true", head="resources: {memory: 1}")
    assert "waits for 1 GiB of memory" in fourth.reason
    harness.run("true")  # asks for nothing
    release(harness)
    for job in (first, second, third, fourth):
        harness.succeed(job)


@pytest.mark.essential
def test_jobs_start_by_priority_and_then_in_their_order(harness: JobHarness) -> None:
    first = hold(harness, 4, "first")
    harness.wait(first, JobStatus.RUNNING)
    order = harness.folder / "order"
    heads = {
        name: f"resources: {{accelerators: A100:3, priority: {priority}}}\nname: {name}"
        for name, priority in {"early": 0, "late": 0, "urgent": 5}.items()
    }
    jobs = [harness.submit(f"echo {name} >> {order}", head=head) for name, head in heads.items()]
    release(harness, "first")
    for job in jobs:
        harness.succeed(job)
    assert order.read_text().split() == ["urgent", "early", "late"]
    assert [job.priority for job in jobs] == [0, 0, 5]


def test_a_waiting_job_can_be_cancelled_and_lets_the_next_one_start(harness: JobHarness) -> None:
    first = hold(harness, 2, "first")
    harness.wait(first, JobStatus.RUNNING)
    second, third = hold(harness, 4), hold(harness, 2)
    assert third.status is JobStatus.PENDING
    harness.cancel(second)
    harness.wait_for_output(third, "has 2,3")
    release(harness, "first")
    release(harness)


def test_jobs_that_wait_behind_others_are_cancelled_at_once_and_without_a_process(
    harness: JobHarness,
) -> None:
    first = hold(harness, 2, "first")
    harness.wait(first, JobStatus.RUNNING)
    waiting = [hold(harness, 4) for _ in range(4)]
    last = hold(harness, 2)
    for job in waiting[1:]:  # the first that waits keeps its controller, which cancels it
        harness.wait_for(job, lambda job=job: not harness.roles(job, "controller"), "its controller's end")
    cancelled = harness.engine.cancel_all([job.id for job in waiting])
    ended = [(one.id, one.status) for one in cancelled if isinstance(one, Job)]
    assert [id for id, _ in ended] == [job.id for job in waiting]
    assert all(status is JobStatus.CANCELLED for _, status in ended[1:])
    assert not any(has_secrets(harness.files(job)) for job in waiting[1:])
    assert harness.wait(waiting[0]).status is JobStatus.CANCELLED
    harness.wait_for_output(last, "has 2,3")
    release(harness, "first")
    release(harness)


def test_a_job_keeps_its_gpus_while_everything_of_it_is_dead(harness: JobHarness) -> None:
    first = hold(harness, 4, "first")
    harness.wait_for_output(first, "has 0,1,2,3")
    second = hold(harness, 1)
    for job in (first, second):
        processes.kill(harness.roles(job, "controller"))
    processes.kill(harness.roles(first, "agent"))
    processes.kill(harness.of_job(first))
    assert harness.engine.job(second.id).reason.startswith("waits for 1 GPU (0 free)")
    harness.wait_for_output(first, "has 0,1,2,3", times=2)  # the next attempt has the same
    release(harness, "first")
    harness.wait_for_output(second, "has 0")
    release(harness)
    harness.succeed(second)


def test_a_waiting_job_starts_the_controller_of_a_dead_one(harness: JobHarness) -> None:
    first = hold(harness, 4, "first")
    harness.wait_for_output(first, "has 0,1,2,3")
    second = hold(harness, 4)
    harness.wait_for(second, lambda: harness.roles(second, "controller"), "its controller")
    harness.kill_all(first)
    harness.wait_for_output(first, "has 0,1,2,3", times=2)  # without a command
    release(harness, "first")
    release(harness)
    harness.wait_for_output(second, "has 0,1,2,3")


def test_gpus_are_known_without_the_journal_and_without_the_record(harness: JobHarness) -> None:
    job = hold(harness, 2, num_nodes=2)
    for node in range(2):
        harness.wait_for_output(job, "has ", node=node)
    harness.kill_controller(job)
    processes.kill(harness.roles(job, "controller"))
    harness.files(job).states.unlink()
    assert harness.record(job).state.gpus == (("0", "1"), ("2", "3"))
    for path in harness.files(job).submissions:
        path.write_text("damaged")
    assert hold(harness, 1).reason.startswith("waits for 1 GPU (0 free)")
    release(harness)


def test_a_strange_folder_costs_no_other_job_its_start(harness: JobHarness) -> None:
    release(harness)
    job = hold(harness, 1)
    (harness.state / "jobs" / "77").write_text("no folder")
    assert harness.wait(hold(harness, 4)).status is JobStatus.SUCCEEDED
    harness.wait(job)


@pytest.mark.slow
def test_launches_at_the_same_moment_never_get_the_same_gpu(harness: JobHarness) -> None:
    """Twelve jobs for four GPUs. Each holds a folder per GPU, which another one cannot create meanwhile."""
    run = """
        for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do mkdir $USED/$gpu || exit 1; done
        sleep 0.2
        for gpu in ${CUDA_VISIBLE_DEVICES//,/ }; do rmdir $USED/$gpu; done
    """
    used = harness.folder / "used"
    used.mkdir()

    def submit(number: int) -> Job:
        text = f"resources: {{accelerators: A100:{1 + number % 3}}}\nrun: |\n{run}"
        file = parse_tasks(text, str(harness.folder / "task.yaml"), Overrides(envs={"USED": str(used)}))
        return LocalEngine().submit_file(file)[0]

    with ThreadPoolExecutor(6) as pool:
        jobs = list(pool.map(submit, range(12)))
    for job in jobs:
        harness.succeed(job)
    assert all(job.gpus for job in harness.engine.jobs())


@pytest.mark.slow
def test_jobs_behind_the_first_waiting_one_have_no_process(harness: JobHarness) -> None:
    first = hold(harness, 4)
    harness.wait(first, JobStatus.RUNNING)
    waiting = [hold(harness, 4) for _ in range(3)]
    for job in waiting[1:]:
        harness.wait_for(job, lambda job=job: not harness.roles(job, "controller"), "its controller's end")
    claims = read_claims(harness.engine._records, harness.state)
    assert claims.leading == (waiting[0].id,)
    assert len(harness.engine.jobs()) == 4
    release(harness)
    for job in waiting:
        harness.succeed(job)


def test_a_task_of_a_pipeline_waits_for_its_claim_only_when_it_is_its_turn(harness: JobHarness) -> None:
    text = f"""
    name: train
    run: {HOLD}
    envs: {{GO: "{harness.folder / "train"}"}}
    ---
    name: evaluate
    resources: {{accelerators: A100:4}}
    run: {HOLD}
    envs: {{GO: "{harness.folder / "evaluate"}"}}
    """
    file = parse_tasks(textwrap.dedent(text).replace(HOLD, repr(HOLD)), str(harness.folder / "task.yaml"))
    train, evaluate = harness.engine.submit_file(file)
    harness.wait(train, JobStatus.RUNNING)
    assert harness.engine.job(evaluate.id).reason == f"waits for job {train.id}"
    other = hold(harness, 4, "other")  # comes later, and does not wait for the pipeline
    harness.wait_for_output(other, "has 0,1,2,3")
    release(harness, "train")
    harness.succeed(train)
    harness.wait_for(evaluate, lambda: "GPU" in harness.engine.job(evaluate.id).reason, "its reason")
    release(harness, "other")
    harness.wait_for_output(evaluate, "has 0,1,2,3")
    release(harness, "evaluate")
    harness.succeed(evaluate)


def test_a_claim_is_taken_only_under_the_lock(harness: JobHarness) -> None:
    release(harness)
    harness.wait(hold(harness, 0))
    with locked(harness.state):
        job = hold(harness, 4)

        def is_blocked() -> bool:
            waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
            pids = {str(one.pid) for one in harness.roles(job, "controller")}
            return bool(pids & {pid for words in waiting for pid in words})

        harness.wait_for(job, lambda: is_blocked() or harness.record(job).state.gpus, "its controller")
        assert harness.record(job).state.gpus == ()
    harness.succeed(job)
