"""Cost of watching for hangs: the pulse of a step in the trainer, and the looks of the keeper."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import machine
import psutil
import torch
from rich.console import Console
from rich.table import Table

import holdfast
from holdfast.checkpoint.keeper.pulse import Pulse

HERE = Path(__file__).resolve().parent
GOAL = 0.005
"""Goal of the processor time, as a share of that of the training."""
STEP_S = 0.01
"""Duration of a step, which the share is computed for. Longer ones cost less."""
BEATS = 200_000
console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)


def main() -> int:
    """Measure, and return 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="training that a keeper watches, per round"
    )
    parser.add_argument("--out", type=Path, help="default results/watching_<hardware>_<date>.json")
    options = parser.parse_args()
    beats_s = [_beat_s() for _ in range(options.rounds)]
    keepers = {
        action: [_keeper_share(action, options.seconds) for _ in range(options.rounds)]
        for action in ("off", "report")
    }
    return _report(options, beats_s, keepers)


def _beat_s() -> float:
    """Return the processor time of one beat, in seconds."""
    pulse = Pulse()
    pulse.share()
    pulse.begin(0)
    began = time.process_time()
    for step in range(BEATS):
        pulse.beat(step)
    took_s = time.process_time() - began
    pulse.close()
    return took_s / BEATS


def _keeper_share(action: str, seconds: float) -> float:
    """Return the processor time of a keeper, as a share of one processor, during training without saves."""
    state = {"weights": torch.zeros(10)}
    with (
        tempfile.TemporaryDirectory() as home,
        holdfast.Checkpointer(home, state, every=10**9, watches=[holdfast.Hang(action)], quiet=True) as ckpt,
    ):
        steps = ckpt.steps(int(seconds / STEP_S))
        next(steps)
        time.sleep(1.0)  # the keeper starts
        (keeper,) = psutil.Process(os.getpid()).children()
        before, began = sum(keeper.cpu_times()[:2]), time.perf_counter()
        for _ in steps:
            time.sleep(STEP_S)
        return (sum(keeper.cpu_times()[:2]) - before) / (time.perf_counter() - began)


def _report(options: argparse.Namespace, beats_s: list[float], keepers: dict[str, list[float]]) -> int:
    beat_s = statistics.median(beats_s)
    keeper = statistics.mean(keepers["report"]) - statistics.mean(keepers["off"])
    share = beat_s / STEP_S + max(keeper, 0.0)
    table = Table("", "processor time")
    table.add_row("a step, in the trainer", f"{1e6 * beat_s:.2f} us")
    table.add_row("the keeper, of one processor", f"{keeper:.3%}")
    table.add_row(f"both, for steps of {1e3 * STEP_S:.0f} ms", f"{share:.3%}")
    console.print(table)
    facts = machine.describe(HERE)
    path = options.out or machine.results_path("watching", facts)
    document = {"machine": facts, "step_s": STEP_S, "beats_s": beats_s, "keepers": keepers, "share": share}
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(f"goal: at most {GOAL:.1%}; wrote {path}")
    return int(share > GOAL)


if __name__ == "__main__":
    sys.exit(main())
