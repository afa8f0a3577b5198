"""Saves of a state on a device beside a training: blocked, lost and durable; Holdfast or its peers."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amounts import Amounts
from descendants import adopt_orphans, end_descendants
from results import Run
from worker import in_short, measure_alone

OWN = "holdfast"
PEERS = ("torch-save", "dcp-staged", "torch-checkpointing-async")
DEPTH = 4
"""Raw writes at once: the fastest number where the disk is fast, so others are not tried."""
LEAST_S = 10.0
"""Time below which a measurement is not started."""
_FEW = Amounts(compared=1, loads=0, timed=1, depths=(DEPTH,), has_unowned=False)
AMOUNTS = {
    "gpt2-124m": Amounts(compared=3, loads=1, timed=3, depths=(DEPTH,), has_unowned=False),
    "gpt2-355m": _FEW,
    "gpt2-xl": Amounts(compared=0, loads=0, timed=1, depths=(DEPTH,), has_unowned=False),
    "tiny": Amounts(compared=2, loads=1, timed=1, depths=(DEPTH,), has_unowned=False),
}
"""Amounts of Holdfast's runs: benchmarks/README.md has the time that they take."""
PEER_AMOUNTS = Amounts(compared=2, loads=0, timed=1, depths=(DEPTH,), has_unowned=False)


def main() -> int:
    """Measure each state once; the exit status is 1 if a measurement of Holdfast failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--states", nargs="+", choices=AMOUNTS, default=["gpt2-124m"])
    parser.add_argument("--peers", action="store_true", help="measure the peers instead of Holdfast")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for all measurements")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    adopt_orphans()
    until_s = time.monotonic() + options.seconds
    names = PEERS if options.peers else (OWN,)
    runs: list[Run] = []
    for state, name in ((state, name) for state in options.states for name in names):
        amounts = PEER_AMOUNTS if options.peers else AMOUNTS[state]
        runs.append(_measure(name, state, amounts, options, until_s - time.monotonic()))
        print(in_short(runs[-1]), flush=True)
        _write(options.out, runs)
    return int(any("error" in run for run in runs if run["contestant"] == OWN))


def _measure(name: str, state: str, amounts: Amounts, options: argparse.Namespace, left_s: float) -> Run:
    if left_s < LEAST_S:
        return {"round": 0, "state": state, "contestant": name, "error": "left out: the time was over"}
    folder = options.dir / f"stalls-{state}"
    run = measure_alone(name, state, 0, folder, amounts=amounts, device=options.device, limit_s=left_s)
    end_descendants()  # a keeper, if the measurement was ended at its limit
    shutil.rmtree(folder, ignore_errors=True)
    return run


def _write(out: Path, runs: list[Run]) -> None:
    """Replace the file as a whole: this process may be killed at its limit."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    part.replace(out)


if __name__ == "__main__":
    sys.exit(main())
