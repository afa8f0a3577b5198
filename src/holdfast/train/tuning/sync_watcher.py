"""Watcher for host syncs: lines of a step that make the host wait for a value of the device.

Source: torch's function modes, which observe every such call of Python, even if no operator runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from holdfast.train.tuning import source_lines
from holdfast.train.tuning.measurements import HostSync, SourceLine, SyncMeasurements
from holdfast.train.tuning.tracker import Call, OutermostModule, StepWatcher, TrainingInfo, find_tensors

_CALLS: dict[Any, str] = {
    Tensor.__array__: ".numpy()",
    Tensor.__bool__: "bool()",
    Tensor.__float__: "float()",
    Tensor.__int__: "int()",
    Tensor.__index__: "int()",
    Tensor.__complex__: "complex()",
    Tensor.__repr__: "print()",
    Tensor.__format__: "print()",
    Tensor.__contains__: "in",
}
_COUNTS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
for _name in (*_COUNTS, "equal", "allclose"):
    _CALLS[getattr(Tensor, _name)] = _CALLS[getattr(torch, _name)] = f".{_name}()"
for _name in ("item", "tolist", "numpy", "cpu"):
    _CALLS[getattr(Tensor, _name)] = f".{_name}()"
_LOADING = ("/torch/utils/data/", "/torchdata/")


@dataclasses.dataclass(slots=True)
class _Hits:
    """Observations at one line."""

    inside: SourceLine | None
    in_forward: bool
    steps: set[int] = dataclasses.field(default_factory=set)
    num_times: int = 0
    seconds: float = 0.0


class SyncWatcher(StepWatcher[SyncMeasurements]):
    """Watcher that records every call in eager steps that needs a value of the device.

    On a CPU all values are available. There a call counts only if it would wait on a GPU: if it concerns a
    tensor of the model or computed by it, and not a batch as it came from a loader.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._hits: dict[tuple[str, SourceLine], _Hits] = {}
        self._number = 1
        self._depth = 0
        self._mode = _Mode(self._observe)
        self._on_device: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @override
    def begin(self, training: TrainingInfo) -> None:
        self._device = training.device
        for one in training.modules:
            for tensor in (*one.module.parameters(), *one.module.buffers()):
                self._on_device[tensor] = True
        torch.compiler.set_stance("force_eager")  # a function mode would cause recompiles
        self._mode.__enter__()

    @override
    def intercept(self, one: OutermostModule, call: Call) -> Call:
        def calling(*args: Any, **kwargs: Any) -> Any:
            for tensor in find_tensors((args, kwargs)):
                self._on_device[tensor] = True
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1

        return calling

    @override
    def step_done(self, number: int) -> None:
        self._number = number + 1

    @override
    def end(self) -> SyncMeasurements:
        self._mode.__exit__(None, None, None)
        torch.compiler.set_stance("default")
        found = tuple(
            HostSync(kind, place, one.inside, len(one.steps), one.num_times, one.seconds, one.in_forward)
            for (kind, place), one in self._hits.items()
        )
        return SyncMeasurements(self._device.type, self._number - 1, found)

    def _observe(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind, found = _kind(function, args, kwargs), None
        if kind is not None and self._waits(args) and not source_lines.is_running(*_LOADING):
            found = source_lines.current_line_and_library()
        started_s = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = time.perf_counter() - started_s
        self._follow(args, kwargs, result)
        if found is not None and kind is not None:
            hits = self._hits.setdefault((kind, found[0]), _Hits(found[1], self._depth > 0))
            hits.steps.add(self._number)
            hits.num_times += 1
            hits.seconds += seconds
        return result

    def _waits(self, args: tuple[Any, ...]) -> bool:
        """Return True if the call needs a value that would be on the device."""
        for tensor in find_tensors(args):
            if tensor.device.type == "meta":
                continue
            if self._device.type != "cpu":
                if tensor.device.type == self._device.type:
                    return True
            elif self._depth or tensor in self._on_device:
                return True
        return False

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Mark the tensors that an operation combines with a device tensor, and its results."""
        if self._device.type != "cpu":
            return
        given = list(find_tensors((args, kwargs)))
        if self._depth or any(tensor in self._on_device for tensor in given):
            for tensor in (*given, *find_tensors(result)):
                self._on_device[tensor] = True


class _Mode(TorchFunctionMode):
    """Function mode that calls every torch function through `through`."""

    def __init__(self, through: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._through = through

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._through(func, args, kwargs or {})


def _kind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return the name of a call that makes the host wait, otherwise None."""
    if (kind := _CALLS.get(function)) is not None:
        return kind
    if function in (Tensor.__getitem__, Tensor.__setitem__):
        return "x[mask]" if _counts_mask(function, args) else None
    if function is Tensor.to and args[0].device.type != "cpu":
        wanted = [*args[1:], *kwargs.values()]
        to_host = any(str(one) == "cpu" for one in wanted if isinstance(one, (str, torch.device)))
        return ".to('cpu')" if to_host else None
    if function is torch.where and len(args) == 1 and not kwargs.keys() - {"condition"}:
        return ".nonzero()"
    is_repeat = function in (torch.repeat_interleave, Tensor.repeat_interleave)
    is_counted = is_repeat and "output_size" not in kwargs and isinstance((*args, None, None)[1], Tensor)
    return ".repeat_interleave()" if is_counted else None


def _counts_mask(function: Any, args: tuple[Any, ...]) -> bool:
    """Return True for an index with a mask, except `x[mask] = number`, which fills without counting."""
    if function is Tensor.__setitem__ and not (isinstance(args[2], Tensor) and args[2].dim()):
        return False
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(
        isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) and one.dim() for one in parts
    )
