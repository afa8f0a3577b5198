"""Campaign of ckpt-chaos (PyPI) with Hugging Face's Trainer: kills at every file event of a save.

`python -m campaigns.chaos_trainer --with holdfast --ranks 2` runs ckpt-chaos's own target `hf_trainer` with
one line added: `attach(trainer)`. `--with stock` runs it as it is. For the verdict LOST_WORK a checkpoint of
Holdfast counts as complete if `holdfast.open` finds it in the home before the resume begins. Needs `pip
install ckpt-chaos` and the extra `transformers`.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = "hf_trainer_holdfast"


def run_target() -> None:
    """Run one phase of the target, with the Trainer attached to a home in its output directory."""
    from ckpt_chaos.targets import hf_trainer  # pyright: ignore[reportMissingImports] - not a dependency

    from holdfast.adapters.transformers import attach

    make: Any = hf_trainer.make_trainer
    hf_trainer.make_trainer = lambda out, hooks: attach(make(out, hooks))
    hf_trainer.main()


def newest_complete(out: Path, healthy: object) -> int:
    """Return the newest complete step of the home of a run; 0 without one."""
    import holdfast

    try:
        return holdfast.open(out / "holdfast").step
    except holdfast.NotFound:
        return 0


def main() -> None:
    """Run the campaign and print the table of ckpt-chaos."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="door", choices=("stock", "holdfast"), default="holdfast")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("ckpt-chaos-runs"))
    args = parser.parse_args()
    from ckpt_chaos import runner  # pyright: ignore[reportMissingImports] - not a dependency

    os.environ["CKPT_CHAOS_PREPEND_PYTHONPATH"] = str(ROOT)
    runner.TARGETS[TARGET] = "campaigns.chaos_trainer"
    runner.NEWEST[TARGET] = newest_complete
    target = TARGET if args.door == "holdfast" else "hf_trainer"
    rows = runner.run_matrix(args.work / f"{args.door}-{args.ranks}", args.jobs, args.ranks, target)
    runner.print_table(rows)
    counts = collections.Counter(row.verdict for row in rows)
    sys.exit(0 if set(counts) == {"PASS"} else 1)


if __name__ == "__main__":
    is_phase = len(sys.argv) > 1 and sys.argv[1] in ("reference", "train", "resume")
    run_target() if is_phase else main()
