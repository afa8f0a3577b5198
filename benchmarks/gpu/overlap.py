"""Share of a save's copies from the device that runs beside kernels of the training, from a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parents[2] / "src")]

import torch  # noqa: E402 - the folders above are not packages
from states import build  # noqa: E402
from training import Loop  # noqa: E402

import holdfast  # noqa: E402

Span = tuple[float, float]
"""Start and end, in microseconds."""


def main() -> int:
    """Trace one save within a training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--state", default="gpt2-124m")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    subject = build(options.state, options.device)
    loop = Loop(subject)
    state: dict[str, Any] = {"model": subject.model, "optimizer": subject.optimizer}
    activities = [torch.profiler.ProfilerActivity.CPU]
    if options.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    loop.watch_last()
    with holdfast.Checkpointer(
        options.dir / "overlap", state, every=10**9, quiet=True, memory="32GiB"
    ) as checkpointer:
        checkpointer.save(1).wait_durable()  # the first save of a process makes and pins its memory
        loop.run(3)
        with torch.profiler.profile(activities=activities) as profile:
            span = loop.run(8, save=lambda: _start(checkpointer))
        checkpointer.wait()
    copies, kernels = _device_spans(profile)
    copied_us = sum(end - start for start, end in copies)
    found = {
        "blocked_s": span.blocked_s,
        "waited_s": sum(span.waits_s),
        "wall_s": span.wall_s,
        "num_copies": len(copies),
        "copied_s": copied_us / 1e6,
        "overlapped_share": shared_us(copies, kernels) / copied_us if copied_us else None,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


def _start(checkpointer: holdfast.Checkpointer) -> None:
    checkpointer.save(2)  # not waited for: the trace is of the steps beside it


def _device_spans(profile: torch.profiler.profile) -> tuple[list[Span], list[Span]]:
    """Return the copies from the device to the host, and everything else that ran on the device."""
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in profile.events() or ():
        if event.device_type.name != "CUDA":
            continue
        span = (event.time_range.start, event.time_range.end)
        if "DtoH" in event.name:
            copies.append(span)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    return copies, kernels


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
