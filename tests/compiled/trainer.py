"""A training that compiles, as a process: python trainer.py HOME STEPS; says as JSON what it did."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.system.process_exit import hard_exit


def cpu_s() -> float:
    """Processor time of this process and of its children that have ended."""
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Train the steps that are left."""
    home, steps = sys.argv[1], int(sys.argv[2])
    cache = json.loads(os.environ.get("TRAINER_CACHE", "{}"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(layer, torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled: Any = torch.compile(model)
    inputs = torch.ones(4, 8)
    began_s = cpu_s()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(
            home,
            {"model": model, "optimizer": optimizer},
            every=1,
            watches=[holdfast.Preemption(signals=False), holdfast.CompileCache(**cache)],
        ) as checkpointer:
            for _ in checkpointer.steps(steps):
                compiled(inputs).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    told = {
        "cpu_s": cpu_s() - began_s,
        "warnings": [str(one.message) for one in caught if issubclass(one.category, holdfast.WatchWarning)],
        "weights": layer.weight.sum().item(),
        "directory": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()
        hard_exit(0)


if __name__ == "__main__":
    main()
