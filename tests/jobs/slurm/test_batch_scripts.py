"""Batch scripts of the how-to page on a real Slurm: signals are saved for, requeued, and failures shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.slurm.harness import LIMIT_S, SlurmHarness, command

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "handle-preemption.md"
TRAINING = Path(__file__).parent.parent / "training.py"
TOTAL = 60
PORT = 29431


def page_scripts() -> dict[str, str]:
    """Return the batch scripts of the page, by the launcher that they use."""
    found = [
        text for text in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL) if "#SBATCH" in text
    ]
    srun, python, torchrun = found
    return {"python": python, "srun": srun, "torchrun": torchrun}


def submit(folder: Path, kind: str, *, nodes: int = 1, training: str = "", options: str = "") -> str:
    """Submit a script of the page, with a training and a home in `folder`. Return Slurm's id of the job."""
    script = folder / "train.py"
    script.write_text(
        training
        or f"import runpy, sys\nsys.argv = ['x', {str(folder / 'home')!r}, '{TOTAL}', '--every', '1000', "
        f"'--step-s', '0.1']\nrunpy.run_path({str(TRAINING)!r}, run_name='__main__')\n"
    )
    text = page_scripts()[kind].replace("train.py", str(script)).replace("runs/gpt", str(folder / "home"))
    text = text.replace("--nproc-per-node 4", "--nproc-per-node 1").replace(
        "$head:29400", f"127.0.0.1:{PORT}"
    )
    text = re.sub(r"--signal=\S+", options, text) if options else text
    (folder / "job.sh").write_text(text)
    words = ["sbatch", "--parsable", f"--nodes={nodes}", f"--output={folder}/job.out", str(folder / "job.sh")]
    environment = {
        **os.environ,
        "HOLDFAST_PREEMPTION": "auto",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def shown(job: str) -> str:
    """Return what Slurm shows of a job."""
    return command("scontrol", "show", "job", job)


def wait_for(folder: Path, job: str, what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        output = folder / "job.out"
        told = output.read_text() if output.exists() else ""
        assert time.monotonic() < deadline, f"{shown(job)}\n{told}"
        time.sleep(0.1)


def has_ended(job: str) -> bool:
    return re.search(r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", shown(job)) is not None


def steps(folder: Path) -> list[int]:
    """Return the steps that were completed, in their order."""
    path = folder / "progress.log"
    return [int(line.split()[-1]) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    ("kind", "nodes", "words"),
    [
        ("python", 1, ["scancel", "--batch", "--signal=USR1"]),
        ("python", 1, ["scontrol", "requeue"]),
        ("srun", 1, ["scancel", "--signal=USR1"]),
        ("torchrun", 1, ["scancel", "--signal=TERM"]),
        ("torchrun", 2, ["scancel", "--signal=TERM"]),
    ],
)
def test_a_signal_costs_no_step_and_requeues(
    slurm: SlurmHarness, kind: str, nodes: int, words: list[str]
) -> None:
    folder = slurm.folder
    job = submit(folder, kind, nodes=nodes)
    wait_for(folder, job, lambda: len(steps(folder)) >= 7)
    command(*words, job)
    wait_for(folder, job, lambda: has_ended(job))
    told = f"{shown(job)}\n{(folder / 'job.out').read_text()}"
    assert "JobState=COMPLETED" in told, told
    assert "Restarts=1 " in told, told
    assert steps(folder) == list(range(1, TOTAL + 1)), told


def test_a_time_limit_alone_is_a_notice(slurm: SlurmHarness) -> None:
    """The script asks Slurm for no signal: the training reads its time limit itself."""
    folder = slurm.folder
    options = "--time=1"
    training = (
        "import os, time, torch, holdfast\nstate = {'x': torch.zeros(1)}\n"
        f"with holdfast.Checkpointer({str(folder / 'home')!r}, state, every=10**9) as ckpt:\n"
        "    for step in ckpt.steps(10**9):\n        time.sleep(0.05)\n"
        "        if 'SLURM_RESTART_COUNT' in os.environ:\n            print('resumed at', step)\n"
        "            break\n"
    )
    job = submit(folder, "srun", training=training, options=options)
    wait_for(folder, job, lambda: has_ended(job))
    told = f"{shown(job)}\n{(folder / 'job.out').read_text()}"
    assert "JobState=COMPLETED" in told, told
    assert "Restarts=1 " in told, told
    resumed = re.search(r"resumed at (\d+)", told)
    assert resumed is not None, told
    assert int(resumed[1]) > 0, told


@pytest.mark.parametrize("kind", ["python", "srun", "torchrun"])
def test_a_failed_training_is_a_failed_job(slurm: SlurmHarness, kind: str) -> None:
    """Jobs that wait for it with `afterok` do not start."""
    job = submit(slurm.folder, kind, training="raise SystemExit(1)")
    wait_for(slurm.folder, job, lambda: has_ended(job))
    assert "JobState=FAILED" in shown(job)
    assert "ExitCode=1:0" in shown(job)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("python", ["scancel", "--batch", "--signal=USR1"]),
        ("srun", ["scancel", "--signal=USR1"]),
        ("torchrun", ["scancel", "--signal=TERM"]),
    ],
)
def test_a_signal_during_the_imports_is_a_preemption(
    slurm: SlurmHarness, kind: str, words: list[str]
) -> None:
    began = slurm.folder / "began"
    job = submit(
        slurm.folder,
        kind,
        training=f"import os, pathlib, time\nif 'SLURM_RESTART_COUNT' not in os.environ:\n"
        f"    pathlib.Path({str(began)!r}).touch()\n    time.sleep({LIMIT_S})\n",
    )
    wait_for(slurm.folder, job, began.exists)
    command(*words, job)
    wait_for(slurm.folder, job, lambda: has_ended(job))
    assert "JobState=COMPLETED" in shown(job)
    assert "Restarts=1 " in shown(job)
