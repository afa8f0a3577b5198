"""Kills of real trainings at random moments: `make kills`.

Trainers, keepers, ranks and whole hosts are killed with SIGKILL again and again; every checkpoint that is
visible in between must verify, and the run that finishes in the end must have, bit for bit, the weights of
one that nothing happened to. The trainings are those of the crash tests in `tests/faults`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from campaigns import counts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from faults.playground import Playground  # noqa: E402  # pyright: ignore[reportMissingImports]
from faults.playground import check_random_rank_kills as kill_ranks  # noqa: E402  # pyright: ignore[reportMissingImports]
from faults.test_hosts import Hosts  # noqa: E402  # pyright: ignore[reportMissingImports]
from faults.test_hosts import check_random_kills as kill_hosts  # noqa: E402  # pyright: ignore[reportMissingImports]
from faults.test_kills import check_random_kills as kill_processes  # noqa: E402  # pyright: ignore[reportMissingImports]
from faults.test_tiers import check_random_kills as kill_with_tiers  # noqa: E402  # pyright: ignore[reportMissingImports]
from nursery import Nursery  # noqa: E402  # pyright: ignore[reportMissingImports]

KILLS_PER_RUN = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of training, and how it is killed."""

    name: str
    runs: int  # by default
    world_size: int
    kill: Callable[[Playground, str, int], None]  # playground, digest of an uninterrupted run, seed


def _with_tiers(playground: Playground, expected: str, seed: int) -> None:
    kill_with_tiers(playground, expected, ("--local", str(playground.local)), seed, KILLS_PER_RUN)


def _hosts(playground: Playground, expected: str, seed: int) -> None:
    hosts = Hosts(playground)
    kill_hosts(hosts, expected, seed, KILLS_PER_RUN)


KINDS = (
    Kind("one rank", 10, 1, lambda one, expected, seed: kill_processes(one, expected, seed, KILLS_PER_RUN)),
    Kind("local folder, drained to home", 5, 1, _with_tiers),
    Kind("two ranks", 4, 2, lambda one, expected, seed: kill_ranks(one, expected, seed, KILLS_PER_RUN)),
    Kind("two hosts with folders of their own", 3, 2, _hosts),
)


def main() -> int:
    """Run the command; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.kills", description=__doc__)
    parser.add_argument("--kind", action="append", choices=[kind.name for kind in KINDS])
    parser.add_argument("--runs", type=int, help="trainings of each kind, each killed five times")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"--seed {options.seed}")
    began, found, nursery = time.monotonic(), [], Nursery()
    try:
        for kind in KINDS:
            if not options.kind or kind.name in options.kind:
                found.append(_run(kind, nursery, options.runs or kind.runs, options.seed))
                print(f"{kind.name}: {found[-1].cases} kills, {found[-1].failures} failed", flush=True)
    finally:
        nursery.close()
    if not options.kind:
        counts.write("kills", found, seconds=time.monotonic() - began)
    return int(any(one.failures for one in found))


def _run(kind: Kind, nursery: Nursery, num_runs: int, seed: int) -> counts.Count:
    with _playground(nursery) as place:
        expected = _uninterrupted(place, kind.world_size)
    num_failed = 0
    for number in range(num_runs):
        with _playground(nursery) as place:
            try:
                kind.kill(place, expected, seed + number)
                place.wait_for_keepers()
            except Exception as error:  # noqa: BLE001 - the next run may show more
                num_failed += 1
                print(f"{kind.name}, seed {seed + number}: {type(error).__name__}: {str(error)[:2000]}")
                place.kill_keepers()
    detail = f"{num_runs} trainings, each finished bit for bit like one without kills"
    return counts.Count(kind.name, num_runs * KILLS_PER_RUN, num_failed, detail if not num_failed else "")


@contextmanager
def _playground(nursery: Nursery) -> Iterator[Playground]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-kills-"))
    os.environ |= {"HOLDFAST_RUNTIME_DIR": str(folder / "runtime")}
    try:
        yield Playground(folder, nursery)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _uninterrupted(place: Playground, world_size: int) -> str:
    if world_size == 1:
        place.finish()
    else:
        children = place.start_ranks(world_size)
        statuses = [child.wait() for child in children]
        if any(statuses):
            raise RuntimeError(f"a training without kills ended with {statuses}: {children[0].said()}")
    place.wait_for_keepers()
    return place.final()


if __name__ == "__main__":
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "HOLDFAST_PREEMPTION": "none",
        "HOLDFAST_KEEP_IN_MEMORY": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    sys.exit(main())
