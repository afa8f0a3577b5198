"""Soak: real trainings on a file system whose calls fail at random, killed at random, and restarted.

    make soak

Each seed is one run of several lives. Checked in each life: the step that is restored is the newest that was
ever reported durable or a newer one, its tensor holds exactly that step, no keeper dies, and nothing but
Holdfast's own errors comes out.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from campaigns import counts

HERE = Path(__file__).resolve().parent
SRC = HERE.parent / "src"
TOTAL = 40
SHARE = 0.02
MAX_LIVES = 25
_LIFE_LIMIT_S = 180
REFUSED, LOST, WRONG = 2, 3, 4
"""Exit statuses of the trainer: one of Holdfast's errors; an older step was restored; other bytes were."""

_TRAINER = """
import sys, warnings
from pathlib import Path
import torch, holdfast

home, told, total = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
def note(word):
    with told.open("a") as log:
        log.write(word + "\\n")
def shown(message, *rest, **more):
    if "died (" in str(message):
        note("keeper-died " + str(message).replace("\\n", " "))
warnings.showwarning = shown
warnings.simplefilter("always")
state = {"x": torch.zeros(300_000), "frozen": torch.ones(5)}
try:
    with holdfast.Checkpointer(
        home, state, keep=2, quiet=True, reads=holdfast.Reads(patience="20s"),
        limits=holdfast.Limits(patience=None, commit_timeout="20s"),
    ) as ckpt:
        start = ckpt.restore() or 0
        words = [line.split() for line in told.read_text().splitlines()]
        durable = [int(rest[0]) for word, *rest in words if word == "durable"]
        if start < max(durable, default=0):
            note(f"lost {max(durable)}, restored {start}")
            sys.exit(3)
        if not torch.equal(state["x"], torch.full((300_000,), float(start))):
            note(f"wrong {start}")
            sys.exit(4)
        for step in range(start + 1, total + 1):
            state["x"].fill_(float(step))
            save = ckpt.save(step)
            try:
                save.wait_durable()
                note(f"durable {step}")
            except holdfast.HoldfastError as error:
                note(f"failed {step} {type(error).__name__}")
except holdfast.HoldfastError as error:
    note(f"refused {type(error).__name__} {error}".replace("\\n", " ")[:300])
    holdfast.hard_exit(2)
note("finished")
holdfast.hard_exit(0)
"""


@dataclass
class Outcome:
    """The outcome of one seed."""

    seed: int
    lives: int = 0
    durable: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def soak(seed: int, folder: Path, *, total: int = TOTAL, share: float = SHARE) -> Outcome:
    """Run one training to its end through faults and kills.

    Args:
        seed: of the faults and of the kills.
        folder: empty, on a real disk.
        total: steps of the training, each saved.
        share: of system calls below the home that fail.
    """
    outcome, dice, began = Outcome(seed), random.Random(seed), time.monotonic()
    home, told = folder / "home", folder / "told.txt"
    told.touch()
    path = os.pathsep.join(map(str, (HERE / "faulty_system", SRC)))
    env = os.environ | {
        "PYTHONPATH": path,
        "FAULTS_BELOW": str(home),
        "HOLDFAST_RUNTIME_DIR": str(folder / "runtime"),
        "HOLDFAST_PREEMPTION": "none",
        "HOLDFAST_KEEP_IN_MEMORY": "0",
        "OMP_NUM_THREADS": "1",
    }
    while outcome.lives < MAX_LIVES:
        outcome.lives += 1
        # The last lives have no faults: what was durable must be there, and the training must end.
        is_calm = outcome.lives > MAX_LIVES - 3
        faults = {"FAULTS_SHARE": "0" if is_calm else str(share), "FAULTS_SEED": f"{seed}-{outcome.lives}"}
        command = [sys.executable, "-c", _TRAINER, str(home), str(told), str(total)]
        with (folder / f"life-{outcome.lives}.txt").open("w+") as output:
            process = subprocess.Popen(command, env=env | faults, stdout=output, stderr=output, cwd="/")
            limit_s = _LIFE_LIMIT_S if is_calm or dice.random() < 0.4 else dice.uniform(2, 12)
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            output.seek(0)
            said = output.read()
        if status in (LOST, WRONG) or status not in (0, REFUSED, -9) or "Traceback" in said:
            outcome.failures.append(f"life {outcome.lives} ended with {status}: {said[-1500:]}")
        if status == 0:
            break
    else:
        outcome.failures.append(f"not finished in {MAX_LIVES} lives")
    lines = told.read_text().splitlines()
    outcome.failures += [line for line in lines if line.startswith(("keeper-died", "lost", "wrong"))]
    outcome.durable = sum(line.startswith("durable") for line in lines)
    log = folder / "home.faults"
    outcome.faults.update(log.read_text().splitlines() if log.exists() else ())
    outcome.seconds = time.monotonic() - began
    return outcome


def main() -> int:
    """Run the campaign; exit status 1 if any seed failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--share", type=float, default=SHARE)
    parser.add_argument("--workers", type=int, default=6, help="trainings at a time; they mostly wait")
    options = parser.parse_args()
    began, outcomes = time.monotonic(), []
    with ThreadPoolExecutor(options.workers) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for one in pool.map(_soak_in_new_folder, seeds, repeat(options.share)):
            outcomes.append(one)
            numbers = f"{one.lives} lives, {one.durable} durable, {one.faults.total()} faults"
            print(f"seed {one.seed}: {numbers}, {one.seconds:.0f} s", flush=True)
            for failure in one.failures:
                print(f"  FAILED: {failure}", flush=True)
    counts.write("faults", [_count(outcomes)], seconds=time.monotonic() - began)
    return int(any(one.failures for one in outcomes))


def _soak_in_new_folder(seed: int, share: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-", ignore_cleanup_errors=True) as folder:
        return soak(seed, Path(folder), share=share)


def _count(outcomes: list[Outcome]) -> counts.Count:
    num_failed = sum(bool(one.failures) for one in outcomes)
    num_lives, num_faults = sum(one.lives for one in outcomes), sum(one.faults.total() for one in outcomes)
    num_durable = sum(one.durable for one in outcomes)
    detail = f"{num_faults:,} faults in {num_lives:,} lives, {num_durable:,} durable saves"
    return counts.Count("trainings on a faulty file system", len(outcomes), num_failed, detail)


if __name__ == "__main__":
    sys.exit(main())
