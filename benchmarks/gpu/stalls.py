"""Saves of a state on a device beside a training: blocked, lost and durable, for Holdfast and its peers."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worker import in_short, measure_alone

PEERS = ("torch-save", "dcp-staged", "torch-checkpointing-async")
LARGE = "gpt2-xl"
"""State for which only Holdfast and the limits are measured: the peers take minutes for it."""


def main() -> int:
    """Measure each state once; the exit status is 1 if a measurement of Holdfast failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--states", nargs="+", default=["gpt2-124m"])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = []
    for state in options.states:
        is_large = state == LARGE
        for name in ("limits", "holdfast", *(() if is_large else PEERS)):
            folder = options.dir / f"stalls-{state}"
            loads = 1 if name == "holdfast" and not is_large else 0
            times = 2 if is_large else 6
            runs.append(
                measure_alone(name, state, 0, folder, compared=times, device=options.device, loads=loads)
            )
            shutil.rmtree(folder, ignore_errors=True)
            print(in_short(runs[-1]), flush=True)
            options.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    return int(any("error" in run for run in runs if run["contestant"] == "holdfast"))


if __name__ == "__main__":
    sys.exit(main())
