"""Kinds of sources: detection of the kind, and opening."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.checkpoint.exchange import dcp_folder, safetensors_files, torch_files
from holdfast.checkpoint.exchange.source import Source, read_range
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.values import TensorRef
from holdfast.errors import InvalidInput, NotFound, RetryLater

KINDS = ("torch", "dcp", "safetensors", "hf")
"""Kinds of sources; `hf` is a model folder in Hugging Face's layout."""

_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # first bytes of files of torch before 1.6
_BIN_INDEX, _BIN = ".bin.index.json", "*.bin"
_SUPPORTED = (
    "a file of torch.save (a zip archive, or torch's older pickle), a .safetensors file, a folder of "
    "torch.distributed.checkpoint (with a file .metadata), and a Hugging Face model folder (*.safetensors or "
    "*.bin, with or without an index)"
)


def detect_kind(path: Path) -> str:
    """Return which of `KINDS` a source is, by its content and not by its name."""
    try:
        if path.is_dir():
            found = _kind_of_folder(path)
        elif path.exists():
            found = _kind_of_file(path)
        else:
            raise NotFound(f"{path} does not exist.", key=str(path))
    except PermissionError as error:
        raise RetryLater(f"{path} could not be read: {error.strerror}.", key=str(path)) from error
    if found is None:
        raise InvalidInput(f"{path} cannot be imported. Supported are: {_SUPPORTED}.", key=str(path))
    return found


def _kind_of_file(path: Path) -> str | None:
    if path.name.endswith((safetensors_files.INDEX_SUFFIX, _BIN_INDEX)):
        return "hf"
    if not path.is_file():
        return None  # opening a FIFO would block
    head = bytes(read_range(path, 0, min(16, path.stat().st_size)))
    if head.startswith((b"PK\x03\x04", _LEGACY)):
        return "torch"
    size = int.from_bytes(head[:8], "little")
    return "safetensors" if head[8:9] == b"{" and size < 1 << 32 else None


def _kind_of_folder(path: Path) -> str | None:
    if (path / names.RUN).exists():
        raise InvalidInput(
            f"{path} is already a home of Holdfast: copy the folder, or export from it.", key=str(path)
        )
    if (path / dcp_folder.METADATA).is_file():
        return "dcp"
    return "hf" if any(path.glob("*.safetensors")) or any(path.glob(_BIN)) else None


def open_source(path: Path, kind: str, *, only: tuple[str, ...] | None, under: str | None) -> Source:
    """Open a source of one of `KINDS`.

    Args:
        only: prefixes of the names to open, as far as the kind can leave out others; None for all.
        under: top-level key to put everything under.

    Raises:
        InvalidInput: the kind is unknown, or the source is of another kind.
        Unsupported: the source needs code to load, or has a dtype that a checkpoint cannot hold.
        Corrupt: the source is damaged.
        NotFound: a file of the source is missing.
    """
    openers: dict[str, Callable[[], Source]] = {
        "torch": lambda: torch_files.open_files([path], under=under),
        "dcp": lambda: _nest_under(dcp_folder.open_folder(path, only=only), under),
        "safetensors": lambda: _nest_under(safetensors_files.open_file(path), under),
        "hf": lambda: _open_hf(path, under),
    }
    if kind not in openers:
        raise InvalidInput(f"Unknown kind of source {kind!r}: use {', '.join(KINDS)}.")
    _check_shape(path, kind)
    return openers[kind]()


def _check_shape(path: Path, kind: str) -> None:
    """Check that a source is a file or a folder, as its kind requires."""
    if not path.exists():
        raise NotFound(f"{path} does not exist.", key=str(path))
    if path.is_dir() != (kind in ("dcp", "hf")) and not path.name.endswith(".index.json"):
        needed = "a folder" if kind in ("dcp", "hf") else "a file"
        raise InvalidInput(f"{path} is not a source of kind {kind!r}, which is {needed}.", key=str(path))
    if kind == "dcp" and not (path / dcp_folder.METADATA).is_file():
        raise InvalidInput(
            f"{path} has no file {dcp_folder.METADATA}: it is not a DCP checkpoint, or its save was "
            "interrupted.",
            key=str(path),
        )


def _open_hf(path: Path, under: str | None) -> Source:
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and any(path.glob("*.safetensors")):
        return _nest_under(safetensors_files.open_folder(folder), under)
    if path.name.endswith(safetensors_files.INDEX_SUFFIX):
        return _nest_under(safetensors_files.open_index(path), under)
    index = path if path.is_file() else safetensors_files.find_index(folder, _BIN_INDEX)
    if index is not None:
        files: Iterable[str] = dict.fromkeys(safetensors_files.read_index(index).values())
        return torch_files.open_files([folder / name for name in files], under=under)
    weights = sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob(_BIN))
    if not weights:
        raise InvalidInput(f"{path} has no *.safetensors or *.bin file, so it is not a model.", key=str(path))
    return torch_files.open_files(weights, under=under)


def _nest_under(source: Source, under: str | None) -> Source:
    """Return a source with everything under one top-level key."""
    if under is None:
        return source
    tensors = tuple(
        type(tensor)(f"{under}.{tensor.name}", tensor.dtype, tensor.shape, tensor.readers)
        for tensor in source
    )
    tied = {f"{under}.{alias}": f"{under}.{name}" for alias, name in source.tied.items()}
    if not source.values:
        return Source(tensors, tied, {under: {}})
    values = {key: _nest_references(value, under) for key, value in source.values.items()}
    return Source(tensors, tied, {under: values})


def _nest_references(value: object, under: str) -> object:
    if isinstance(value, TensorRef):
        return TensorRef(f"{under}.{value.name}")
    if isinstance(value, dict):
        return type(value)((key, _nest_references(item, under)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_nest_references(item, under) for item in value)
    return value
