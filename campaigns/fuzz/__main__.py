"""Fuzzing by hand: `python -m campaigns.fuzz --seconds 300`; counts are written, failing cases are kept."""

from __future__ import annotations

import argparse
import multiprocessing
import time

from campaigns import counts
from campaigns.fuzz.targets import every
from campaigns.fuzz.worker import FOUND, fuzz

_HANG_S = 60.0


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
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < 2:
            name, out = waiting.pop(0), context.Queue()
            worker = context.Process(target=fuzz, args=(name, each_s, args.seed, out))
            worker.start()
            running[name] = worker, out, time.monotonic() + each_s + _HANG_S + 60
        for name, (worker, out, deadline_s) in list(running.items()):
            found = None if out.empty() else out.get()
            if found is None and worker.is_alive() and time.monotonic() < deadline_s:
                continue
            if found is None:
                worker.kill()
                found = 0, {"hang or death": f"the case is {FOUND / name}.current"}
            worker.join()
            del running[name]
            num_cases, failures = found
            rows.append(counts.Count(name, num_cases, len(failures), "; ".join(failures)))
            print(
                f"{name:18} {num_cases:8} executions, {len(failures)} kinds of failures",
                *failures,
                sep="\n    ",
                flush=True,
            )
        time.sleep(0.2)
    if not args.target:
        counts.write("fuzz", sorted(rows, key=lambda row: row.kind), seconds=time.monotonic() - began_s)
    return int(any(row.failures for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
