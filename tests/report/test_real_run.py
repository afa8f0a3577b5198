"""The summary of a real run with kills and resumes, compared with the test's own observations."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from faults.playground import ENDLESS, Playground
from holdfast.checkpoint.store import open_store
from holdfast.watch.report.summary import read_summary
from nursery import Child, shared


@pytest.fixture
def playground(tmp_path: Path) -> Playground:
    return Playground(tmp_path, shared())


def test_the_summary_of_a_killed_run_matches_the_observations(playground: Playground) -> None:
    child = playground.start("--every", "4", "--step-s", "0.02", *ENDLESS)
    playground.wait_for_steps(14, child)
    child.kill()
    child.wait()
    killed_at = time.time()
    done_then = playground.num_steps()
    playground.wait_for_keepers()
    restarted_at = time.time()
    playground.finish("--every", "4", "--step-s", "0.02")
    finished_at = time.time()
    playground.wait_for_keepers()

    summary = read_summary(open_store(str(playground.home)))
    (one,) = summary.interruptions
    truly_lost = done_then - one.restored_step
    assert (one.kind, one.before, one.after) == ("stopped", 1, 2)
    assert one.restored_step % 4 == 0
    assert one.steps_lost == one.max_steps_lost
    assert one.steps_lost - truly_lost in (0, 1)  # it may be killed between a step's end and its record
    assert one.last_seen_unix_s <= killed_at
    assert restarted_at <= one.resumed_unix_s <= finished_at
    assert one.cost_s >= restarted_at - killed_at
    assert summary.finished is not None
    assert summary.finished.step == 24
    assert [save.step for save in summary.saves if save.attempt == 2 and save.durable][-1] == 24
    times = summary.times
    assert times.kept_s + times.blocked_s + times.lost_s == pytest.approx(times.total_s)
    assert times.total_s <= finished_at - summary.attempts[0].started_unix_s
    assert summary.overhead_share is not None
    assert summary.overhead_share > 0
    assert summary.advice.num_failures == 1
    assert summary.home_contents is not None
    assert summary.home_contents.num_checkpoints == 3


@pytest.mark.slow
@pytest.mark.parametrize("has_local", [False, True])
def test_the_curve_of_a_killed_run_equals_that_of_an_uninterrupted_one(
    tmp_path: Path, playground: Playground, has_local: bool
) -> None:
    """Trainer, keeper and both are killed, and a notice comes; each step has one value, the true one.

    With a local folder most checkpoints never come home, and what is made_up of their steps must.
    """
    quiet = Playground(tmp_path / "quiet", playground.nursery)
    quiet.folder.mkdir()
    quiet.finish("--every", "4")
    quiet.wait_for_keepers()
    options = ["--every", "4", "--step-s", "0.02"]
    if has_local:
        options += ["--local", str(playground.local), "--home-every", "1000"]

    def kill_keepers_too(child: Child) -> None:
        playground.kill_keepers()
        child.kill()

    def start_and_train() -> Child:
        before = playground.num_steps()
        child = playground.start(*options)
        playground.wait_for_steps(before + 5, child)
        return child

    ways = [lambda child: child.kill(), kill_keepers_too, lambda child: child.kill(signal.SIGTERM)]
    for kill in ways:
        child = start_and_train()
        kill(child)
        child.wait()
    last = start_and_train()
    playground.kill_keepers()
    assert last.wait() == 0, last.said()
    playground.wait_for_keepers()
    summary, truth = (read_summary(open_store(str(one.home))) for one in (playground, quiet))
    assert len(summary.attempts) == len(ways) + 1
    for curve, true in zip(summary.curves, truth.curves, strict=True):
        assert [point.step for point in curve.counted] == list(range(1, 25))
        assert [point.value for point in curve.counted] == [point.value for point in true.counted]
        assert not true.lost
