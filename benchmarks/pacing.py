"""Cost of sampling a training thread, which the comparison of ranks needs."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path

import torch

from holdfast.checkpoint.keeper.pulse import Pulse
from holdfast.watch.pace.sampler import ActivitySampler

GOAL = 0.005
"""Goal of the processor time, as a share of one processor."""
ROUNDS, ROUND_S, WINDOW_S = 3, 10.0, 15.0


def main() -> int:
    """Measure, and return 1 if the goal is missed."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    pulse = Pulse()
    pulse.share()
    sampler, shares, step = ActivitySampler(pulse, WINDOW_S), list[float](), 0
    pulse.begin(0)
    sampler.start()
    for _ in range(ROUNDS):
        before_s, began = _sampler_s(), time.perf_counter()
        while time.perf_counter() - began < ROUND_S:
            model(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            pulse.beat(step)
        shares.append((_sampler_s() - before_s) / (time.perf_counter() - began))
    sampler.close()
    pulse.close()
    share = statistics.median(shares)
    print(f"samples use {share:.3%} of a processor (goal: at most {GOAL:.1%})")
    return int(share > GOAL)


def _sampler_s() -> float:
    """Return the processor time of the thread that samples, in seconds."""
    thread = next(one for one in threading.enumerate() if one.name == "holdfast-pace")
    return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    sys.exit(main())
