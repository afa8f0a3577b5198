"""Trainings under torchrun: its restarts, the loss of a node of an elastic group, and its own end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import holdfast
from nursery import END_TIMEOUT_S, Child, Nursery, shared
from servers import reserve_port

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

TRAINER = Path(__file__).parent / "torchrun_trainer.py"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "change-ranks.md"
TOTAL = 40


class Torchrun:
    """Trainings that torchrun starts, with one home."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.home = folder, folder / "home"
        self._nursery, self._number = nursery, 0

    def start(self, *options: str, total: int = TOTAL, loader: str = "") -> Child:
        self._number += 1
        words = [*("-m", "torch.distributed.run"), *options, str(TRAINER), str(self.home), str(total)]
        words += loader.split()
        output = self.folder / f"torchrun-{self._number}.txt"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_RUNTIME_DIR": str(self.folder / "runtime"),
            # Otherwise restarted workers find the addresses of the killed ones: pytorch/pytorch#135712.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        return self._nursery.start(words, output, env=env)

    def steps(self) -> list[tuple[int, int]]:
        """(world size, step) of every completed step, in order."""
        log = self.folder / "progress.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(line.split()[0]), int(line.split()[1])) for line in lines if line.count(" ") == 1]

    def wait_for(self, condition: Callable[[], object], child: Child) -> None:
        deadline = time.monotonic() + END_TIMEOUT_S
        while not condition():
            assert child.ended.empty(), child.said()
            assert time.monotonic() < deadline, child.said()
            time.sleep(0.01)

    def final(self) -> str:
        return (self.folder / "final.txt").read_text()


@pytest.fixture
def torchrun(tmp_path: Path) -> Torchrun:
    return Torchrun(tmp_path, shared())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the weights after an uninterrupted training on two ranks."""
    one = Torchrun(tmp_path_factory.mktemp("uninterrupted"), shared())
    assert one.start("--standalone", "--nproc-per-node", "2").wait() == 0
    return one.final()


def test_a_killed_worker_costs_only_the_steps_since_the_last_save(
    torchrun: Torchrun, uninterrupted: str
) -> None:
    child = torchrun.start("--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    for wanted in (10, 24):
        torchrun.wait_for(lambda wanted=wanted: (2, wanted) in torchrun.steps(), child)
        os.kill(int((torchrun.folder / "rank-1.pid").read_text()), signal.SIGKILL)
    assert child.wait() == 0, child.said()
    assert torchrun.final() == uninterrupted
    repeated = [step for _, step in torchrun.steps()]
    assert len(repeated) - len(set(repeated)) <= 2 * 8, "two saves are at most 8 steps apart"
    assert holdfast.open(torchrun.home).attempt == 3


def test_a_group_that_loses_a_node_continues_with_the_other(torchrun: Torchrun, uninterrupted: str) -> None:
    """Both agents and their workers are on this machine; the whole tree of one is killed."""
    place = f"127.0.0.1:{reserve_port()}"
    options = "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"
    names = "--rdzv-endpoint", place, "--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=5"
    first = torchrun.start(*options, *names, "--rdzv-conf", "is_host=true,last_call_timeout=5")
    second = torchrun.start(*options, *names, "--rdzv-conf", "is_host=false,last_call_timeout=5")
    torchrun.wait_for(lambda: (2, 10) in torchrun.steps(), first)
    kill_tree(second)
    assert first.wait() == 0, first.said()
    assert {world for world, step in torchrun.steps() if step > 30} == {1}
    assert torchrun.final() == uninterrupted, "the gradient is that of the same batch"


@pytest.mark.parametrize("loader", ["", "before fork", "before spawn", "before forkserver", "after fork"])
def test_a_notice_to_torchrun_leaves_a_durable_save(
    torchrun: Torchrun, uninterrupted: str, loader: str
) -> None:
    """Torchrun passes SIGTERM on to the group of each rank and exits with 1; the next start repeats no step.

    Data loader workers, started before or after the Checkpointer is made, are in these groups.
    """
    child = torchrun.start("--standalone", "--nproc-per-node", "2", total=100_000, loader=loader)
    torchrun.wait_for(lambda: (2, 10) in torchrun.steps(), child)
    child.kill(signal.SIGTERM)
    assert child.wait() != 0
    step = holdfast.open(torchrun.home).step
    assert step == torchrun.steps()[-1][1]
    assert torchrun.start("--standalone", "--nproc-per-node", "2", total=max(TOTAL, step + 1)).wait() == 0
    steps = [one for _, one in torchrun.steps()]
    assert steps == sorted(set(steps))
    if step < TOTAL:
        assert torchrun.final() == uninterrupted


def kill_tree(child: Child) -> None:
    tree = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    for process in tree:
        process.kill()


def test_the_loop_of_the_page_repeats_preempted_starts_only(tmp_path: Path) -> None:
    """A start that fails before its Checkpointer exists is not taken for the preemption before it."""
    found = re.search(r"```sh\n(preemptions.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(
        "import os, signal\nfrom pathlib import Path\nprint('START', flush=True)\n"
        "assert not Path('runs').exists()\nimport holdfast\n"
        "with holdfast.Checkpointer('runs/gpt', {'x': 0}) as ckpt:\n"
        "    for step in ckpt.steps(3):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    loop = found[1].replace("--nproc-per-node 4", "--nproc-per-node 1")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", loop], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=END_TIMEOUT_S
    )
    assert done.stdout.count("START") == 2, done.stdout + done.stderr
