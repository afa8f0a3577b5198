"""Slurm's programs, as a job calls them while Slurm ends it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.cli import main
from holdfast.errors import RetryLater
from holdfast.jobs.folder import job_folder
from holdfast.jobs.slurm import commands
from holdfast.jobs.slurm.engine import SlurmEngine
from holdfast.jobs.task.parser import Overrides, parse_tasks
from jobs.harness import write_program


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of a `scancel` that SIGTERM ends as often as the file `signals` has lines."""
    program, log, signals = tmp_path / "scancel", tmp_path / "calls", tmp_path / "signals"
    ends = f'if [ "$(wc -l < {log})" -le "$(wc -l < {signals})" ]; then kill -TERM $$; fi'
    write_program(program, f'echo "$*" >> {log}\n{ends}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize("num_signals", [0, 1, 2])
def test_steps_are_killed_although_slurm_ends_the_program_that_asks_for_it(
    calls: Path, num_signals: int
) -> None:
    """Slurm sends SIGTERM to all programs of a job that it requeues."""
    calls.with_name("signals").write_text("TERM\n" * num_signals)
    commands.kill_steps("7")
    assert calls.read_text() == "--signal=KILL 7\n" * (num_signals + 1)


def test_a_program_that_signals_always_end_is_an_error(calls: Path) -> None:
    calls.with_name("signals").write_text("TERM\n" * 9)
    with pytest.raises(RetryLater, match="exited with -15"):
        commands.kill_steps("7")
    assert len(calls.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("refusal", "fix"),
    [
        ("sbatch: error: Invalid generic resource (gres) specification", "sinfo -o %G"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "less"),
        ("sbatch: error: invalid partition specified: fast", "sinfo -s"),
        ("sbatch: error: Socket timed out", "timed out$"),
    ],
)
def test_a_refused_submission_has_a_fix(calls: Path, refusal: str, fix: str) -> None:
    """The texts are those of Slurm 22.05."""
    write_program(calls.with_name("sbatch"), f"echo '{refusal}' >&2\nexit 1")
    with pytest.raises(RetryLater, match=fix) as caught:
        commands.submit(calls)
    assert refusal in str(caught.value)


def test_the_queue_shows_once_that_slurm_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in each row, of which there may be hundreds."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for name, text in {"sbatch": "echo 101", "squeue": f"echo '{away}' >&2\nexit 1"}.items():
        write_program(tmp_path / name, text)
    file = parse_tasks("name: gpt\nrun: sleep 1", "task.yaml", Overrides())
    for _ in range(3):
        SlurmEngine().submit_file(file)
    assert main(["queue"]) == 0
    shown = capsys.readouterr()
    rows = shown.out.splitlines()[1:]
    assert [row.rstrip().endswith("Slurm does not answer") for row in rows] == [True] * 3
    assert shown.err.startswith("holdfast: Slurm does not answer: `squeue")
    assert shown.err.count(away) == 1
    job_folder(tmp_path / "state", 2).path.joinpath("story.json").write_text("torn")
    assert main(["queue"]) == 0
    assert "not a valid state" in " ".join(capsys.readouterr().out.split()), "of one job, beside the others"
    assert main(["describe", "3"]) == 0
    assert away in " ".join(capsys.readouterr().out.split())
