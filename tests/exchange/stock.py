"""Files of stock torch without Holdfast: DCP as its users call it, and archives of torch.save by hand."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
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


def archive(members: Mapping[str, bytes]) -> bytes:
    """Return a zip archive as torch.save writes it, with these members."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        for name, content in members.items():
            file.writestr(f"a/{name}", content)
    return out.getvalue()


def torch_file(pickled: bytes, elements: bytes = b"", *, legacy: bool) -> bytes:
    """Return a file of torch.save with a pickle, and one storage of float32 elements if there are any."""
    if not legacy:
        storage = {"data/0": elements} if elements else {}
        return archive({"data.pkl": pickled, "byteorder": b"little", **storage, "version": b"3\n"})
    head = [pickle.dumps(one, 2) for one in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    storage = pickle.dumps(["0"], 2) + struct.pack("<q", len(elements) // 4) + elements
    return b"".join(head) + pickled + (storage if elements else pickle.dumps([], 2))
