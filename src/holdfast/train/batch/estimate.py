"""Peak memory of a training step at any batch size, estimated with fake tensors."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils import _pytree

from holdfast.errors import InvalidInput, Unsupported
from holdfast.train.batch.training_state import TrainingState, count_bytes


def batch_size_of(sample: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its tensors."""
    sizes = {leaf.shape[0] for leaf in tensors_of(sample) if leaf.dim() > 0}
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidInput(
            f"The sample batch's tensors have first dimensions of {sorted(sizes) or 'no length'}, so it "
            "cannot be cut or repeated to other sizes. Pass make_batch=, a function from a size to a batch."
        )
    return sizes.pop()


def resize(sample: Any, size: int) -> Any:
    """Return the batch with `size` samples: its first ones, or all of them repeated.

    Scalars and other objects are unchanged.
    """
    tensors = [leaf for leaf in tensors_of(sample) if leaf.dim() > 0]
    index = torch.arange(size, device=tensors[0].device) % tensors[0].shape[0]

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        return leaf.detach()[index.to(leaf.device)]

    return _pytree.tree_map(one, _plain(sample))


def tensors_of(sample: Any) -> list[torch.Tensor]:
    """Return all tensors of a batch."""
    return [leaf for leaf in _pytree.tree_leaves(_plain(sample)) if isinstance(leaf, torch.Tensor)]


def _plain(sample: Any) -> Any:
    """Return a batch as a type that pytree supports. Tokenizers return mappings that it does not."""
    return dict(sample) if isinstance(sample, Mapping) and type(sample) is not dict else sample


def estimate_peak(
    step: Callable[[Any], object], make: Callable[[int], Any], training: TrainingState, size: int
) -> int:
    """Return the peak bytes of a step on a batch of `size`, without computing.

    Two steps run on fake tensors, which replace the modules' tensors and the optimizers' parameters for that
    time. Other effects of the step, such as scheduler steps and counters, are real.

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
    fakes: dict[int, Any] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = mode.from_tensor(tensor)
        return fakes[id(tensor)]

    # Each once: a part that two modules share would get fake tensors of its fake tensors.
    parts = {id(part): part for module in training.modules for part in module.modules()}.values()
    mappings: list[dict[str, Any]] = [slots for part in parts for slots in (part._parameters, part._buffers)]
    with contextlib.ExitStack() as undo:
        for slots in mappings:
            for name, tensor in [(name, one) for name, one in slots.items() if one is not None]:
                undo.callback(slots.__setitem__, name, tensor)
                slots[name] = fake(tensor)
        for optimizer in training.optimizers:
            for group in optimizer.param_groups:
                undo.callback(group.__setitem__, "params", group["params"])
                group["params"] = [fake(one) for one in group["params"]]
            undo.callback(setattr, optimizer, "state", optimizer.state)
            optimizer.state = defaultdict(dict)
        yield
