"""Storage for `torch.distributed.checkpoint`: its `save`, `async_save` and `load` over Holdfast's format."""

from __future__ import annotations

from holdfast.adapters.dcp.reader import HoldfastReader
from holdfast.adapters.dcp.writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
