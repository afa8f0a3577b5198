"""Destination of a saved tensor's bytes, planned by `state/` and filled by `restore/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.checkpoint.format.partitioning import Region

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FillTarget:
    """Destination of a saved tensor's bytes.

    Args:
        tensor: contiguous, of the saved dtype, and of the region's sizes.
        region: its region of the saved tensor; None for all of it.
    """

    tensor: torch.Tensor
    region: Region | None = None
