"""Preemption notices: a signal leads to a durable save of the agreed step and to exit status 75."""

from __future__ import annotations

import os
import signal

import pytest

from faults.playground import Playground
from holdfast.errors import PREEMPTED_STATUS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_the_step_and_ends_as_preempted(
    playground: Playground, uninterrupted: str, number: int
):
    child = playground.start("--pause-at", "3", "--every", "1000")
    playground.wait_for_steps(3)
    child.kill(number)
    playground.let_go(3)
    assert child.wait() == PREEMPTED_STATUS, child.said()
    steps = playground.num_steps()
    assert playground.complete() == [(1, steps)]
    assert f"step {steps} is durable" in child.said()
    playground.check_finishes_like(uninterrupted, said=f"restored step {steps} ")


def test_a_signal_to_the_whole_process_group_does_not_stop_the_keeper(
    playground: Playground, uninterrupted: str
):
    """As Ctrl-C in a terminal, and as schedulers that signal the group."""
    child = playground.start("--pause-at", "3", "--every", "1000")
    playground.wait_for_steps(3)
    os.killpg(child.pid, signal.SIGTERM)
    playground.let_go(3)
    assert child.wait() == PREEMPTED_STATUS, child.said()
    playground.check_finishes_like(uninterrupted)


def test_keepers_ignore_the_signals_that_stop_trainers(playground: Playground, uninterrupted: str):
    child = playground.start("--pause-at", "3")
    playground.wait_for_steps(3)
    playground.wait_for(playground.complete, "a checkpoint")  # its keeper has been configured
    (keeper,) = playground.keepers()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        keeper.send_signal(number)
    playground.let_go(3)
    assert child.wait() == 0, child.said()
    assert "died" not in child.said()
    assert playground.final() == uninterrupted


@pytest.mark.parametrize("point", ["trainer.staging", "trainer.staged"])
def test_a_notice_during_a_save_is_kept(playground: Playground, uninterrupted: str, point: str):
    """The signal arrives while a copy is under way; the run stops after it, with a durable save."""
    child = playground.start("--every", "2", "--step-s", "0.01", TRAINER_SIGNAL_AT=point)
    assert child.wait() == PREEMPTED_STATUS, child.said()
    newest = playground.complete()[0][1]
    assert newest == playground.num_steps()
    playground.check_finishes_like(uninterrupted, said=f"restored step {newest} ")


def test_a_second_ctrl_c_stops_at_once_and_loses_nothing_staged(playground: Playground, uninterrupted: str):
    child = playground.start("--pause-at", "2", "--every", "1")
    playground.wait_for_steps(2)
    child.kill(signal.SIGINT)
    playground.wait_for(lambda: "Ctrl-C again" in child.said(), "the first answer")
    child.kill(signal.SIGINT)
    assert child.wait() not in (0, PREEMPTED_STATUS)
    assert "KeyboardInterrupt" in child.said()
    playground.wait_for_keepers()
    assert playground.check_all_complete_verify() > 0
    playground.check_finishes_like(uninterrupted)


@pytest.mark.ranks
@pytest.mark.parametrize("signalled", [0, 1])
def test_one_ranks_notice_stops_all_ranks_at_one_step(playground: Playground, signalled: int):
    """Two gloo ranks; only one receives the signal."""
    children = playground.start_ranks(2, "--pause-at", "3", "--every", "1000")
    playground.wait_for_steps(3)
    children[signalled].kill(signal.SIGTERM)
    playground.let_go(3)
    for child in children:
        assert child.wait() == PREEMPTED_STATUS, child.said()
    steps = playground.num_steps()
    assert playground.complete() == [(1, steps)]
    assert playground.check_all_complete_verify() == 1
