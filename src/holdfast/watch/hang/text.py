"""Text about a hang for people: one plain block, and the full stacks; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.errors import printable
from holdfast.system.units import format_duration
from holdfast.watch.hang.capture import ProcessStacks
from holdfast.watch.hang.evidence import RankEvidence
from holdfast.watch.hang.grouping import PlaceGroup, group_ranks


def describe_hang(evidence: Sequence[RankEvidence], *, world_size: int, action: str, home: str) -> str:
    """Return the block that a training prints about its hang.

    Args:
        evidence: of the ranks that have some; at least one is late.
        world_size: number of ranks of the run.
        action: what is done about it.
        home: home of the run.
    """
    late = max((one for one in evidence if one.is_late), key=lambda one: one.stalled_s)
    doing = f"its phase {late.phase!r}" if late.phase else f"the step after {late.step}"
    lines = [
        f"THE TRAINING HANGS: rank {late.rank} has made no progress for {format_duration(late.stalled_s)} in "
        f"{doing} (limit {format_duration(late.limit_s)})."
    ]
    lines += [f"  {line}" for line in describe_groups(group_ranks(evidence))]
    missing = sorted(set(range(world_size)) - {one.rank for one in evidence})
    if missing:
        lines.append(f"  {_ranks(missing)}: no evidence, as {_their(missing)} own limit is not reached")
    lines.append(f"  {action} All stacks: holdfast stacks {home} --recorded")
    return printable("\n".join(lines))


def describe_groups(groups: Iterable[PlaceGroup]) -> list[str]:
    """Return a line for each group of ranks."""
    return [
        f"{'>' if one.is_odd else ' '} {_ranks(one.ranks)}: {one.place} (after step {one.step})"
        for one in groups
    ]


def summary(evidence: Sequence[RankEvidence]) -> str:
    """Return one line: the ranks that the others wait for, or else the first group, and their place."""
    groups = group_ranks(evidence)
    odd = [one for one in groups if one.is_odd] or groups[:1]
    return printable("; ".join(f"{_ranks(one.ranks)} {one.place}" for one in odd))


def format_stacks(evidence: RankEvidence) -> list[str]:
    """Return the lines of all stacks of a rank."""
    lines = [
        f"rank {evidence.rank} on {evidence.host}, after step {evidence.step}, no progress for "
        f"{format_duration(evidence.stalled_s)}"
    ]
    for name, process in [("trainer", evidence.process), *(("worker", one) for one in evidence.workers)]:
        lines.append(f"  {name}, process {process.pid}, {process.state}")
        lines += _threads(process, evidence.thread)
    return [printable(line) for line in lines]


def _threads(process: ProcessStacks, ident: int) -> list[str]:
    lines: list[str] = []
    for thread in sorted(process.threads, key=lambda one: one.ident != ident):
        lines.append(f"    thread {thread.ident:#x}{', which trains' if thread.ident == ident else ''}")
        lines += [f"      {one.file}:{one.line} {one.function}" for one in thread.frames]
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as "ranks 0-6, 8"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _their(ranks: Sequence[int]) -> str:
    return "its" if len(ranks) == 1 else "their"
