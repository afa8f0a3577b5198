"""Failures in turn: each request to a bucket, and each system call below a home, fails once.

    make in-turn

A training saves, a second one resumes and saves, and all checkpoints but the newest are deleted. A first run
counts the calls of this. In each further run the next one of them fails. Whatever failed, only Holdfast's own
errors come out, and a start without failures then restores the newest checkpoint that was ever reported
durable, or a newer one, with its bytes, saves, and verifies everything.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from campaigns import counts

ROOT = Path(__file__).resolve().parents[1]
FAULTY_SYSTEM = ROOT / "campaigns" / "faulty_system"
sys.path.insert(0, str(ROOT / "tests"))

from fault_proxy import FaultProxy  # noqa: E402  # pyright: ignore[reportMissingImports]
from nursery import Nursery  # noqa: E402  # pyright: ignore[reportMissingImports]
from servers import Server, ministack  # noqa: E402  # pyright: ignore[reportMissingImports]

REQUEST_FAULTS = ("reset-before", "reset-after", "truncate", "503")
CALL_ERRORS = ("ESTALE", "EIO")
_LIMIT_S = 300

_TRAINER = """
import os, runpy, sys, warnings
if "FAULTS_AT" in os.environ:
    runpy.run_path(os.path.join(os.environ["FAULTY_SYSTEM"], "sitecustomize.py"))
import torch, holdfast
from holdfast.cli import main

home, log, local, acts = sys.argv[1], sys.argv[2], sys.argv[3] or None, sys.argv[4:]
warnings.simplefilter("ignore")

def note(*words):
    with open(log, "a") as file:
        file.write(" ".join(map(str, words)).replace("\\n", " ")[:400] + "\\n")

def newest_durable():
    return max((int(line.split()[1]) for line in open(log) if line.startswith("durable")), default=0)

def train(num_steps):
    state = {"x": torch.zeros(20_000), "frozen": torch.ones(5)}
    with holdfast.Checkpointer(
        home, state, keep=2, quiet=True, local=local, reads=holdfast.Reads(patience="20s"),
        limits=holdfast.Limits(patience=None, commit_timeout="20s"),
    ) as ckpt:
        start = ckpt.restore() or 0
        if start < newest_durable():
            note("WRONG: restored", start, "but durable was", newest_durable())
        elif not torch.equal(state["x"], torch.full((20_000,), float(start))):
            note("WRONG: other bytes of step", start)
        for step in range(start + 1, start + num_steps + 1):
            state["x"].fill_(float(step))
            try:
                ckpt.save(step).wait_durable(60)
                note("durable", step)
            except holdfast.HoldfastError as error:
                note("failed", step, type(error).__name__, error)

for act in acts:
    try:
        if act == "delete":
            note("deleted", main(["rm", home, "--before", str(newest_durable()), "--yes"]))
        elif act == "verify":
            note("verified", main(["verify", home, "--all"]))
        else:
            train(int(act))
    except holdfast.HoldfastError as error:
        note("refused", act, type(error).__name__, error)
note("end")
holdfast.hard_exit(0)
"""


@dataclass(slots=True)
class Outcome:
    """One run, in which call `number` failed."""

    kind: str
    number: int
    failed: str = ""
    """The call that failed; "" if there were fewer calls."""
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Outcome in a word."""
        if any(line.startswith("refused") for line in self.lines):
            return "refused"
        return "save failed" if any(line.startswith("failed") for line in self.lines) else "retried"


@dataclass(frozen=True, slots=True)
class Place:
    """A new home for one run."""

    home: str
    direct: str  # the same without failures
    local: str
    folder: Path
    env: dict[str, str]

    def run(self, nursery: Nursery, acts: Sequence[str], env: dict[str, str] | None = None) -> list[str]:
        """Run the acts in a new process, and return its problems.

        Args:
            env: environment of the process if its calls may fail.
        """
        home = self.direct if env is None else self.home
        arguments = ["-c", _TRAINER, home, str(self.log), self.local, *acts]
        done = nursery.run(arguments, env=os.environ | self.env | (env or {}), timeout_s=_LIMIT_S)
        said = done.stdout + done.stderr
        if done.returncode == 0 and "Traceback" not in said:
            return []
        return [f"{acts} ended with {done.returncode}: {said[-1500:]}"]

    @property
    def log(self) -> Path:
        """Lines that the processes wrote."""
        return self.folder / "log.txt"


def run_once(nursery: Nursery, place: Place, outcome: Outcome, env: dict[str, str]) -> Outcome:
    """Save, resume and delete with one failure, then resume and verify without any."""
    place.log.touch()
    outcome.problems += place.run(nursery, ("3", "2", "delete"), env)
    outcome.problems += place.run(nursery, ("1", "delete", "verify"))
    outcome.lines = place.log.read_text().splitlines()
    outcome.problems += [line for line in outcome.lines if line.startswith("WRONG")]
    if outcome.lines.count("end") != 2:
        outcome.problems.append("a process did not reach its end")
    calm = outcome.lines[outcome.lines.index("end") :] if "end" in outcome.lines else []
    if (
        not any(line.startswith("durable") for line in calm)
        or "verified 0" not in calm
        or "deleted 0" not in calm
    ):
        outcome.problems.append(f"the start without failures: {calm}")
    return outcome


