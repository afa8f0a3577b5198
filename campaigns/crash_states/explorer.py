"""Exploration of one recorded workload: states are drawn, made in a folder, and checked."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.crash_states import checks
from campaigns.crash_states.operations import Log
from campaigns.crash_states.recording import Recording
from campaigns.crash_states.states import State, content, cuts, digest, draw, promises, tree

_MAX_IN_VAIN = 3000  # states drawn one after the other that were all seen before: there are no more
_MAX_REPORTED = 20


@dataclass(frozen=True, slots=True)
class Failure:
    """A state in which something does not hold."""

    problem: str
    rule: str
    state: str  # as JSON, for --state


@dataclass(slots=True)
class Outcome:
    """Counts of one workload."""

    name: str
    num_calls: int = 0
    num_cuts: int = 0
    num_drawn: int = 0
    num_distinct: int = 0
    num_resumed: int = 0  # of the distinct ones, by a real process that saved on top
    num_failed: int = 0
    is_exhausted: bool = False  # thousands of draws found no other state
    rules: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Case:
    rule: str
    state: State
    is_resumed: bool


def explore(
    recording: Recording,
    log: Log,
    *,
    num_states: int,
    seed: int,
    resumed_share: float = 0.02,
    num_workers: int = 2,
    limit_s: float = float("inf"),
    on_checked: Callable[[], None] = lambda: None,
) -> Outcome:
    """Check distinct states of a recording until there are `num_states`, or no more are found.

    Args:
        recording: of the workload.
        log: its operations.
        num_states: most states to check.
        seed: of all that is drawn.
        resumed_share: of the states that a process of its own restores, and saves on top of.
        num_workers: processes.
        limit_s: check no more states after so many seconds.
        on_checked: called after each state.
    """
    began = time.monotonic()
    outcome = Outcome(recording.workload.name, num_calls=log.num_calls, num_cuts=len(cuts(log)))
    cases = _distinct(log, outcome, num_states, seed, resumed_share if recording.workload.restores else 0.0)
    context = multiprocessing.get_context("fork")  # the log need not be sent
    with context.Pool(num_workers, _prepare, (log, recording, began + limit_s)) as pool:
        for case, problems in pool.imap_unordered(_check, cases, chunksize=8):
            if problems is None:
                continue
            outcome.num_distinct += 1
            outcome.rules[case.rule] += 1
            outcome.num_resumed += case.is_resumed
            outcome.num_failed += bool(problems)
            if problems and len(outcome.failures) < _MAX_REPORTED:
                outcome.failures.append(Failure(problems[0], case.rule, to_json(case.state)))
            on_checked()
    outcome.seconds = time.monotonic() - began
    return outcome


def _distinct(
    log: Log, outcome: Outcome, num_states: int, seed: int, resumed_share: float
) -> Iterator[_Case]:
    """Return states that differ in what they hold or in what was promised."""
    seen: set[tuple[bytes, tuple[str, ...]]] = set()
    in_vain, random_ = 0, random.Random(seed)
    for rule, state in draw(log, seed):
        outcome.is_exhausted = in_vain >= _MAX_IN_VAIN
        if len(seen) >= num_states or outcome.is_exhausted:
            return
        outcome.num_drawn += 1
        key = digest(log, state), tuple(promises(log, state.cut))
        if key in seen:
            in_vain += 1
            continue
        in_vain = 0
        seen.add(key)
        yield _Case(rule, state, random_.random() < resumed_share)


_work: list[tuple[Log, Recording, float]] = []


def _prepare(log: Log, recording: Recording, deadline_s: float) -> None:
    import torch

    torch.set_num_threads(1)
    _work.append((log, recording, deadline_s))


def _check(case: _Case) -> tuple[_Case, list[str] | None]:
    """Return the problems of a case; None if its time was up."""
    log, recording, deadline_s = _work[0]
    if time.monotonic() > deadline_s:
        return case, None
    folder = Path(f"/dev/shm/holdfast-crash-{os.getpid()}")
    os.environ |= {
        "HOLDFAST_RUNTIME_DIR": f"{folder}-runtime",
        "HOLDFAST_KEEP_IN_MEMORY": "0",
        "HOLDFAST_PREEMPTION": "none",
    }
    try:
        return case, check_state(log, recording, case.state, folder, is_resumed=case.is_resumed)
    finally:
        shutil.rmtree(f"{folder}-runtime", ignore_errors=True)


def check_state(log: Log, recording: Recording, state: State, folder: Path, *, is_resumed: bool) -> list[str]:
    """Make a state in `folder`, check it, and remove it again; return its problems."""
    given = checks.Promises.read(promises(log, state.cut))
    found: list[str] = []
    try:
        for check in (checks.check, *([checks.resume] if is_resumed else [])):
            make(log, state, folder)
            found += check(folder, recording.workload, given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def make(log: Log, state: State, folder: Path) -> None:
    """Write the files of a state into a new folder; names of one file stay names of one file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = tree(log, state)
    for name in shape.directories:
        (folder / name).mkdir()
    first: dict[int, Path] = {}
    for name, number in shape.files.items():
        path = folder / name
        if number in first:
            path.hardlink_to(first[number])
        else:
            path.write_bytes(content(log, state, number))
            first[number] = path


def to_json(state: State) -> str:
    """Return a state as text that `from_json` reads."""
    return json.dumps(
        {"cut": state.cut, "kept": sorted(state.kept), "data": [list(one) for one in state.data]}
    )


def from_json(text: str) -> State:
    """Return the state that `to_json` wrote."""
    found = json.loads(text)
    return State(found["cut"], frozenset(found["kept"]), tuple((n, v) for n, v in found["data"]))
