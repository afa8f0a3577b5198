"""Real trainings that hang: their keepers record the stacks of all ranks, and name the odd one."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from hang.trials import Trial
from holdfast.cli import main as cli
from holdfast.errors import HUNG_STATUS
from holdfast.system.environment import PROGRESS, read_progress
from holdfast.watch.hang.incidents import describe_odd, group_ranks

PLACES = {
    "loop": "in training.py:{spin} (spin)",
    "sleep": "in training.py:{sleep} (odd_trouble)",
    "gil": "in training.py:{gil} (odd_trouble)",
    "stop": "stopped",
    "loader": "in DataLoader.__next__, called at training.py:{batch} (main); its worker is in training.py:",
}
"""Place of the rank that hangs, by the way it does."""


@pytest.mark.essential
def test_a_hang_is_recorded_with_the_stacks_of_the_training(trial: Trial) -> None:
    trial.start("sleep", limit="3s")
    (one,) = trial.hang().ranks
    assert (one.rank, one.step, one.phase, one.process.pid) == (0, 14, "", trial.ranks[0].pid)
    assert one.stalled_s > one.limit_s == 3.0
    assert "training.py" in describe_odd([one])
    assert any(frame.function == "odd_trouble" for thread in one.process.threads for frame in thread.frames)
    trial.wait_until(lambda: "THE TRAINING HANGS: rank 0 has made no progress" in trial.printed())
    assert f"holdfast stacks {trial.home} --recorded" in trial.printed()


@pytest.mark.parametrize("way", ["loop", pytest.param("gil", marks=pytest.mark.slow), "stop", "loader"])
def test_the_place_is_found_whatever_the_process_does(trial: Trial, way: str) -> None:
    trial.start(way, limit="3s")
    found = describe_odd(trial.hang().ranks)
    assert PLACES[way].split("{")[0] in found
    trial.wait_until(lambda: "THE TRAINING HANGS" in trial.printed())


@pytest.mark.parametrize(
    "way", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("sleep", "extra")), "skip"]
)
def test_the_odd_one_of_several_ranks_is_named(trial: Trial, way: str) -> None:
    trial.world_size = 2
    trial.start(way, odd=1, limit="3s")
    groups = group_ranks(trial.hang().ranks)
    odd = {"sleep": (1,), "skip": (1,), "extra": (0,)}[way]  # of two that wait, the one that is ahead
    assert [one.ranks for one in groups if one.is_odd] == [odd], groups
    trial.wait_until(lambda: f"> rank {odd[0]}: " in trial.printed())
    assert trial.printed().count("THE TRAINING HANGS") == 1


@pytest.mark.parametrize("way", ["phase", "evaluation", "none"])
def test_what_takes_long_is_no_hang(trial: Trial, way: str) -> None:
    """A phase, and a function that is named like an evaluation."""
    trial.start(way, limit="3s" if way != "none" else "1m")
    trial.finish()
    assert trial.lines("hang") == []
    assert trial.lines("ended")


def test_a_hang_that_ends_is_recorded(trial: Trial) -> None:
    trial.start("stop", limit="3s")
    trial.hang()
    trial.ranks[0].kill(signal.SIGCONT)
    trial.finish()
    (over,) = trial.lines("hang-over")
    assert over["seconds"] > 3.0


@pytest.mark.essential
@pytest.mark.parametrize(
    "way", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("loop", "gil")), "stop"]
)
def test_a_restart_ends_the_process_after_its_saves(trial: Trial, way: str) -> None:
    progress = trial.folder / "progress"
    trial.start(way, action="restart", limit="3s", env={PROGRESS: str(progress)})
    assert trial.ranks[0].wait() == HUNG_STATUS
    assert trial.lines("committed")[-1]["step"] == 10
    assert trial.lines("ended")[-1]["detail"].startswith("hung (rank 0 ")
    place = read_progress(progress).hang
    assert place is not None
    assert place.startswith("rank 0 ")


@pytest.mark.slow
def test_the_report_has_the_hang(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    trial.start("loop", limit="3s", action="restart")
    assert trial.ranks[0].wait() == HUNG_STATUS
    assert cli(["report", str(trial.home), "--json"]) == 0
    (hang,) = json.loads(capsys.readouterr().out)["hangs"]
    assert (hang["attempt"], hang["over_s"]) == (1, None)
    assert "(spin)" in hang["place"]
    pytest.importorskip("vl_convert")
    page = trial.folder / "report.html"
    assert cli(["report", str(trial.home), "-o", str(page)]) == 0
    section = page.read_text().partition('<section id="hangs">')[2].partition("</section>")[0]
    assert "1 hang" in section
    assert "&gt; rank 0: in training.py:" in section


@pytest.mark.parametrize("options", [{"action": "off", "limit": "3s"}, {"first": "1h"}], ids=["off", "first"])
def test_nothing_is_watched_without_a_limit_that_is_reached(trial: Trial, options: dict[str, Any]) -> None:
    """`off` has no pulse at all; the first steps have a limit of their own."""
    trial.start("sleep", **options)
    trial.wait_until(lambda: len(trial.lines("committed")) >= 2)
    os.kill(trial.ranks[0].pid, 0)
    assert trial.lines("hang") == []


def test_the_command_shows_where_ranks_are_now(
    trial: Trial, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(trial.folder / "host-0"))
    trial.start("sleep", limit="3s")
    trial.hang()
    assert cli(["stacks", str(trial.home)]) == 0
    assert "> rank 0: in training.py" in capsys.readouterr().out
    assert cli(["stacks", str(trial.home), "--full"]) == 0
    assert "thread 0x" in capsys.readouterr().out
    assert cli(["stacks", str(trial.home), "--recorded", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][0]["step"] == 14
    trial.kill()
    assert cli(["stacks", str(trial.home)]) == 2
    assert "No training on this machine saves to" in capsys.readouterr().err
