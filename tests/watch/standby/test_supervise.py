"""Supervised ranks: one that dies is started again, while the others roll back in their processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.system.entry import command
from stage.training import wait_until

SCRIPT = Path(__file__).with_name("supervised_training.py")
LIMIT_S = 240
STEPS = 12


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")


class Launch:
    """Start of all ranks, as a launcher without a store of its own makes it."""

    def __init__(self, home: Path, world_size: int, **variables: str) -> None:
        self.home, self.ranks = home, list[subprocess.Popen[str]]()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
        for rank in range(world_size):
            self.start(**launcher, **variables, RANK=str(rank))

    def start(self, *options: str, **variables: str) -> None:
        settings = {"OMP_NUM_THREADS": "1", "HOLDFAST_KEEP_IN_MEMORY": "2m"}
        words = [sys.executable, *options, str(SCRIPT), str(self.home)]
        self.ranks.append(
            subprocess.Popen(
                words,
                env={**os.environ, **settings, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def wait(self) -> tuple[list[int], str]:
        """Return the exit statuses of the ranks, and their output."""
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in self.ranks]
        return [rank.returncode for rank in self.ranks], "".join(outputs)

    def notes(self) -> list[dict[str, Any]]:
        path = self.home.with_suffix(".jsonl")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self, rank: int) -> list[int]:
        """Return the processes in which the function of a rank has begun, one for each call."""
        return [note["pid"] for note in self.notes() if note["rank"] == rank and "began" in note]

    def steps(self, rank: int) -> list[int]:
        return [note["step"] for note in self.notes() if note["rank"] == rank and "step" in note]

    def weights(self) -> torch.Tensor:
        return torch.load(self.home.with_suffix(".pt"))["weight"]


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    found: list[Launch] = []
    yield found
    for launch in found:
        for rank in launch.ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Weights of the training of two ranks that nothing has disturbed."""
    launch = Launch(tmp_path_factory.mktemp("undisturbed") / "run", 2)
    assert launch.wait()[0] == [0, 0]
    return launch.weights()


@pytest.mark.parametrize("lost", [0, 1])
def test_only_the_rank_that_is_killed_gets_a_new_process(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor, lost: int
) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL=f"{lost}:7:kill")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert f"rank {lost} was killed by signal 9. Rank {lost} is started again: restart 1 of 2" in output
    again, stayed = launch.pids(lost), launch.pids(1 - lost)
    assert len(again) == len(stayed) == 2
    assert again[0] != again[1]
    assert stayed[0] == stayed[1]
    assert "from memory" in output
    restored = launch.steps(lost)[7]
    assert restored in (4, 6)  # the newest save, or the one before if that was not complete
    assert launch.steps(0)[-1] == STEPS - 1
    assert torch.equal(launch.weights(), undisturbed)
    assert [note["found"] for note in launch.notes() if "found" in note] == ["returned", "returned"]


def test_random_numbers_begin_anew_in_each_call(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="1:5:kill")
    launches.append(launch)
    assert launch.wait()[0] == [0, 0]
    assert len({note["drawn"] for note in launch.notes() if "began" in note}) == 1


def test_a_rank_that_raises_is_started_again(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor
) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="1:7:error")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert "ValueError: error of rank 1" in output
    assert "rank 1 ended with status 1. Rank 1 is started again" in output
    assert len(set(launch.pids(0))) == 1
    assert torch.equal(launch.weights(), undisturbed)


def test_failures_of_different_ranks_one_after_the_other(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor
) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="0:5:kill 1:9:kill")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert len(launch.pids(0)) == len(launch.pids(1)) == 3
    assert torch.equal(launch.weights(), undisturbed)


def test_all_ranks_get_new_processes_on_request(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor
) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="1:7:kill", RESTART="all")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert len(set(launch.pids(0))) == len(set(launch.pids(1))) == 2
    assert torch.equal(launch.weights(), undisturbed)


