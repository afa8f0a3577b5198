"""Fuzzing by hand: `python -m campaigns.fuzz --seconds 300`; counts are written, failing cases are kept."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns import counts
from campaigns.fuzz.targets import every
from campaigns.fuzz.worker import FOUND, fuzz

_HANG_PROCESSOR_S = 60.0  # of one case: code that no signal interrupts, such as a loop in C
_HANG_S = 600.0  # by the clock


@dataclass
class _Work:
    """A worker of one target, and since when it has been at its current case."""

    name: str
    process: Any
    out: Any
    case: object = None
    since_s: float = field(default_factory=time.monotonic)
    since_processor_s: float = 0.0

    def is_stuck(self) -> bool:
        """Return True if the worker is dead, or does not come back from a case."""
        if not self.process.is_alive():
            return True
        current, used_s = FOUND / f"{self.name}.current", _processor_s(self.process.pid)
        case = current.stat().st_mtime_ns if current.exists() else None
        if case != self.case:
            self.case, self.since_s, self.since_processor_s = case, time.monotonic(), used_s
        is_slow = used_s - self.since_processor_s > _HANG_PROCESSOR_S
        return is_slow or time.monotonic() - self.since_s > _HANG_S


def _processor_s(pid: int) -> float:
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, ticks)) / 100


def main() -> int:
    """Fuzz every target for a share of the time, two at once; return 1 if anything failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0, help="for all targets together")
    parser.add_argument("--target", action="append")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    names = args.target or list(every())
    each_s, began_s = 2 * args.seconds / len(names), time.monotonic()
    context = multiprocessing.get_context("spawn")
    rows: list[counts.Count] = []
    waiting, running = list(names), list[_Work]()
    while waiting or running:
        while waiting and len(running) < 2:
            name, out = waiting.pop(0), context.Queue()
            (FOUND / f"{name}.current").unlink(missing_ok=True)
            process = context.Process(target=fuzz, args=(name, each_s, args.seed, out))
            process.start()
            running.append(_Work(name, process, out))
        for work in list(running):
            is_stuck = work.is_stuck()  # before looking: what a worker has put may come after it has ended
            if work.out.empty() and not is_stuck:
                continue
            running.remove(work)
            rows.append(_end(work))
        time.sleep(0.2)
    if not args.target:
        counts.write("fuzz", sorted(rows, key=lambda row: row.kind), seconds=time.monotonic() - began_s)
    return int(any(row.failures for row in rows))


def _end(work: _Work) -> counts.Count:
    """Return the counts of a worker that is ready or stuck."""
    if work.out.empty():
        work.process.kill()
        found = 0, {"hang or death": f"the case is {FOUND / work.name}.current"}
    else:
        found = work.out.get()
    work.process.join()
    num_cases, failures = found
    line = f"{work.name:18} {num_cases:8} executions, {len(failures)} kinds of failures"
    print(line, *failures, sep="\n    ", flush=True)
    return counts.Count(work.name, num_cases, len(failures), "; ".join(failures))


if __name__ == "__main__":
    raise SystemExit(main())
