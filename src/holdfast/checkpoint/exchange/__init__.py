"""Import from and export to other formats: torch.save, DCP, safetensors, Hugging Face folders."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.exchange.exporter import Exported, export_checkpoint, export_in_background
    from holdfast.checkpoint.exchange.importer import Imported, import_checkpoint

__all__ = ["Exported", "Imported", "export_checkpoint", "export_in_background", "import_checkpoint"]


def __getattr__(name: str) -> Any:  # each imports what only it needs
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "importer" if name in ("Imported", "import_checkpoint") else "exporter"
    return getattr(importlib.import_module(f"{__name__}.{file}"), name)
