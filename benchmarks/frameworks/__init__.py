"""Frameworks whose saves are measured without and with Holdfast's adapter, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .contract import Method

FRAMEWORKS = {
    "loop": "holdfast",
    "dcp": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
}
"""Name of a file in this folder: module that must be importable."""


def methods_of(name: str) -> dict[str, Method]:
    """The ways of saving of a framework, by title; the last one is Holdfast's. Imports the framework."""
    return importlib.import_module(f"{__name__}.{name}").METHODS
