"""Time from the kill of a training until its next step: the demo's GPT, in each way of starting again.

`python` is a loop that starts the script again, `torchrun` its own `--max-restarts`, each as it is, with
`holdfast standby` before it, and with `supervise` in the script. The process that trains is killed with
SIGKILL, of two ranks the last; the time ends when the line of the first step arrives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from replaying.replay import is_standby, num_listening  # noqa: E402

from holdfast.jobs.node import processes  # noqa: E402
from holdfast.watch.standby import with_standby  # noqa: E402

SCRIPT = HERE.parent / "src" / "holdfast" / "cli" / "demo" / "training.py"
SUPERVISED = HERE / "supervised.py"
BYTES = 30_000_000
EVERY = 10
LIMIT_S = 120.0
STEPS_BETWEEN = 25  # steps after a start until the next kill
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000", "--nproc-per-node")
WAYS = (
    *("python", "torchrun", "python with a standby", "torchrun with a standby", "python, supervised"),
    *("2 ranks of torchrun", "2 ranks of torchrun with standbys", "2 ranks of torchrun, supervised"),
)
STEP = re.compile(r'"step": (\d+)')
GOAL_S = 1.0
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Kill each way in turn, and write the results; the exit status is 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="kills of each way")
    parser.add_argument("--dir", type=Path, default=HERE.parent / ".bench")
    parser.add_argument("--out", type=Path, help="default results/standby_<hardware>_<date>.json")
    options = parser.parse_args()
    folder = options.dir.resolve() / f"standby-{os.getpid()}"
    folder.mkdir(parents=True)
    facts = machine.describe(folder)
    runs: list[dict[str, Any]] = []
    try:
        for way in WAYS:
            runs += Training(way, folder / way.replace(" ", "-")).measure(options.rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(options, facts, runs)


class Training:
    """A training that is killed and started again, in one way."""

    def __init__(self, way: str, folder: Path) -> None:
        self._way, self._has_standby, self._is_supervised = way, "standby" in way, "supervised" in way
        launcher = (*TORCHRUN, "2" if way.startswith("2 ranks") else "1") if "torchrun" in way else ()
        script = str(SUPERVISED if self._is_supervised else SCRIPT)
        home = ["--home", str(folder), "--steps", "1000000", "--every", str(EVERY), "--bytes", str(BYTES)]
        self._words = [sys.executable, *launcher, script, *home, "--hold", "2m"]
        # Without the first, restarts of torchrun read the addresses of the attempt before; ours do not.
        own = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "HOLDFAST_PREEMPTION": "none",
        }
        env = {**os.environ, **own}
        self._env = with_standby(env) if self._has_standby else env
        self._steps: list[tuple[int, float]] = []  # with the time at which its line has arrived
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = False

    def measure(self, rounds: int) -> list[dict[str, Any]]:
        """Kill the training in each round, and return the times until its next step."""
        threading.Thread(target=self._start_again, daemon=True).start()
        runs = []
        try:
            for number in range(rounds):
                self._wait_for_steps()
                began_s, before = time.monotonic(), len(self._steps)
                last = self._steps[-1][0]
                os.kill(self._trainer(), signal.SIGKILL)
                self._wait(partial(self._found, before, last))
                found = self._found(before, last)
                assert found is not None
                first, at_s = found
                back = {"back_s": at_s - began_s, "steps_again": last + 1 - first}
                runs.append({"way": self._way, "round": number, **back})
                console.print(json.dumps(runs[-1]))
        finally:
            self._end()
        return runs

    def _wait_for_steps(self) -> None:
        before = len(self._steps)
        self._wait(lambda: len(self._steps) >= before + STEPS_BETWEEN)
        if self._has_standby:
            self._wait(lambda: num_listening() > 0)
        # Between two saves, so that the next start repeats a step, by which its first line is found.
        self._wait(lambda: self._steps[-1][0] % EVERY == EVERY // 2)

    def _found(self, before: int, last: int) -> tuple[int, float] | None:
        """Return the first step after a kill, and the time at which its line arrived; None before that."""
        return next((one for one in self._steps[before:] if one[0] < last), None)  # another rank may be at it

    def _start_again(self) -> None:
        while not self._has_ended:
            self._process = subprocess.Popen(
                self._words, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                # The lines of two ranks may be in one.
                self._steps += [(int(step), time.monotonic()) for step in STEP.findall(line)]
            self._process.wait()

    def _trainer(self) -> int:
        """Return the pid of the process that trains as the launcher's last rank."""
        assert self._process is not None
        found = self._process.pid
        for _ in range(("torchrun" in self._way) + self._is_supervised):
            found = int(Path(f"/proc/{found}/task/{found}/children").read_text().split()[-1])
        return found

    def _end(self) -> None:
        self._has_ended = True
        if self._process is not None:
            table = processes.snapshot()
            own = processes.find(self._process.pid)
            processes.kill([*([own] if own else []), *processes.descendants(self._process.pid, table)])
        processes.kill([one for one in processes.snapshot().values() if is_standby(one.pid)])

    def _wait(self, is_true: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not is_true():
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"waited {LIMIT_S:.0f} s in vain, {self._way}")
            time.sleep(0.002)


def report(options: argparse.Namespace, facts: dict[str, Any], runs: list[dict[str, Any]]) -> int:
    """Write the numbers; return 1 if the goal is missed."""
    medians = {}
    for way in WAYS:
        seconds = [run["back_s"] for run in runs if run["way"] == way]
        medians |= {way: statistics.median(seconds), f"{way}, slowest": max(seconds)}
    path = options.out or machine.results_path("standby", facts)
    document = {"machine": facts, "rounds": options.rounds, "every": EVERY, "medians": medians, "runs": runs}
    path.write_text(json.dumps(document, indent=1) + "\n")
    for name, value in medians.items():
        console.print(f"{name:40}{value:.2f} s")
    console.print(f"wrote {path}")
    return 0 if medians["python with a standby"] < GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
