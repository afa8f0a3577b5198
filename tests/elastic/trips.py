"""Code of a rank in the tests of layouts: resume from the newest checkpoint, or restore every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import holdfast
from elastic.runs import Run
from layouts import same


def go_on(rank: int, home: Path, step: int, layout: str) -> None:
    """Restore the step before, compare it, train, gather a full copy, and save it as `step`."""
    run = Run(layout, seed=step, is_reversed=step % 2 == 1)
    with checkpointer(home, run.state) as ckpt:
        restored = ckpt.restore()
        assert restored == (step - 1 or None), f"{layout} restored step {restored}, not {step - 1}"
        if step > 1:
            check(run, home, step - 1, rank, f"{layout} as step {step}")
        run.state["epoch"] = step
        if step > 1:  # the first one is saved before any step of the optimizer
            run.train()
        copy = run.full()
        ckpt.save(step)
        if step > 1:
            run.train()  # beside the copy
        ckpt.wait()
    if rank == 0:
        torch.save(copy, home.with_name(f"copy-{step}.pt"))


def restore_each(rank: int, home: Path, layout: str, steps: list[int]) -> None:
    """Restore each step into a layout, also over what has been trained, and compare."""
    run = Run(layout, seed=100, is_reversed=True)
    with checkpointer(home, run.state) as ckpt:
        for i, step in enumerate(steps):
            if i % 3 == 1:
                run.train()
            assert ckpt.restore(step) == step
            check(run, home, step, rank, layout)


def checkpointer(home: Path, state: dict[str, Any], **options: Any) -> holdfast.Checkpointer:
    """One that keeps everything."""
    kept = {"keep": None, "memory": "1GiB", "watches": [holdfast.Preemption(signals=False)], **options}
    return holdfast.Checkpointer(home, state, **kept)


def check(run: Run, home: Path, step: int, rank: int, where: str) -> None:
    """The state is, bit for bit, the copy that was gathered before `step` was saved."""
    found = run.full()
    copy = torch.load(home.with_name(f"copy-{step}.pt"))
    assert found["tensors"].keys() == copy["tensors"].keys(), (where, step)
    wrong = [name for name, one in copy["tensors"].items() if not same(found["tensors"][name], one)]
    assert not wrong, f"{where}, restored from step {step}, differs in {wrong}"
    assert found["epoch"] == copy["epoch"]
    assert same(run.own, copy["own"][rank % len(copy["own"])]), (where, step)
    rates = {group["weight_decay"]: group["lr"] for group in run.optimizer.param_groups if group["params"]}
    assert rates == {0.1: 0.01, 0.01: 0.5}, (where, step)
