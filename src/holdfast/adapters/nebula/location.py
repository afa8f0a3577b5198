"""Where loaded tensors go: torch.load's `map_location`, for tensors that have come to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.errors import InvalidInput

MapLocation = Any
"""None, a device, its name, a mapping of names, or a function of a storage and its name."""


def place(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """A tensor where `map_location` wants it.

    Args:
        tensor: on the CPU.
        location: name of the device that it was saved from.
        map_location: as `torch.load` takes it; None brings it back to that device.

    Raises:
        InvalidInput: None was given, and there is no such device here.
    """
    if map_location is None:
        return _back(tensor, location)
    if isinstance(map_location, Mapping):
        return _back(tensor, str(map_location.get(location, location)))
    if callable(map_location) and not isinstance(map_location, torch.device):
        return _asked(tensor, location, map_location)
    return tensor.to(map_location)


def _back(tensor: torch.Tensor, location: str) -> torch.Tensor:
    try:
        return tensor.to(location)
    except (AssertionError, RuntimeError) as error:
        message = (
            f"The checkpoint was saved from {location}, which is not here ({error}). Nothing was loaded. "
            "Pass map_location='cpu', or the device that it shall go to."
        )
        raise InvalidInput(message) from error


def _asked(tensor: torch.Tensor, location: str, ask: Callable[[Any, str], Any]) -> torch.Tensor:
    storage = ask(tensor.untyped_storage(), location)
    if storage is None:
        return _back(tensor, location)
    plain = storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()
    found = torch.empty(0, dtype=tensor.dtype, device=plain.device)
    return found.set_(plain, tensor.storage_offset(), tensor.size(), tensor.stride())
