"""Homes that fill up, vanish, refuse writes or are shared: earlier checkpoints remain, with a message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from faults.playground import Playground
from holdfast.errors import PREEMPTED_STATUS
from small_disk import fill_up, small_disk


@pytest.fixture(name="small_disk")
def small_disk_fixture(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB, mounted."""
    with small_disk(tmp_path, "600k") as disk:
        yield disk


def test_a_full_disk_keeps_earlier_checkpoints_and_stops_the_run_only_after_its_limit(
    playground: Playground, small_disk: Path
):
    """Each checkpoint has 71 kB; keep=100 fills the disk."""
    playground.home = small_disk / "home"
    options = ("--keep", "100", "--every", "1", "--step-s", "0.05", "--patience", "3s")
    child = playground.start(*options, total=100_000)
    assert child.wait() == 1, child.said()
    playground.wait_for_keepers()
    said = child.said()
    assert "SaveWarning" in said
    assert "No space left" in said
    assert "RetryLater" in said
    assert playground.check_all_complete_verify() >= 4
    newest = playground.complete()[0][1]
    assert newest == holdfast.open(playground.home).step


def test_the_run_continues_once_the_disk_has_space_again(playground: Playground, small_disk: Path):
    """A disk that is full for a while costs saves, not the run."""
    playground.home = small_disk / "home"
    ballast = small_disk / "ballast"
    options = ("--keep", "2", "--every", "4", "--step-s", "0.05", "--patience", "1d")
    child = playground.start(*options, "--pause-at", "6", total=100_000)
    playground.wait_for(lambda: playground.home.exists() and playground.complete(), "a checkpoint")
    fill_up(ballast)  # with no older checkpoint whose deletion would make space
    playground.let_go(6)
    playground.wait_for(lambda: "No space left" in child.said() or not child.ended.empty(), "a warning")
    assert playground.complete() == [(1, 4)]
    ballast.unlink()
    playground.wait_for(lambda: playground.complete()[0][1] > 4 or not child.ended.empty(), "a checkpoint")
    child.kill(signal.SIGTERM)
    assert child.wait() == PREEMPTED_STATUS, child.said()
    assert playground.complete()[0][1] == playground.num_steps()
    assert playground.check_all_complete_verify() == 2


def test_a_home_that_vanishes_is_reported_and_not_created_again(playground: Playground):
    """An unmounted mount point must not be filled with checkpoints that the next mount hides."""
    child = playground.start("--every", "1", "--step-s", "0.05", "--patience", "3s", total=100_000)
    playground.wait_for(lambda: playground.home.exists() and len(playground.complete()) > 1, "checkpoints")
    away = playground.folder / "away"
    playground.home.rename(away)
    assert child.wait() == 1, child.said()
    assert "SaveWarning" in child.said()
    assert "vanished" in child.said()
    assert not playground.home.exists()
    away.rename(playground.home)
    assert playground.check_all_complete_verify() > 1
    assert "restored step" in playground.finish(total=30).said()


def test_a_read_only_home_is_refused_at_once(playground: Playground, small_disk: Path):
    """Before any training, with the reason."""
    playground.home = small_disk / "home"
    subprocess.check_call(["mount", "-o", "remount,ro", str(small_disk)])
    child = playground.start()
    assert child.wait() == 1
    assert "Read-only file system" in child.said()
    assert playground.num_steps() == 0


def test_a_home_that_becomes_read_only_keeps_what_it_has(playground: Playground, small_disk: Path):
    playground.home = small_disk / "home"
    options = ("--every", "1", "--step-s", "0.05", "--pause-at", "6", "--failed-saves", "raise")
    child = playground.start(*options, total=100_000)
    playground.wait_for(lambda: playground.home.exists() and len(playground.complete()) > 1, "checkpoints")
    remount = ["mount", "-o", "remount,ro", str(small_disk)]  # busy while a file is open for writing
    playground.wait_for(lambda: subprocess.call(remount) == 0, "a read-only home")
    playground.let_go(6)
    assert child.wait() == 1, child.said()
    assert "Read-only file system" in child.said()
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 1


@pytest.mark.essential
def test_a_second_run_on_a_home_whose_writer_lives_is_refused(playground: Playground):
    """It names the process; the first one is not disturbed, and a kill -9 makes room at once."""
    first = playground.start("--every", "2", "--step-s", "0.05", total=100_000)
    playground.wait_for(lambda: playground.home.exists() and playground.complete(), "a checkpoint")
    second = playground.start("--every", "2", total=30)
    assert second.wait() == 1, second.said()
    assert f"is being written by attempt 1: process {first.pid} on host" in second.said()
    assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", second.said())
    assert "take_over=True" in second.said()
    before = playground.complete()[0]
    playground.wait_for(lambda: playground.complete()[0] > before, "more checkpoints of the first")
    assert {attempt for attempt, _ in playground.complete()} == {1}
    first.kill(signal.SIGKILL)
    assert "restored step" in playground.finish("--every", "50", total=playground.num_steps() + 20).said()
    assert playground.complete()[0][0] == 2


