"""Batch scripts of the how-to page on a real Slurm: signals are saved for, requeued, and failures shown."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import open as open_run
from jobs.harness import LIMIT_S, write_program
from jobs.slurm.harness import SlurmHarness, command
from servers import reserve_port

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / "how-to" / "handle-preemption.md", DOCS / "engines.md"]
TRAIN = """
import os, sys, time
from pathlib import Path
import torch, holdfast

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400_000  # more than a minute of steps, when the notice of a limit of two minutes comes
    def __getitem__(self, index):
        return torch.ones(4) * index

def main(folder, total):
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
    rank, progress = int(os.environ.get("RANK", "0")), folder / "progress.log"
    if "SLURM_RESTART_COUNT" in os.environ:  # some more steps show where it continues
        total = len(progress.read_text().splitlines()) + 20
    state = {"model": torch.nn.Linear(4, 2)}
    with holdfast.Checkpointer(folder / "home", state, every=10**9) as ckpt:
        batches = iter(torch.utils.data.DataLoader(Data(), 4, num_workers=1))
        for step in ckpt.steps(total):
            state["model"](next(batches))
            time.sleep(0.1)
            state["model"](next(batches))
            if rank == 0:
                with progress.open("a") as log:
                    print(step + 1, file=log)
    holdfast.hard_exit()

if __name__ == "__main__":
    main(Path({folder!r}), 10**6)
