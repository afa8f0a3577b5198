"""Parsers of published traces, and Llama 3's table of causes; pure."""

from __future__ import annotations

import csv
import io
import json
import random

from .schedule import Interruption, Trace, Trouble, from_counts

SPOT = (Trouble.NOTICE, Trouble.NODE)
"""Losses of spot machines, in turn: clouds send a notice, and do not promise that it arrives."""
GROUP = 4
"""Nodes of a replayed job that stands for a larger one."""

LLAMA_MTBF_H = 54 * 24 / 419
LLAMA_CAUSES = (
    # cause, unexpected interruptions of 54 days, replayed as
    ("faulty GPU", 148, Trouble.NODE),
    ("GPU HBM3 memory", 72, Trouble.NODE),
    ("software bug", 54, Trouble.RANK),
    ("network switch or cable", 35, Trouble.HANG),
    ("host maintenance", 32, Trouble.NOTICE),
    ("GPU SRAM memory", 19, Trouble.RANK),
    ("GPU system processor", 17, Trouble.NODE),
    ("NIC", 7, Trouble.HANG),
    ("NCCL watchdog timeout", 7, Trouble.HANG),
    ("silent data corruption", 6, Trouble.DAMAGE),
    ("GPU thermal interface and sensor", 6, Trouble.RANK),
    ("SSD", 3, Trouble.DISK),
    ("power supply", 3, Trouble.NODE),
    ("server chassis", 2, Trouble.NODE),
    ("IO expansion board", 2, Trouble.NODE),
    ("dependency", 2, Trouble.RANK),
    ("CPU", 2, Trouble.NODE),
    ("system memory", 2, Trouble.NODE),
)
"""Causes of Llama 3 405B's interruptions. Source: The Llama 3 Herd of Models, arXiv 2407.21783, table 5."""


def parse_skypilot(text: str, name: str) -> Trace:
    """Return a trace of SkyPilot's spot traces, for a job that needs all of its nodes."""
    document = json.loads(text)
    counts, gap_h = document["data"], document["metadata"]["gap_seconds"] / 3600
    points = [(position * gap_h, int(count)) for position, count in enumerate(counts)]
    points.append((len(counts) * gap_h, int(counts[-1])))
    needed = max(count for _, count in points)
    return from_counts(name, min(needed, GROUP), points, needed=needed, troubles=SPOT)


def parse_bamboo(text: str, name: str, *, unit_s: float) -> Trace:
    """Return a trace of Bamboo (`time,nodes`), for a job that needs half of the most nodes."""
    points = [(float(at) * unit_s / 3600, int(count)) for at, count in csv.reader(io.StringIO(text))]
    needed = max(count for _, count in points) // 2
    return from_counts(name, GROUP, points, needed=needed, troubles=SPOT)


def parse_parcae(text: str, name: str) -> Trace:
    """Return a trace of Parcae (a JSON list per minute), for a job that needs half of the most nodes."""
    points, count, end_h = [], 0, 0.0
    for line in text.splitlines():
        at_ms, kind, details = json.loads(line)
        count += {"add": 1, "remove": -1}.get(kind, 0) * len(details["nodes"])
        end_h = (at_ms + details["duration"]) / 3.6e6
        points.append((at_ms / 3.6e6, count))
    points.append((end_h, count))
    needed = max(count for _, count in points) // 2
    return from_counts(name, GROUP, points, needed=needed, troubles=SPOT)


def parse_infinitehbd(text: str, name: str) -> Trace:
    """Return InfiniteHBD's faults, for a job on all of its servers, which has spare ones.

    A fault interrupts the job, and a spare server replaces the faulty one at once.
    """
    events = json.loads(text)
    found = {  # those of one moment are one interruption
        float(event["event_time"]) * 24: _trouble(event["fault_type"])
        for event in events
        if event["event_type"] == "fault_start"
    }
    ordered = tuple(Interruption(at_h, found[at_h]) for at_h in sorted(found))
    return Trace(name, GROUP, ordered, max(float(event["event_time"]) for event in events) * 24)


def _trouble(fault: dict[str, str]) -> Trouble:
    if fault["Class"] == "File System":
        return Trouble.DISK
    if fault["Class"] in ("NIC", "Parameter Plane Cable"):
        return Trouble.HANG
    return Trouble.RANK if fault["Level"] == "Software Failure" else Trouble.NODE


def sample_llama(seed: int, count: int) -> Trace:
    """Return interruptions at Llama 3's rate, with its causes. A spare node replaces a lost one at once."""
    choice = random.Random(seed)
    weights, at_h, found = [number for _, number, _ in LLAMA_CAUSES], 0.0, []
    for _ in range(count):
        at_h += choice.expovariate(1 / LLAMA_MTBF_H)
        found.append(Interruption(at_h, choice.choices(LLAMA_CAUSES, weights)[0][2]))
    return Trace("Llama 3 causes", GROUP, tuple(found), at_h + choice.expovariate(1 / LLAMA_MTBF_H))
