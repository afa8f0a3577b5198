"""Import from and export to other formats: torch.save, DCP, safetensors, Hugging Face folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.exchange.background_export import BackgroundExport, export_in_background
    from holdfast.checkpoint.exchange.exporter import Exported, export_checkpoint
    from holdfast.checkpoint.exchange.importer import Imported, import_checkpoint

__all__ = [
    "BackgroundExport",
    "Exported",
    "Imported",
    "export_checkpoint",
    "export_in_background",
    "import_checkpoint",
]


def __getattr__(name: str) -> Any:  # each imports what only it needs
    if name in ("Exported", "export_checkpoint"):
        from holdfast.checkpoint.exchange import exporter as module
    elif name in ("BackgroundExport", "export_in_background"):
        from holdfast.checkpoint.exchange import background_export as module
    elif name in ("Imported", "import_checkpoint"):
        from holdfast.checkpoint.exchange import importer as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