def test_a_rank_that_was_complete_is_started_again_for_one_that_dies(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor
) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL=f"0:{STEPS}:kill", LATE="1")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert len(launch.pids(1)) == 2
    assert torch.equal(launch.weights(), undisturbed)


def test_after_the_last_restart_the_launcher_gets_the_failure(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="1:7:always")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [1, 1], output
    assert len(launch.pids(1)) == 3
    assert "not started again: max_restarts=2 is used up" in output


def test_an_error_before_the_first_step_is_not_tried_again(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 1, FAIL="0:-1:always")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [1]
    assert output.count("ValueError: always") == 1


def test_a_single_rank_is_started_again(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 1, FAIL="0:7:kill")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0], output
    assert len(set(launch.pids(0))) == 2
    assert "from memory" in output


def test_a_process_with_threads_is_not_forked(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 1, FAIL="0:7:kill", THREAD="1")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [-signal.SIGKILL]
    assert "does not start it again: this process has threads already" in output


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_the_end_of_a_supervisor_is_that_of_its_training(
    tmp_path: Path, launches: list[Launch], name: str
) -> None:
    launch = Launch(tmp_path / "run", 1, FAIL="0:7:hang", ALONE="1")
    launches.append(launch)
    wait_until(lambda: 6 in launch.steps(0))
    pid = launch.pids(0)[0]
    launch.ranks[0].send_signal(signal.Signals[name])
    statuses, output = launch.wait()
    assert statuses == [-signal.Signals[name]], output
    assert "is started again" not in output
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_preempted_training_is_not_started_again(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="0:7:hang")
    launches.append(launch)
    wait_until(lambda: 6 in launch.steps(1))
    for rank in launch.ranks:
        rank.send_signal(signal.SIGTERM)
    os.kill(launch.pids(0)[0], signal.SIGKILL)  # it hangs within a step: the notice comes to rank 1 alone
    statuses, output = launch.wait()
    assert 0 not in statuses
    assert "is started again" not in output


def test_a_rank_that_does_not_leave_its_step_gets_a_new_process(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor
) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="0:7:hang 1:7:kill")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert "has not left its step after 60 s" in output
    assert len(set(launch.pids(0))) == 2
    assert torch.equal(launch.weights(), undisturbed)


@pytest.mark.fsdp2_on_cpu
def test_ranks_of_fsdp_roll_back_in_place(tmp_path: Path, launches: list[Launch]) -> None:
    launch = Launch(tmp_path / "run", 2, FAIL="1:7:kill", FSDP="1")
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0, 0], output
    assert len(set(launch.pids(0))) == 1
    steps = [(note["step"], note["loss"]) for note in launch.notes() if note["rank"] == 0 and "step" in note]
    assert len(steps) > STEPS  # some came again
    assert len(set(steps)) == STEPS  # with the same loss


def test_torchrun_starts_all_ranks_after_the_last_restart(
    tmp_path: Path, launches: list[Launch], undisturbed: torch.Tensor
) -> None:
    launch = Launch(tmp_path / "run", 0)
    failures = " ".join(f"1:{step}:kill" for step in (3, 5, 7))
    launch.start(*TORCHRUN, FAIL=failures)
    launches.append(launch)
    statuses, output = launch.wait()
    assert statuses == [0], output
    assert [len(set(launch.pids(rank))) for rank in (0, 1)] == [2, 4]
    assert "max_restarts=2 is used up" in output
    assert torch.equal(launch.weights(), undisturbed)


def test_check_kills_and_starts_a_supervised_training_itself(tmp_path: Path) -> None:
    words = [*command("holdfast.cli"), "check", str(SCRIPT), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_arguments_are_checked() -> None:
    with pytest.raises(holdfast.InvalidInput, match="expected restart='rank' or 'all'"):
        holdfast.supervise(print, restart="some")  # type: ignore[arg-type]
    with pytest.raises(holdfast.InvalidInput, match="max_restarts from 0"):
        holdfast.supervise(print, max_restarts=-1)


def test_a_launcher_without_an_address_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(holdfast.InvalidInput, match="MASTER_ADDR is not set"):
        holdfast.supervise(print)
