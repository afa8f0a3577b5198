"""Recognition of DTensors without importing their class, which would take longer than Holdfast."""

from __future__ import annotations

import sys
from typing import Any


def is_dtensor(tensor: object) -> bool:
    """Return True for a DTensor."""
    kind = dtensor_class()
    return kind is not None and isinstance(tensor, kind)


def dtensor_class() -> Any:
    """Return the class, or None as long as nothing has imported it: then no DTensor exists."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