def test_a_run_that_takes_over_a_home_fences_the_other(playground: Playground):
    """The next save of the older one raises that it is fenced; each checkpoint is of one attempt."""
    first = playground.start("--every", "2", "--step-s", "0.05", total=100_000)
    playground.wait_for(lambda: playground.home.exists() and playground.complete(), "a checkpoint")
    second = playground.start(
        "--take-over", "--every", "50", total=2000
    )  # far beyond what the first can reach meanwhile
    assert first.wait() == 1, first.said()
    assert "has taken over this home" in first.said()
    assert second.wait() == 0, second.said()
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() == 3
    assert {attempt for attempt, _ in playground.complete()} == {2}


def test_two_runs_started_in_the_same_moment_take_different_attempts(playground: Playground):
    options = "--take-over", "--every", "2", "--step-s", "0.02"
    children = [playground.start(*options, total=20) for _ in range(2)]
    statuses = sorted(child.wait() for child in children)
    assert statuses[0] == 0, [child.said() for child in children]
    attempts = sorted(path.name for path in (playground.home / "attempts").glob("a*[0-9].json"))
    assert attempts == ["a0001.json", "a0002.json"]
    playground.wait_for_keepers()
    # One that starts when the other has finished has nothing left to do.
    is_done_before = any("restored step 20" in child.said() for child in children)
    assert playground.complete()[0] == (1 if is_done_before else 2, 20)
    assert playground.check_all_complete_verify() > 0


def test_a_stopped_trainer_that_comes_back_cannot_commit(playground: Playground):
    """SIGSTOP, a new attempt, SIGCONT: the old one is fenced although it never ran in between."""
    first = playground.start("--every", "2", "--step-s", "0.02", total=100_000)
    playground.wait_for(lambda: playground.home.exists() and playground.complete(), "a checkpoint")
    first.kill(signal.SIGSTOP)
    second = playground.finish("--take-over", "--every", "2", total=30)
    assert "restored step" in second.said()
    before = playground.complete()
    first.kill(signal.SIGCONT)
    assert first.wait() == 1
    assert "fenced" in first.said()
    playground.wait_for_keepers()
    assert playground.complete() == before
    assert playground.check_all_complete_verify() > 0


def test_a_clock_set_back_does_not_change_what_is_newest(playground: Playground, uninterrupted: str):
    """The second attempt and its keeper live a year earlier; a third still restores what they saved last."""
    playground.run_until_killed("trainer.handed:3")
    created = holdfast.open(playground.home).created
    year_s = 365 * 24 * 3600
    clock = Path(__file__).parent / "clock"
    path = os.pathsep.join([str(clock), *filter(None, [os.environ.get("PYTHONPATH")])])
    playground.run_until_killed("trainer.handed:3", CLOCK_OFFSET_S=str(-year_s), PYTHONPATH=path)
    attempt, step = playground.complete()[0]
    assert (attempt, step) == (2, 12)
    assert holdfast.open(playground.home).created < created - year_s / 2, "the clock was not set back"
    playground.check_finishes_like(uninterrupted, said="restored step 12 ")


def test_nothing_of_a_run_is_left_in_the_runtime_folder(playground: Playground):
    playground.finish()
    playground.wait_for_keepers()
    assert [path for path in playground.runtime.rglob("*") if path.is_file()] == []


def test_the_example_of_a_plain_process_works_without_a_main_guard(tmp_path: Path):
    """A script that is only statements, as people write them; the keeper must not import it."""
    script = tmp_path / "plain.py"
    script.write_text(
        "import torch, holdfast\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "state = {'model': model, 'optimizer': optimizer}\n"
        f"ckpt = holdfast.Checkpointer({str(tmp_path / 'home')!r}, state, every=2)\n"
        "for step in ckpt.steps(5):\n"
        "    model(torch.ones(1, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "ckpt.close()\n"
        "print('ran once')\n"
    )
    (tmp_path / "json.py").write_text("raise RuntimeError('the keeper imported from the user\\'s folder')\n")
    env = {**os.environ, "PYTHONSAFEPATH": "1", "HOLDFAST_RUNTIME_DIR": str(tmp_path / "runtime")}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ran once\n"
    assert holdfast.open(tmp_path / "home").step == 5
