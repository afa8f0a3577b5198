"""Time from a kill until a job's code runs again, and steps that a preemption costs.

A job's `run` writes down the time as its first command, before anything of the user's has to start. The same
is done with a small training that saves every few steps: it is given notices, and its node is killed without.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from holdfast.jobs.engine import Job  # noqa: E402
from holdfast.jobs.environment import tag  # noqa: E402
from holdfast.jobs.folder import job_folder, state_dir  # noqa: E402
from holdfast.jobs.local.engine import LocalEngine  # noqa: E402
from holdfast.jobs.node import processes  # noqa: E402
from holdfast.jobs.task.parser import Overrides, parse_tasks  # noqa: E402

EVERY = 20  # steps from save to save
STEP_S = 0.02
LEAD_S = 30.0
LIMIT_S = 120.0
RESTARTS = "resources: {job_recovery: {max_restarts_on_errors: 100000}}\n"
# Each attempt brings the job on, so that no pause is made before the next.
FIRST = """\
echo "$HOLDFAST_ATTEMPT $EPOCHREALTIME" >> "{folder}/starts"
echo '{{"home": "none", "step": '$HOLDFAST_ATTEMPT'}}' >> "$HOLDFAST_PROGRESS"
"""
WAYS = ("node", "process", "controller and node")
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Kill and watch; its exit status is 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="kills of each kind")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/recovering_<hardware>_<date>.json")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return 0
    folder = options.dir.resolve() / f"recovering-{os.getpid()}"
    folder.mkdir(parents=True)
    facts = machine.describe(folder)
    bench = Bench(folder)
    try:
        runs = [*bench.kills(options.rounds), *bench.interruptions(options.rounds)]
    finally:
        bench.close()
        shutil.rmtree(folder, ignore_errors=True)
    return report(options, facts, runs)


@dataclass(frozen=True)
class Start:
    """An attempt's first command."""

    attempt: int
    unix_s: float


class Bench:
    """Jobs in a folder of their own, and what is done to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["HOLDFAST_PREEMPTION"] = "none"
        os.environ["HOLDFAST_STATE"] = str(folder / "state")
        self.engine = LocalEngine()

    def kills(self, rounds: int) -> list[dict[str, Any]]:
        """Kill a job that does nothing, in each way in turn."""
        job = self._submit(f"{FIRST.format(folder=self.folder)}sleep 10000\n")
        runs = []
        for number in range(rounds):
            for way in WAYS:
                start = self._started(job, number * len(WAYS) + WAYS.index(way) + 1)
                killed_unix_s = time.time()
                self._kill(job, way)
                if way == "controller and node":
                    self.engine.jobs()  # the next command about jobs starts another one
                again = self._started(job, start.attempt + 1)
                runs.append({"what": "kill", "way": way, "back_s": again.unix_s - killed_unix_s})
                console.print(json.dumps(runs[-1]))
        self.engine.cancel(job.id)
        self._wait(lambda: self.engine.job(job.id).status.is_final, "the job's end")
        (self.folder / "starts").unlink()
        return runs

    def interruptions(self, rounds: int) -> list[dict[str, Any]]:
        """Interrupt a training, with and without notice in turn."""
        words = f"{sys.executable} {Path(__file__).resolve()} --train {self.folder}"
        first = f'echo "$HOLDFAST_ATTEMPT $EPOCHREALTIME" >> "{self.folder}/starts"\n'
        job = self._submit(f"{first}{words}\n")
        runs = [self._interrupt(job, number + 1) for number in range(2 * rounds)]
        self.engine.cancel(job.id)
        self._wait(lambda: self.engine.job(job.id).status.is_final, "the job's end")
        return runs

    def _interrupt(self, job: Job, attempt: int) -> dict[str, Any]:
        # Not at the same distance from a save each time.
        enough = 1.5 * EVERY + 7 * attempt % EVERY
        self._wait(lambda: len(self._steps(attempt)) > enough, "steps")
        is_noticed = attempt % 2 == 1
        begun_unix_s = time.time()
        if is_noticed:
            self.engine.preempt(job.id, lead_s=LEAD_S)
        else:
            self._kill(job, "node")
        again = self._started(job, attempt + 1)
        self._wait(lambda: self._steps(attempt + 1), "the next attempt's first step")
        before, after = self._steps(attempt), self._steps(attempt + 1)
        run = {
            "what": "interruption",
            "way": f"{LEAD_S:.0f} s of notice" if is_noticed else "kill -9 of the node",
            "back_s": again.unix_s - begun_unix_s,
            "own_start_s": after[0][1] - again.unix_s,
            "steps_lost": before[-1][0] - (after[0][0] - 1),
        }
        console.print(json.dumps(run))
        return run

    def close(self) -> None:
        """Leave no process behind."""
        for job in self.engine.jobs():
            if not job.status.is_final:
                self.engine.cancel(job.id)
                self._wait(lambda number=job.id: self.engine.job(number).status.is_final, "the job's end")

    def _submit(self, run: str) -> Job:
        lines = "".join(f"  {line}\n" for line in run.splitlines())
        file = parse_tasks(f"{RESTARTS}run: |\n{lines}", "recovering.yaml", Overrides())
        return self.engine.submit_file(file)[0]

    def _started(self, job: Job, attempt: int) -> Start:
        """When an attempt began to run the user's code."""
        found: list[Start] = []

        def has_begun() -> bool:
            path = self.folder / "starts"
            lines = path.read_text().splitlines() if path.exists() else []
            found[:] = [
                Start(int(one), float(at)) for one, at in map(str.split, lines) if int(one) == attempt
            ]
            return bool(found)

        self._wait(has_begun, f"attempt {attempt} of job {job.id}")
        return found[0]

    def _steps(self, attempt: int) -> list[tuple[int, float]]:
        """The steps that an attempt has done, with their times."""
        path = self.folder / f"steps-{attempt}"
        text = path.read_text() if path.exists() else ""
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [(int(step), float(at)) for step, at in lines]

    def _kill(self, job: Job, way: str) -> None:
        if way == "process":
            table = processes.snapshot()
            mine = processes.tagged(tag(job.task_id), table)
            processes.kill([one for one in mine if _command(one).startswith(b"sleep\0")])
            return
        if way == "controller and node":
            path = str(job_folder(state_dir(), job.id).path).encode()
            found = processes.snapshot().values()
            processes.kill([one for one in found if {b"controller", path} <= set(_command(one).split(b"\0"))])
        node = job_folder(state_dir(), job.id).node(self.engine.job(job.id).attempt, 0)
        table = processes.snapshot()
        for agent in processes.of_role(processes.AGENT, node.path):
            processes.kill([agent, *processes.descendants(agent.pid, table)])

    def _wait(self, what: Callable[[], object], name: str) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"waited {LIMIT_S:.0f} s in vain for {name}")
            time.sleep(0.01)


