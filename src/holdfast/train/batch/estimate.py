"""Peak memory of a training step at any batch size, estimated with fake tensors."""

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
from holdfast.train.batch.sample import tensors_of
from holdfast.train.batch.training_state import TrainingState, count_bytes


def estimate_peak(
    step: Callable[[Any], object], make: Callable[[int], Any], training: TrainingState, size: int
) -> int:
    """Return the peak bytes of a step on a batch of `size`, without computing.

    Two steps run on fake tensors, which replace the modules' tensors and the optimizers' parameters for that
    time. Other effects of the step, such as scheduler steps and counters, are real.

    Raises:
        Unsupported: the step cannot run on fake tensors: it reads a value (`loss.item()`), communicates with
            other ranks, or uses operators without shape rules. The message gives the reason.

    Source: torch.distributed._tools.MemTracker; equal to the profiler's real peak on CPU for GPT-2, BERT, T5.
    """
    devices = training.devices
    if training.has_collectives or len(devices) != 1:
        raise Unsupported(f"the step communicates with other ranks or uses {len(devices)} devices")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        # Compiling for fake tensors would be wasted.
        with torch.compiler.set_stance("force_eager"), _quiet(), _fakes_for(training, mode), mode:
            batch = make(size)
            tracker = MemTracker()
            tracker.track_external(*training.modules, *training.optimizers, *tensors_of(batch))
            with tracker:
                for _ in range(2):  # the second includes the optimizer's state
                    tracker.reset_mod_stats()
                    step(batch)
            snapshot = tracker.get_tracker_snapshot("peak")
    except Exception as error:
        text = str(error).strip().splitlines()
        raise Unsupported(f"{type(error).__name__}: {text[0] if text else ''}") from error
    (device,) = devices
    peak = sum(one["Total"] for place, one in snapshot.items() if place == device)
    return peak + count_bytes(training.tensors, device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of unsupported operators. The exception repeats it."""
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
def _fakes_for(training: TrainingState, mode: FakeTensorMode) -> Iterator[None]:
    """Replace parameters, buffers and the optimizers' parameters by fake tensors during the block."""
    fakes: dict[int, torch.Tensor] = {}
    undo: list[Callable[[], object]] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
        return fakes[id(tensor)]

    try:
        for slots, name, tensor in _slots(training):
            undo.append(partial(slots.__setitem__, name, tensor))
            slots[name] = fake(tensor)
        for optimizer in training.optimizers:
            _swap_parameters(optimizer, fake, undo)
        yield
    finally:
        for one in undo:
            one()


def _slots(training: TrainingState) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Return each tensor of the modules, with the mapping and the name that hold it."""
    return [
        (slots, name, tensor)
        for module in training.modules
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
