"""DCP as its users call it: stock torch without Holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Call `dcp.save` in one process."""
    save(state, storage_writer=FileSystemWriter(folder))


def load_dcp(target: dict[str, Any], folder: Path, reader: Any = None) -> None:
    """Call `dcp.load` in one process, with DCP's own reader by default."""
    load(target, storage_reader=reader or FileSystemReader(folder))
