"""A job through SkyPilot itself, with a Slurm on this machine as its cloud; see `onebox`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.output import OutputSelection
from holdfast.jobs.sky.engine import SkyEngine
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.parser import parse_tasks
from jobs.sky.onebox import SkyBox, missing, sky_box
from jobs.slurm.harness import command

ROOT = Path(__file__).parents[3]
TRAINING = Path(__file__).parent.parent / "training.py"
TOTAL = 150
LIMIT_S = 540.0
pytestmark = pytest.mark.alone

TASK = """
name: train
resources: {{infra: slurm, cpus: 1, memory: 1}}
envs: {{PYTHONPATH: {source}, HOLDFAST_PREEMPTION: none}}
run: |
  echo "$SKYPILOT_TASK_ID $SLURM_JOB_ID" >> {folder}/starts
  HOLDFAST_ATTEMPT=$SLURM_JOB_ID {python} {training} {folder}/home {total} --every 5 --step-s 0.2
"""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SkyBox]:
    if why := missing():
        pytest.skip(why)
    with sky_box() as found:
        monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


def lines(path: Path) -> list[list[str]]:
    """Return the words of each line of a file, or nothing if it does not exist."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(engine: SkyEngine, job: Job, what: Callable[[], object], name: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        if time.monotonic() > deadline:
            said = "\n".join(line.text for line in engine.lines(job.id, OutputSelection()))
            queue = subprocess.run(["squeue", "--states=all"], capture_output=True, text=True, check=False)
            raise AssertionError(f"waited in vain for {name}: {engine.job(job.id)}\n{said}\n{queue.stdout}")
        time.sleep(1)


def test_training_resumes_from_its_checkpoint_after_its_allocation_is_killed(box: SkyBox, tmp_path: Path):
    places = {"source": ROOT / "src", "folder": tmp_path, "python": sys.executable, "training": TRAINING}
    text = TASK.format(**places, total=TOTAL)
    engine = SkyEngine()
    (job,) = engine.submit_file(parse_tasks(text, str(tmp_path / "task.yaml")))
    steps = tmp_path / "progress.log"
    wait_for(engine, job, lambda: len(lines(steps)) >= 30, "30 steps")
    ((task_id, first),) = lines(tmp_path / "starts")
    assert task_id == job.task_id
    command("scancel", first)
    wait_for(engine, job, lambda: len(lines(tmp_path / "starts")) == 2, "the second start")
    wait_for(engine, job, lambda: engine.job(job.id).status.is_final, "the end")
    ended = engine.job(job.id)
    # How often it recovered is not asked: it does not count those that it calls emergencies.
    assert (ended.status, ended.task_id) == (JobStatus.SUCCEEDED, job.task_id)
    (_, first), (again, second) = lines(tmp_path / "starts")
    assert again == job.task_id, "the same after the recovery"
    assert first != second
    done = {start: [int(step) for one, step in lines(steps) if one == start] for start in (first, second)}
    assert done[second][-1] == TOTAL
    reached = max(done[first])
    assert reached - 10 < done[second][0] <= reached + 1, "what was durable is not done again"
