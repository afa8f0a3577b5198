"""Storage for `torch.distributed.checkpoint`: `save`, `async_save` and `load` in Holdfast's format."""

from __future__ import annotations

from holdfast.adapters.dcp.reader import HoldfastReader
from holdfast.adapters.dcp.writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter"]
