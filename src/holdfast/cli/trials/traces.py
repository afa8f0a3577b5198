"""Traces of trials: batches, generators and metrics by step, and the first difference of two traces."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Trace:
    """Trace of all ranks of one trial."""

    batches: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """Completed steps and the digest of each batch, in order, by rank."""
    generators: dict[str, dict[int, dict[str, str]]] = field(default_factory=lambda: defaultdict(dict))
    records: dict[str, dict[int, dict[str, str]]] = field(default_factory=lambda: defaultdict(dict))
    doubts: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    restored: int | None = None
    was_killed: bool = False
    has_files: bool = False


def read_trace(folder: Path) -> Trace:
    """Read the trace that the processes of a trial have written into a folder."""
    trace = Trace()
    for path in sorted(folder.glob("*.jsonl")):
        rank = path.name.split("-")[0]
        trace.has_files = True
        for line in path.read_text(errors="replace").splitlines():
            try:
                step, kind, value = json.loads(line)
            except ValueError:  # the last line of a killed process
                continue
            _add(trace, rank, step, kind, value)
    return trace


def _add(trace: Trace, rank: str, step: int, kind: str, value: Any) -> None:
    if kind == "batch":
        trace.batches[rank].append((step, value))
    elif kind == "generators":
        trace.generators[rank][step] = value
    elif kind == "recorded":
        trace.records[rank].setdefault(step, {}).update(value)
    elif kind == "doubts":
        trace.doubts += [one for one in value if one not in trace.doubts]
    elif kind == "saved" and rank == "0":
        trace.saved.append(value)
    elif kind == "restored":
        trace.restored = value
    elif kind == "killed":
        trace.was_killed = True


@dataclass(frozen=True, slots=True)
class Divergence:
    """First differences of two traces. A step is None where the traces agree."""

    batch_step: int | None
    generator_step: int | None
    generators: tuple[str, ...]
    record_step: int | None
    records: tuple[str, ...]


def unseeded(one: Trace, other: Trace) -> frozenset[str]:
    """Return the names of the generators that differ between two uninterrupted runs."""
    pairs = [(steps, other.generators.get(rank, {})) for rank, steps in one.generators.items()]
    return frozenset(
        name
        for steps, others in pairs
        for step, states in steps.items()
        for name, state in states.items()
        if others.get(step, states).get(name) != state
    )


def find_divergence(
    whole: Trace, other: Trace, after: int, *, unseeded: frozenset[str] = frozenset()
) -> Divergence:
    """Return the first differences of two traces after a step.

    Args:
        whole: trace of the uninterrupted run.
        other: trace of the resumed run.
        after: step from which the run was resumed.
        unseeded: generators to leave out.
    """
    batch_step: int | None = None
    for rank, batches in whole.batches.items():
        one = [pair for pair in batches if pair[0] >= after]
        two = [pair for pair in other.batches.get(rank, []) if pair[0] >= after]
        for (step, digest), pair in zip(one, two, strict=False):
            if digest != pair[1]:
                batch_step = step + 1 if batch_step is None else min(batch_step, step + 1)
                break
    generator_step, generators = _first(whole.generators, other.generators, after, unseeded)
    record_step, records = _first(whole.records, other.records, after)
    return Divergence(batch_step, generator_step, generators, record_step, records)


def _first(
    whole: dict[str, dict[int, dict[str, str]]],
    other: dict[str, dict[int, dict[str, str]]],
    after: int,
    skipped: frozenset[str] = frozenset(),
) -> tuple[int | None, tuple[str, ...]]:
    for rank, steps in whole.items():
        for step in sorted(steps):
            values, others = steps[step], other.get(rank, {}).get(step)
            if step <= after or others is None:
                continue
            names = [name for name in values if name not in skipped and values[name] != others.get(name)]
            if names:
                return step, tuple(names)
    return None, ()
