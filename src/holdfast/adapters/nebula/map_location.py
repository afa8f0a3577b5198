"""Placement of loaded tensors on devices, as by torch.load's `map_location`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.errors import InvalidInput

MapLocation = Any
"""None, a device, its name, a mapping of names, or a function of a storage and its name."""


def place(tensor: torch.Tensor, location: str, map_location: MapLocation) -> torch.Tensor:
    """Return a tensor on the device that `map_location` selects.

    Args:
        tensor: tensor on the CPU.
        location: device that it was saved from.
        map_location: as in `torch.load`; None selects that device.

    Raises:
        InvalidInput: `map_location` is None, and the device does not exist here.
    """
    if map_location is None:
        return _to_device(tensor, location)
    if isinstance(map_location, Mapping):
        return _to_device(tensor, str(map_location.get(location, location)))
    if callable(map_location) and not isinstance(map_location, torch.device):
        return _call(tensor, location, map_location)
    return tensor.to(map_location)


def _to_device(tensor: torch.Tensor, location: str) -> torch.Tensor:
    try:
        return tensor.to(location)
    except (AssertionError, RuntimeError) as error:
        raise InvalidInput(
            f"The checkpoint was saved from {location}, which does not exist here ({error}). Nothing was "
            "loaded. Pass map_location='cpu' or another device."
        ) from error


def _call(tensor: torch.Tensor, location: str, function: Callable[[Any, str], Any]) -> torch.Tensor:
    storage = function(tensor.untyped_storage(), location)
    if storage is None:
        return _to_device(tensor, location)
    plain = storage if isinstance(storage, torch.UntypedStorage) else storage.untyped()
    found = torch.empty(0, dtype=tensor.dtype, device=plain.device)
    return found.set_(plain, tensor.storage_offset(), tensor.size(), tensor.stride())
