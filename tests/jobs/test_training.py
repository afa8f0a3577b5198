"""Jobs that train: what a Checkpointer in them saves, and what notices and kills cost."""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.status import Status
from holdfast.report import read_story
from holdfast.store import open_store
from jobs.desk import Desk

TRAINING = Path(__file__).parent / "training.py"
TOTAL = 60
EVERY = 5
RESTARTS = "resources: {job_recovery: {max_restarts_on_errors: 1000}}"


def command(folder: Path, *options: str, total: int = TOTAL) -> str:
    words = [sys.executable, str(TRAINING), str(folder / "home"), str(total), "--every", str(EVERY), *options]
    return " ".join(words)


def torchrun(folder: Path, port: int, *options: str, total: int = TOTAL) -> str:
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "$SKYPILOT_NUM_NODES"),
        *("--node_rank", "$SKYPILOT_NODE_RANK", "--nproc_per_node", "1", "--master_port", str(port)),
        *("--master_addr", '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'),
        *(str(TRAINING), str(folder / "home"), str(total), "--every", str(EVERY), *options),
    ]
    return " ".join(words)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def steps(folder: Path) -> list[tuple[int, int]]:
    """(attempt, step) of every step that was done, in order."""
    log = folder / "progress.log"
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(int(attempt), int(step)) for attempt, step in lines]


def wait_for_steps(desk: Desk, job: Job, number: int, *, attempt: int | None = None) -> None:
    """Wait until so many steps were done, in all or in one attempt."""

    def is_there() -> bool:
        assert not desk.engine.job(job.id).status.is_final, desk.tell(job)
        return len([1 for one, _ in steps(desk.folder) if attempt in (None, one)]) >= number

    desk.wait_for(job, is_there, f"{number} steps")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Digest of the end of a training that nothing happened to, by its number of steps."""
    import subprocess

    found: dict[int, str] = {}

    def digest(total: int) -> str:
        if total not in found:
            folder = tmp_path_factory.mktemp("uninterrupted")
            words = [sys.executable, str(TRAINING), str(folder / "home"), str(total), "--every", str(EVERY)]
            subprocess.run(words, check=True, capture_output=True)
            found[total] = (folder / "final.txt").read_text()
        return found[total]

    return digest


def test_a_preemption_with_notice_costs_no_step(desk: Desk, uninterrupted: Callable[[int], str]) -> None:
    job = desk.submit(command(desk.folder, "--step-s", "0.02"))
    wait_for_steps(desk, job, 7)
    desk.engine.preempt(job.id, lead_s=60)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries, ended.step) == (Status.SUCCEEDED, 1, TOTAL), desk.tell(job)
    assert [step for _, step in steps(desk.folder)] == list(range(1, TOTAL + 1)), "each step was done once"
    assert {attempt for attempt, _ in steps(desk.folder)} == {1, 2}
    assert (desk.folder / "final.txt").read_text() == uninterrupted(TOTAL)


def test_the_loss_of_a_node_costs_what_came_after_the_last_save(
    desk: Desk, uninterrupted: Callable[[int], str]
) -> None:
    job = desk.submit(command(desk.folder, "--step-s", "0.02"))
    desk.wait_for(job, lambda: (desk.engine.job(job.id).step or 0) >= 2 * EVERY, "two saves")
    saved = desk.engine.job(job.id).step or 0
    desk.kill_node(job, 0)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1), desk.tell(job)
    first = min(step for attempt, step in steps(desk.folder) if attempt == 2)
    assert first > saved, "what was durable is not done again"
    assert (desk.folder / "final.txt").read_text() == uninterrupted(TOTAL)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_nodes_train_together_and_survive_a_notice(desk: Desk) -> None:
    """With torchrun on two loopback addresses; it ends with 1 when told to stop, and that is no error."""
    job = desk.submit(torchrun(desk.folder, free_port(), "--step-s", "0.02"), head="num_nodes: 2")
    wait_for_steps(desk, job, 7)
    desk.engine.preempt(job.id, lead_s=60)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries, ended.restarts_after_errors) == (Status.SUCCEEDED, 1, 0), (
        desk.tell(job)
    )
    assert [step for _, step in steps(desk.folder)] == list(range(1, TOTAL + 1)), "each step was done once"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("node", [0, 1])
def test_two_nodes_survive_the_loss_of_one(desk: Desk, node: int) -> None:
    """Also of the one whose rank commits, with the other's keeper waiting for it."""
    job = desk.submit(torchrun(desk.folder, free_port(), "--step-s", "0.02"), head="num_nodes: 2")
    wait_for_steps(desk, job, 13)
    desk.kill_node(job, node)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries, ended.restarts_after_errors) == (Status.SUCCEEDED, 1, 0), (
        desk.tell(job)
    )
    assert steps(desk.folder)[-1] == (2, TOTAL)


@pytest.mark.slow
def test_chaos(desk: Desk, uninterrupted: Callable[[int], str], request: pytest.FixtureRequest) -> None:
    """Random kills of trainer, keeper, controller and whole node; the job ends as if nothing had happened."""
    chance = random.Random(20261121)
    num_kills = int(os.environ.get("CHAOS_KILLS", "100"))
    total = 30 * num_kills
    job = desk.submit(command(desk.folder, "--step-s", "0.01", total=total), head=RESTARTS)
    killed: dict[str, int] = {}
    while sum(killed.values()) < num_kills:
        before = len(steps(desk.folder))
        # Most kills come once an attempt has trained for a while, some while it still starts.
        if chance.random() < 0.8:
            wait_for_steps(desk, job, before + chance.randrange(EVERY, 3 * EVERY))
        assert not desk.engine.job(job.id).status.is_final, desk.tell(job)
        what = chance.choice(["trainer", "keeper", "controller", "node"])
        if kill(desk, job, what):
            killed[what] = killed.get(what, 0) + 1
        desk.engine.jobs()  # as somebody does who looks how it goes
    ended = desk.wait(job)
    assert ended.status is Status.SUCCEEDED, desk.tell(job)
    assert set(killed) == {"trainer", "keeper", "controller", "node"}, killed
    assert (desk.folder / "final.txt").read_text() == uninterrupted(total)
    (curve,) = read_story(open_store(str(desk.folder / "home"))).curves
    assert [point.step for point in curve.counted] == list(range(1, total + 1)), "one value for each step"


def kill(desk: Desk, job: Job, what: str) -> bool:
    """Kill one thing of a job; False if it was not there just now."""
    if what == "trainer":
        return end(desk.named(job, "training.py"))
    if what == "keeper":
        return end(desk.named(job, "holdfast.keeper"))
    if what == "controller":
        return end(desk.roles(job, "controller"))
    try:
        desk.kill_node(job, 0)
    except FileNotFoundError:
        return False  # between two attempts
    return True


def end(found: list[processes.Process]) -> bool:
    """Kill these; False if there were none."""
    processes.end(found)
    return bool(found)
