"""Hangs of real trainings on gloo ranks: `make hangs`.

In one half of the trainings one rank hangs in one of several ways, and it must be named. The other half is
slow and healthy, and no hang may be reported. The trainings are those of the tests in `tests/hang`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from campaigns import counts
from holdfast.watch.hang.incidents import group_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from hang.trials import Trial  # noqa: E402  # pyright: ignore[reportMissingImports]
from nursery import Nursery  # noqa: E402  # pyright: ignore[reportMissingImports]

WORLD_SIZE = 3
HANGS = ("stop", "loop", "sleep", "gil", "loader", "extra", "skip")
HEALTHY = ("none", "uneven", "phase", "evaluation", "compile", "suspended")
_SUSPENDED_S = 10.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of trainings."""

    name: str
    ways: tuple[str, ...]
    run: Callable[[Trial, str, int], None]


def hang(trial: Trial, way: str, odd: int) -> None:
    """Run a training that hangs. Check that the odd rank, and no other, is named."""
    trial.start(way, odd=odd, limit="3s")
    found = trial.hang()
    named = [one.ranks for one in group_ranks(found.ranks) if one.is_odd]
    assert named == [(odd,)], f"rank {odd} hung ({way}), and {named} was named"
    trial.wait_until(lambda: f"> rank {odd}: " in trial.printed())


def be_slow(trial: Trial, way: str, odd: int) -> None:
    """Run a healthy training to its end. Check that it is not reported."""
    trial.start(way, odd=odd, limit="3s")
    if way == "suspended":
        trial.wait_until(lambda: bool(trial.lines("committed")))
        _suspend(trial)
    trial.finish()
    reported = trial.lines("hang")
    assert not reported, f"{way} was reported: {reported[0]['detail']}"


def _suspend(trial: Trial) -> None:
    """Stop all processes of the training for a while, as a suspended machine does."""
    processes = [psutil.Process(one.pid) for one in trial.ranks if one.ended.empty()]
    processes += [child for one in processes for child in one.children(recursive=True)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for one in processes:
            one.send_signal(number)
        time.sleep(_SUSPENDED_S if number == signal.SIGSTOP else 0.0)


KINDS = (Kind("hangs", HANGS, hang), Kind("healthy and slow", HEALTHY, be_slow))


def main() -> int:
    """Run the command; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.hangs", description=__doc__)
    parser.add_argument("--kind", action="append", choices=[kind.name for kind in KINDS])
    parser.add_argument("--runs", type=int, default=42, help="trainings of each kind")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    began, found, nursery = time.monotonic(), [], Nursery()
    try:
        for kind in KINDS:
            if not options.kind or kind.name in options.kind:
                found.append(_run(kind, nursery, options.runs, options.seed))
                print(f"{kind.name}: {found[-1].cases} trainings, {found[-1].failures} failed", flush=True)
    finally:
        nursery.close()
    if not options.kind:
        counts.write("hangs", found, seconds=time.monotonic() - began)
    return int(any(one.failures for one in found))


def _run(kind: Kind, nursery: Nursery, num_runs: int, seed: int) -> counts.Count:
    num_failed, choice = 0, random.Random(seed)
    for number in range(num_runs):
        way, odd = kind.ways[number % len(kind.ways)], choice.randrange(WORLD_SIZE)
        with tempfile.TemporaryDirectory(prefix="holdfast-hangs-", ignore_cleanup_errors=True) as folder:
            trial = Trial(Path(folder), nursery, world_size=WORLD_SIZE)
            try:
                kind.run(trial, way, odd)
            except Exception as error:  # noqa: BLE001 - the next run may show more
                num_failed += 1
                print(f"{way}, rank {odd}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            finally:
                trial.kill()
    detail = f"{', '.join(kind.ways)}; {WORLD_SIZE} ranks"
    return counts.Count(kind.name, num_runs, num_failed, detail)


if __name__ == "__main__":
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "HOLDFAST_PREEMPTION": "none",
        "HOLDFAST_KEEP_IN_MEMORY": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    sys.exit(main())
