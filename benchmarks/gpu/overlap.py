"""A save within a training on a device: its trace, and its call behind queued work."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parents[2] / "src")]

import torch  # noqa: E402 - the folders above are not packages
from states import Subject, build  # noqa: E402
from training import Loop  # noqa: E402

import holdfast  # noqa: E402

Span = tuple[float, float]
"""Start and end, in microseconds."""
NUM_QUEUED_SAVES, NUM_QUEUED_STEPS = 3, 3


def main() -> int:
    """Trace one save within a training, and time some behind queued steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--state", default="gpt2-124m")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = _measure(build(options.state, options.device), Path(folder) / "home")
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


def _measure(subject: Subject, home: Path) -> dict[str, Any]:
    loop = Loop(subject)
    state: dict[str, Any] = {"model": subject.model, "optimizer": subject.optimizer}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if subject.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    loop.watch_last()
    with holdfast.Checkpointer(home, state, every=10**9, quiet=True, memory="32GiB") as checkpointer:
        checkpointer.save(1).wait_durable()  # the first save of a process makes and pins its memory
        loop.run(3)
        with torch.profiler.profile(activities=activities) as profile:
            span = loop.run(8, save=lambda: _start(checkpointer))
        checkpointer.wait()
        queued = [_time_behind_steps(checkpointer, loop, 3 + number) for number in range(NUM_QUEUED_SAVES)]
    behind = [one for one in queued if one is not None]
    return {
        "blocked_s": span.blocked_s,
        "waited_s": sum(span.waits_s),
        "wall_s": span.wall_s,
        **summarize_trace(profile.events() or ()),
        "queued_blocked_s": statistics.median(behind) if len(behind) == len(queued) else None,
    }


def _start(checkpointer: holdfast.Checkpointer) -> None:
    checkpointer.save(2)  # not waited for: the trace is of the steps beside it


def _time_behind_steps(checkpointer: holdfast.Checkpointer, loop: Loop, step: int) -> float | None:
    """Return the seconds of a save's call while the device is at work; None if it is not."""
    is_at_work = loop.queue(NUM_QUEUED_STEPS)
    began_s = time.perf_counter()
    save = checkpointer.save(step)
    blocked_s = time.perf_counter() - began_s
    save.wait_durable()
    return blocked_s if is_at_work else None


def summarize_trace(events: Iterable[Any]) -> dict[str, Any]:
    """Return number and seconds of the copies to the host, and shares that were pinned and beside kernels."""
    copies: list[Span] = []
    kernels: list[Span] = []
    pinned_us = 0.0
    for event in events:
        # an annotation of the host is on the device's timeline too, as long as the kernels within it
        if event.device_type.name != "CUDA" or getattr(event, "is_user_annotation", False):
            continue
        span = (event.time_range.start, event.time_range.end)
        if "DtoH" in event.name:
            copies.append(span)
            pinned_us += (span[1] - span[0]) * ("Pinned" in event.name)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    copied_us = sum(end - start for start, end in copies)
    return {
        "num_copies": len(copies),
        "copied_s": copied_us / 1e6,
        "pinned_share": pinned_us / copied_us if copied_us else None,
        "overlapped_share": shared_us(copies, kernels) / copied_us if copied_us else None,
    }


def shared_us(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """Return the time of some spans during which one of the others runs too."""
    merged: list[list[float]] = []
    for start, end in sorted(others):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(max(0.0, min(end, two) - max(start, one)) for start, end in spans for one, two in merged)


if __name__ == "__main__":
    sys.exit(main())
