"""Campaign of ckpt-chaos (PyPI) with a trainer: kills at every file event of a save.

`python -m campaigns.chaos_trainer --with holdfast --ranks 2` runs ckpt-chaos's own target `hf_trainer` with
one line added: `attach(trainer)`. `--with stock` runs it as it is. `--trainer deepspeed` and `--trainer
torchtitan`, which need two ranks, run the targets of this folder. For the verdict LOST_WORK a checkpoint of
Holdfast counts as complete if `holdfast.open` finds it in the home before the resume begins. Needs `pip
install ckpt-chaos` and the extra of the trainer.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = "hf_trainer_holdfast"
HOMES = {"deepspeed": "ckpt/holdfast", "torchtitan": "checkpoint"}
"""Homes in the output folders of this folder's targets."""


def run_target() -> None:
    """Run one phase of the target, with the Trainer attached to a home in its output directory."""
    from ckpt_chaos.targets import hf_trainer  # pyright: ignore[reportMissingImports] - not a dependency

    from holdfast.adapters.transformers import attach

    make: Any = hf_trainer.make_trainer
    hf_trainer.make_trainer = lambda out, hooks: attach(make(out, hooks))
    hf_trainer.main()


class _NewestInHome:
    """Search for the newest complete step of the home in an output folder; 0 without one."""

    def __init__(self, home: str) -> None:
        self._home = home

    def __call__(self, out: Path, healthy: object) -> int:
        import holdfast

        try:
            return holdfast.open(out / self._home).step
        except holdfast.NotFound:
            return 0


def _register(runner: Any, trainer: str, door: str) -> str:
    """Register the target of a trainer with ckpt-chaos, and return its name."""
    if trainer == "transformers":
        runner.TARGETS[TARGET] = "campaigns.chaos_trainer"
        runner.NEWEST[TARGET] = _NewestInHome("holdfast")
        return TARGET if door == "holdfast" else "hf_trainer"
    name = f"{trainer}_{door}"
    module = f"campaigns.chaos_{trainer}"
    stock: Any = importlib.import_module(module).newest_stock
    runner.TARGETS[name] = module
    runner.NEWEST[name] = stock if door == "stock" else _NewestInHome(HOMES[trainer])
    return name


def main() -> None:
    """Run the campaign and print the table of ckpt-chaos."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="door", choices=("stock", "holdfast"), default="holdfast")
    parser.add_argument("--trainer", choices=("transformers", *HOMES), default="transformers")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("ckpt-chaos-runs"))
    args = parser.parse_args()
    from ckpt_chaos import runner  # pyright: ignore[reportMissingImports] - not a dependency

    os.environ["CKPT_CHAOS_PREPEND_PYTHONPATH"] = str(ROOT)
    os.environ["HOLDFAST_CHAOS_DOOR"] = args.door
    target = _register(runner, args.trainer, args.door)
    work = args.work / f"{args.trainer}-{args.door}-{args.ranks}"
    rows = runner.run_matrix(work, args.jobs, args.ranks, target)
    runner.print_table(rows)
    counts = collections.Counter(row.verdict for row in rows)
    sys.exit(0 if set(counts) == {"PASS"} else 1)


if __name__ == "__main__":
    is_phase = len(sys.argv) > 1 and sys.argv[1] in ("reference", "train", "resume")
    run_target() if is_phase else main()
