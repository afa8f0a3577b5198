"""Phases of ckpt-chaos for trainings of this folder: reference, train until the armed save, and resume."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

SAVE_EVERY = 5
ARMED_STEP = 10
"""Step whose save is killed; the checkpoint of step 5 exists then."""
LAST_STEP = 20


class Training(Protocol):
    """Training of one rank, with the saves of its trainer."""

    step: int

    def load(self) -> None:
        """Load the newest checkpoint, and set the step."""

    def train_step(self) -> None:
        """Train one step, and count it."""

    def save(self) -> None:
        """Save the present step."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole weights."""
        ...

    def close(self) -> None:
        """Wait for saves."""


def run_phase(make: Callable[[Path], Training]) -> None:
    """Run the phase that the command line names, as a rank of a gloo group.

    Args:
        make: makes the training for an output folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("phase", choices=["reference", "train", "resume"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    if args.phase == "resume":
        _resume(make, args.out, rank)
    else:
        is_armed = args.phase == "train"
        training = make(args.out)
        _train(training, ARMED_STEP if is_armed else LAST_STEP, armed_rank=rank if is_armed else None)
        if not is_armed:  # else this file would be one more crash point
            torch.save(training.weights(), args.out / f"final_rank{rank}.pt")
        training.close()


def _train(training: Training, last: int, *, armed_rank: int | None = None) -> None:
    from ckpt_chaos.targets.common import arm_from_env  # pyright: ignore[reportMissingImports] - not a dependency

    while training.step < last:
        training.train_step()
        if training.step % SAVE_EVERY == 0:
            if armed_rank is not None and training.step == ARMED_STEP:
                arm_from_env(armed_rank)
            training.save()


def _resume(make: Callable[[Path], Training], out: Path, rank: int) -> None:
    outcome: dict[str, object] = {"raised": None, "message": "", "resumed_from_step": None}
    try:
        training = make(out)
        training.load()
        outcome["resumed_from_step"] = training.step
        _train(training, LAST_STEP)
        torch.save(training.weights(), out / f"final_rank{rank}.pt")
        training.close()
    except BaseException as error:  # noqa: BLE001 - a result; CheckpointException of DCP is a BaseException
        outcome |= {"raised": type(error).__name__, "message": str(error)[:200]}
    (out / f"outcome_rank{rank}.json").write_text(json.dumps(outcome))
    if outcome["raised"]:
        sys.exit(3)


def is_stock() -> bool:
    """Return True if the training is to save with its trainer's own class."""
    return os.environ["HOLDFAST_CHAOS_DOOR"] == "stock"