# -- the two kinds of places ---------------------------------------------------------------------------------


@contextmanager
def _folder() -> Iterator[tuple[Path, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="holdfast-turn-", ignore_cleanup_errors=True) as name:
        yield Path(name), {"HOLDFAST_RUNTIME_DIR": f"{name}/runtime"}


def fail_call(nursery: Nursery, error: str, number: int) -> Outcome:
    """Run once; system call `number` on a file of the home fails with `error`."""
    with _folder() as (folder, env):
        home = folder / "home"
        place = Place(str(home), str(home), "", folder, env)
        faults = {
            "FAULTS_AT": str(number),
            "FAULTS_BELOW": str(home),
            "FAULTS_ERROR": error,
            "FAULTY_SYSTEM": str(FAULTY_SYSTEM),
            "PYTHONPATH": os.pathsep.join((str(FAULTY_SYSTEM), str(ROOT / "src"))),
        }
        outcome = run_once(nursery, place, Outcome(f"system calls, {error}", number), faults)
        log = folder / "home.faults"
        outcome.failed = log.read_text().strip() if log.exists() else ""
        outcome.problems += [f"left behind: {one.name}" for one in home.rglob(".unfinished-*")]
        return outcome


def fail_request(nursery: Nursery, server: Server, fault: str, number: int, *, tiers: bool) -> Outcome:
    """Run once; request `number` to the bucket has a fault.

    Args:
        tiers: the training has a local folder too, from which its saves are sent home.
    """
    kind = "requests with a local folder" if tiers else "requests"
    outcome = Outcome(f"{kind}, {fault}", number)
    with _folder() as (folder, env), FaultProxy("127.0.0.1", server.port) as proxy:
        prefix = f"{kind.replace(' ', '-')}-{fault}-{number}-{random.getrandbits(32):x}"
        proxy.inject(fault, nth=number + 1, after_bytes=40)
        local = str(folder / "local") if tiers else ""
        home = server.home(prefix, port=proxy.port, timeout="5s")
        place = Place(home, server.home(prefix), local, folder, env | dict(server.env))
        run_once(nursery, place, outcome, {})
        failed = [one for one in proxy.requests() if one.fault]
        outcome.failed = f"{failed[0].method} {failed[0].target.partition('?')[0]}" if failed else ""
        return outcome


def fail_in_turn(run: Callable[[int], Outcome], *, workers: int, every: int) -> list[Outcome]:
    """Run with each `every`-th call failing, until there are no further calls."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(workers) as pool:
        first = 0
        while True:
            batch = list(pool.map(run, range(first, first + every * workers, every)))
            outcomes += [one for one in batch if one.failed]
            for one in batch:
                for problem in one.problems:
                    print(f"FAILED: {one.kind}, {one.number} ({one.failed}): {problem}", flush=True)
            if not all(one.failed for one in batch):
                return outcomes
            first += every * workers


def main() -> int:
    """Run the campaign; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.in_turn", description=__doc__)
    parser.add_argument("--kind", help="only kinds that contain this text, such as ESTALE")
    parser.add_argument("--every", type=int, default=1, help="only each N-th call")
    parser.add_argument("--workers", type=int, default=4, help="trainings at a time; they mostly wait")
    options = parser.parse_args()
    began, found, nursery = time.monotonic(), [], Nursery()
    try:
        with ministack() as server:
            for kind, run in _kinds(nursery, server):
                if options.kind is None or options.kind in kind:
                    outcomes = fail_in_turn(run, workers=options.workers, every=options.every)
                    found.append(_count(kind, outcomes))
                    print(f"{kind}: {found[-1].cases} cases, {found[-1].failures} failed", flush=True)
    finally:
        nursery.close()
    if options.kind is None:
        counts.write("in_turn", found, seconds=time.monotonic() - began)
    return int(any(one.failures for one in found))


def _kinds(nursery: Nursery, server: Server) -> Iterator[tuple[str, Callable[[int], Outcome]]]:
    for error in CALL_ERRORS:
        yield f"system calls, {error}", lambda number, error=error: fail_call(nursery, error, number)
    for tiers in (False, True):
        for fault in REQUEST_FAULTS:
            kind = "requests with a local folder" if tiers else "requests"
            yield (
                f"{kind}, {fault}",
                lambda number, fault=fault, tiers=tiers: fail_request(
                    nursery, server, fault, number, tiers=tiers
                ),
            )


def _count(kind: str, outcomes: list[Outcome]) -> counts.Count:
    names = Counter(one.name for one in outcomes)
    detail = ", ".join(f"{number:,} {name}" for name, number in names.most_common())
    return counts.Count(kind, len(outcomes), sum(bool(one.problems) for one in outcomes), detail)


if __name__ == "__main__":
    os.environ |= {"HOLDFAST_PREEMPTION": "none", "HOLDFAST_KEEP_IN_MEMORY": "0", "OMP_NUM_THREADS": "1"}
    sys.exit(main())
