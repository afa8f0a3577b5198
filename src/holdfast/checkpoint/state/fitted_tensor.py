"""A saved composite tensor together with the live one that shows its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.composites import SavedTensor


@dataclass(frozen=True, slots=True)
class FittedTensor:
    """A composite tensor that can be rebuilt.

    Args:
        saved: its description.
        live: a tensor of the same type with the same facts. It is only looked at.
    """

    saved: SavedTensor
    live: Any