"""


def page_scripts() -> dict[str, str]:
    """Return the batch scripts of the pages, by the launcher that they use."""
    texts = re.findall(r"```sh\n(.*?)```", "".join(page.read_text() for page in PAGES), re.DOTALL)
    srun, python, torchrun = (text for text in texts if "#SBATCH" in text)
    return {"python": python, "srun": srun, "torchrun": torchrun}


def submit(
    folder: Path,
    kind: str,
    *,
    nodes: int = 1,
    tasks: int = 1,
    training: str = TRAIN,
    signal: str | None = None,
    time_limit: str = "10",
    sources: str = "auto",
) -> str:
    """Submit a script of the page, and return Slurm's id of the job.

    Args:
        folder: that of the training and its home.
        kind: launcher that the script uses.
        nodes: number of nodes.
        tasks: number of tasks on each.
        training: the training. By default its loader has a worker.
        signal: replaces the seconds of the page's `--signal`; empty: without that option; None: as it is.
        time_limit: time limit of the job, in minutes.
        sources: sources of notices other than signals.
    """
    script = folder / "train.py"
    script.write_text(training.replace("{folder!r}", repr(str(folder))))
    text = page_scripts()[kind].replace("train.py", str(script)).replace("runs/gpt", str(folder / "home"))
    text = text.replace("--nproc-per-node 4", "--nproc-per-node 1")
    text = text.replace("$head:29400", f"127.0.0.1:{reserve_port()}")
    if signal is not None:
        text = re.sub(r"--signal=(\S+)@\d+", rf"--signal=\1@{signal}" if signal else "", text)
    (folder / "job.sh").write_text(text)
    words = ["sbatch", "--parsable", f"--nodes={nodes}", f"--time={time_limit}"]
    words += [f"--ntasks-per-node={tasks}", f"--output={folder}/job.out", str(folder / "job.sh")]
    environment = {
        **os.environ,
        "HOLDFAST_PREEMPTION": sources,
        "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
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


def check_requeued(folder: Path, job: str) -> None:
    """Wait for the end of a job, and check that it was requeued once and did each step once."""
    wait_for(folder, job, lambda: has_ended(job))
    told = f"{shown(job)}\n{(folder / 'job.out').read_text()}"
    assert "JobState=COMPLETED" in told, told
    assert "Restarts=1 " in told, told
    assert steps(folder) == list(range(1, len(steps(folder)) + 1)), told


def lift_limit(folder: Path, job: str) -> None:
    """Give a job more time once its limit has made its training save: its end may take long here."""
    history = folder / "home" / "history"
    wait_for(
        folder, job, lambda: has_ended(job) or any('"saved"' in one.read_text() for one in history.glob("*"))
    )
    command("scontrol", "update", f"JobId={job}", "TimeLimit=60")


every_script = pytest.mark.parametrize(
    ("kind", "nodes"), [("python", 1), ("srun", 1), ("torchrun", 1), ("torchrun", 2)]
)


@every_script
def test_a_requeued_job_loses_no_step(slurm: SlurmHarness, kind: str, nodes: int) -> None:
    job = submit(slurm.folder, kind, nodes=nodes)
    wait_for(slurm.folder, job, lambda: len(steps(slurm.folder)) >= 7)
    command("scontrol", "requeue", job)
    check_requeued(slurm.folder, job)


@every_script
def test_the_signal_of_the_script_requeues_it_without_a_lost_step(
    slurm: SlurmHarness, kind: str, nodes: int
) -> None:
    """Slurm sends it at most 30 s before the time that the script names."""
    job = submit(slurm.folder, kind, nodes=nodes, signal="20", sources="none")
    wait_for(slurm.folder, job, lambda: len(steps(slurm.folder)) >= 7)
    end = datetime.datetime.now() + datetime.timedelta(seconds=55)
    command("scontrol", "update", f"JobId={job}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
    lift_limit(slurm.folder, job)
    check_requeued(slurm.folder, job)


@every_script
def test_a_time_limit_alone_requeues_without_a_lost_step(slurm: SlurmHarness, kind: str, nodes: int) -> None:
    """The script asks Slurm for no signal: the training reads its time limit itself."""
    job = submit(slurm.folder, kind, nodes=nodes, signal="", time_limit="2")
    lift_limit(slurm.folder, job)
    check_requeued(slurm.folder, job)


def test_one_task_of_a_host_asks_slurm_for_the_time_limit(slurm: SlurmHarness) -> None:
    """The others receive its notice."""
    folder = slurm.folder
    calls = f'echo "$SLURM_STEP_ID:$SLURM_PROCID" >> {folder}/calls'
    write_program(folder / "bin" / "squeue", f'{calls}\nexec {shutil.which("squeue")} "$@"')
    head = "import os\nos.environ.update(RANK=os.environ['SLURM_PROCID'], WORLD_SIZE='2')\n"
    head += f"os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='{reserve_port()}')\n"
    job = submit(folder, "srun", tasks=2, training=head + TRAIN, signal="", time_limit="2")
    lift_limit(folder, job)
    check_requeued(folder, job)
    callers = set((folder / "calls").read_text().split())
    assert {one for one in callers if one.startswith("0:")} == {"0:0"}, callers


@every_script
def test_a_cancelled_job_keeps_its_last_step_and_does_not_return(
    slurm: SlurmHarness, kind: str, nodes: int
) -> None:
    job = submit(slurm.folder, kind, nodes=nodes)
    wait_for(slurm.folder, job, lambda: len(steps(slurm.folder)) >= 7)
    command("scancel", job)
    wait_for(slurm.folder, job, lambda: has_ended(job) or "JobState=PENDING" in shown(job))
    told = f"{shown(job)}\n{(slurm.folder / 'job.out').read_text()}"
    assert "JobState=CANCELLED" in told, told
    assert "Restarts=0 " in told, told
    assert open_run(slurm.folder / "home").step == steps(slurm.folder)[-1], told


@pytest.mark.parametrize("kind", ["python", "srun", "torchrun"])
def test_a_failed_training_is_a_failed_job(slurm: SlurmHarness, kind: str) -> None:
    """Jobs that wait for it with `afterok` do not start. An earlier preemption makes no difference."""
    folder = slurm.folder
    job = submit(
        folder,
        kind,
        training="import os, signal, holdfast\nassert 'SLURM_RESTART_COUNT' not in os.environ\n"
        "with holdfast.Checkpointer({folder!r} + '/home', {'x': 0}) as ckpt:\n"
        "    for step in ckpt.steps(2):\n        os.kill(os.getpid(), signal.SIGTERM)\n",
    )
    words = ["sbatch", "--parsable", f"--dependency=afterok:{job}", f"--output={folder}/next.out"]
    later = command(*words, "--wrap", "echo began")
    wait_for(folder, job, lambda: has_ended(job))
    told = f"{shown(job)}\n{(folder / 'job.out').read_text()}"
    assert "JobState=FAILED" in told, told
    assert "Restarts=1 " in told, told
    assert "ExitCode=1:0" in told, told
    wait_for(folder, later, lambda: "Reason=DependencyNeverSatisfied" in shown(later) or has_ended(later))
    command("scancel", later)
    assert not (folder / "next.out").exists()


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
