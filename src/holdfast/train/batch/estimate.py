"""Runs a training step on tensors without bytes, to foretell its peak memory at any batch size."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from holdfast.errors import Unsupported
from holdfast.train.batch.holdings import Holdings, count_bytes
from holdfast.train.batch.sample import tensors_of


def estimate_peak(
    step: Callable[[Any], object], make: Callable[[int], Any], holdings: Holdings, size: int
) -> int:
    """Bytes at the peak of a step on a batch of `size`, without computing or allocating anything.

    For the while, the modules' tensors and the optimizers' parameters give way to fake ones, on which two
    steps are run. What the step changes besides (schedulers, its own counters) it does change.

    Raises:
        Unsupported: the step cannot be followed so: it reads a value of a tensor (`loss.item()`), talks to
            other ranks, or uses operators without shapes. The message has the reason.

    Source: torch.distributed._tools.MemTracker; equal to the profiler's real peak on CPU for GPT-2, BERT, T5.
    """
    devices = holdings.devices
    if holdings.has_collectives or len(devices) != 1:
        raise Unsupported(f"the step talks to other ranks, or lies on several devices ({len(devices)})")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with _eager(), _quiet(), _fakes_for(holdings, mode), mode:
            batch = make(size)
            tracker = MemTracker()
            tracker.track_external(*holdings.modules, *holdings.optimizers, *tensors_of(batch))
            with tracker:
                for _ in range(2):  # the second has the optimizer's state
                    tracker.reset_mod_stats()
                    step(batch)
            snapshot = tracker.get_tracker_snapshot("peak")
    except Exception as error:
        text = str(error).strip().splitlines()
        raise Unsupported(f"{type(error).__name__}: {text[0] if text else ''}") from error
    (device,) = devices
    peak = sum(one["Total"] for place, one in snapshot.items() if place == device)
    return peak + count_bytes(holdings.tensors, device)


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled modules run as they are written: a compiler would compile for tensors without bytes."""
    if hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs of operators that it cannot follow is in the error that it raises."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses", "torch._subclasses.fake_tensor")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


@contextlib.contextmanager
def _fakes_for(holdings: Holdings, mode: FakeTensorMode) -> Iterator[None]:
    """Let fake tensors stand where parameters, buffers and the optimizers' parameters do."""
    fakes: dict[int, torch.Tensor] = {}
    undo: list[Callable[[], object]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
        return fakes[id(tensor)]

    try:
        for slots, name, tensor in _slots(holdings):
            undo.append(partial(slots.__setitem__, name, tensor))
            slots[name] = fake(tensor)
        for optimizer in holdings.optimizers:
            _swap_parameters(optimizer, fake, undo)
        yield
    finally:
        for one in undo:
            one()


def _slots(holdings: Holdings) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Where modules keep their tensors: the mapping, the name in it, the tensor."""
    return [
        (slots, name, tensor)
        for module in holdings.modules
        for part in module.modules()
        for slots in (part._parameters, part._buffers)
        for name, tensor in slots.items()
        if tensor is not None
    ]


def _swap_parameters(
    optimizer: torch.optim.Optimizer,
    fake: Callable[[torch.Tensor], torch.Tensor],
    undo: list[Callable[[], object]],
) -> None:
    for group in optimizer.param_groups:
        undo.append(partial(group.__setitem__, "params", group["params"]))
        group["params"] = [fake(one) for one in group["params"]]
    undo.append(partial(setattr, optimizer, "state", optimizer.state))
    optimizer.state = defaultdict(dict)
