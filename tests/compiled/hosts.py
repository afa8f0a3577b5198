"""Ranks with a cache directory each, as two hosts have: torchrun --nproc-per-node 2 hosts.py HOME FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch._inductor.codecache  # as if something had been compiled
import torch.distributed as dist

import holdfast
from holdfast.system.process_exit import hard_exit


def main() -> None:
    """Bring what home has, add a file of this rank's own, and save once."""
    home, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    directory = folder / f"host-{rank}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    dist.init_process_group("gloo")
    state = {"x": torch.zeros(3)}
    with holdfast.Checkpointer(
        home,
        state,
        watches=[holdfast.Preemption(signals=False), holdfast.CompileCache(trust=True)],
    ) as checkpointer:
        step = checkpointer.restore() or 0
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"made-{rank}-{step}").write_text("code")
        (directory / f"common-{step}").write_text("code")
        checkpointer.save(step + 1)
    dist.destroy_process_group()
    hard_exit(0)


if __name__ == "__main__":
    main()