def _command(process: processes.Process) -> bytes:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


def train(folder: Path) -> None:
    """The training: writes down each step with its time, and saves every `EVERY` steps."""
    import torch

    import holdfast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / f"steps-{os.environ['HOLDFAST_ATTEMPT']}"
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(folder / "home", state, every=EVERY) as ckpt, path.open("a") as log:
        for step in ckpt.steps(1_000_000):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            time.sleep(STEP_S)
            log.write(f"{step + 1} {time.time():.6f}\n")
            log.flush()


def report(options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, Any]]) -> int:
    """Write the numbers down; 1 if a goal is missed."""

    def values(way: str, key: str) -> list[float]:
        return [run[key] for run in runs if run["way"] == way]

    notice, kill = f"{LEAD_S:.0f} s of notice", "kill -9 of the node"
    medians = {
        "node_s": statistics.median(values("node", "back_s")),
        "node_worst_s": max(values("node", "back_s")),
        "process_s": statistics.median(values("process", "back_s")),
        "controller_s": statistics.median(values("controller and node", "back_s")),
        "notice_s": statistics.median(values(notice, "back_s")),
        "own_start_s": statistics.median([*values(notice, "own_start_s"), *values(kill, "own_start_s")]),
        "lost_with_notice": max(values(notice, "steps_lost")),
        "lost_without": max(values(kill, "steps_lost")),
    }
    path = options.out or machine.results_path("recovering", facts)
    document = {"machine": facts, "rounds": options.rounds, "every": EVERY, "medians": medians, "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    for name, value in medians.items():
        console.print(f"{name:20}{value:.3g}")
    console.print(f"wrote {path}")
    ways = ("node_s", "process_s", "controller_s")
    is_good = all(medians[way] < 2 for way in ways) and medians["lost_with_notice"] == 0
    return 0 if is_good and medians["lost_without"] <= 2 * EVERY else 1


if __name__ == "__main__":
    sys.exit(main())
