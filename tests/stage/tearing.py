"""Training on gloo ranks, with saves torn on some of them; it runs in the processes of the ranks."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from holdfast.errors import HoldfastError, SaveWarning
from stage.training import (
    WAIT_S,
    CopyGate,
    compute_gradients,
    keeper_of,
    make_checkpointer,
    make_training,
    snapshot,
)

Tears = Mapping[int, Collection[int]]  # by step: the ranks whose copies of it are torn


def make_gate() -> CopyGate:
    """An open gate in front of the background copies of this process."""
    gate = CopyGate(pytest.MonkeyPatch())
    gate.opened.set()
    return gate


def train(
    rank: int, home: Path, tears: Tears, total: int, options: dict[str, Any], kills: Collection[int] = ()
) -> dict[str, Any]:
    """Train to `total`, save at the steps of `tears` and when asked to, and write after these.

    The first time to parameters, then to momenta. The ranks that are to be torn write while they copy, the
    others when their copy is complete: so all hold the same.

    Returns:
        `first`: the first step made. `expected`: the tensors at each save. `failures`: the saves that failed,
        and why. `told`: the warnings. `ending`: the error of waiting for all saves. Rank 0 kills its keeper
        during the saves of the steps in `kills`.
    """
    gate, state = make_gate(), make_training(momentum=0.9)
    net = DistributedDataParallel(state["model"])
    expected: dict[int, dict[str, Any]] = {}
    saves = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", SaveWarning)
        ckpt = make_checkpointer(home, state, every=100, keep=None, **options)
        first = (ckpt.restore() or 0) + 1
        for step in range(first, total + 1):
            torch.manual_seed(step)
            compute_gradients(net)
            state["optimizer"].step()
            if ckpt.should_save(step) or step in tears:
                expected[step] = {name: one.numpy() for name, one in snapshot(state).items()}
                gate.opened.clear()
                saves.append(ckpt.save(step))
                if rank == 0 and step in kills:
                    os.kill(keeper_of(ckpt).pid, signal.SIGKILL)
                if step in tears:
                    if rank not in tears[step]:
                        gate.opened.set()
                        saves[-1].wait_staged(WAIT_S)
                    _write(state["optimizer"], to_momenta=step > min(tears))
                gate.opened.set()
        failures = {save.step: error for save in saves if (error := _error_of(save.wait_durable))}
        ending = _error_of(lambda _: ckpt.close())
    return {
        "first": first,
        "expected": expected,
        "failures": failures,
        "told": [str(one.message) for one in told],
        "ending": ending,
    }


def save_twice(rank: int, home: Path) -> list[str]:
    """Save a step that is torn on rank 0, then the same step again, then a later one; the errors."""
    gate, state = make_gate(), make_training(momentum=0.9)
    torch.manual_seed(0)
    compute_gradients(state["model"])
    state["optimizer"].step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        with make_checkpointer(home, state, keep=None) as ckpt:
            if rank == 0:
                gate.opened.clear()
            first = ckpt.save(1)
            if rank != 0:
                first.wait_staged(WAIT_S)
            _write(state["optimizer"], to_momenta=False)
            gate.opened.set()
            errors = [_error_of(first.wait_durable), _error_of(lambda _: ckpt.save(1))]
            return [*errors, _error_of(ckpt.save(2).wait_durable)]


def _write(optimizer: SGD, *, to_momenta: bool) -> None:
    for parameter, slots in optimizer.state.items():
        written = slots["momentum_buffer"] if to_momenta else parameter
        written.data.mul_(0.5)


def _error_of(wait: Callable[[float], object]) -> str:
    """Return the error that ends a wait; a wait that takes longer than it should is one."""
    try:
        wait(WAIT_S)
    except HoldfastError as error:
        return str(error)
    return ""
