"""Copies of single numbers from a device, without making training wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch

from holdfast.checkpoint.state.tensors import is_dtensor
from holdfast.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PendingScalar:
    """A number that is being copied from a device."""

    host: torch.Tensor
    copied: torch.cuda.Event | None  # None: only a read shows it

    @property
    def is_ready(self) -> bool:
        """True if reading it would not wait."""
        return self.copied is None or self.copied.query()

    def read(self) -> float:
        """Return the number.

        Raises:
            RuntimeError: the device has failed.

        Blocks: until the device has computed it.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.host)


def copy_scalar(value: SupportsFloat | torch.Tensor, name: str) -> float | PendingScalar:
    """Return a number, or its pending copy, which is queued behind the device's current work.

    Args:
        value: a number, or a tensor of one element; it may be changed afterwards.

    Raises:
        InvalidInput: it is not a number.
    """
    if not isinstance(value, torch.Tensor):
        return _number(value, name)
    if is_dtensor(value) or value.numel() != 1 or value.is_complex() or value.is_meta:
        raise InvalidInput(
            f"{name}: expected one number, found a {type(value).__name__} of shape "
            f"{tuple(value.shape)} and {value.dtype}. Nothing was recorded. Reduce it first."
        )
    value = value.detach()
    if value.device.type == "cpu":
        return float(value)
    if value.device.type != "cuda":
        return PendingScalar(value.clone(), None)
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))
    return PendingScalar(host, copied)


def _number(value: Any, name: str) -> float:
    try:
        if hasattr(value, "__float__"):  # a text would be parsed
            return float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{name}: {value!r:.100} does not fit into a float. Nothing was recorded."
        ) from error
    raise InvalidInput(f"{name}: expected a number, found {value!r:.100}. Nothing was recorded.")
