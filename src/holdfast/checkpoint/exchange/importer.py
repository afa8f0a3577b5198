"""Import of a checkpoint in another format, detected or given, into a new home."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.exchange import safetensors_files, torch_files
from holdfast.checkpoint.exchange.home_writer import refuse_existing_home, write_home
from holdfast.checkpoint.exchange.source import Source, read_range
from holdfast.checkpoint.exchange.trees import select, touched_by
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.nesting import change_items, prune
from holdfast.checkpoint.format.values import TensorRef
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import InvalidInput, NotFound, RetryLater

AUTO = "auto"
MAX_EXPANSION = 4
"""Maximum of bytes written per byte of the source, unless `allow_expanded` is set."""
_FREE_BYTES = 1 << 20


class Imported(Struct, frozen=True):
    """Result of an import. `num_bytes` is the size of the data file."""

    home: str
    step: int
    kind: str
    num_tensors: int
    num_bytes: int
    seconds: float


def import_checkpoint(
    source: str | os.PathLike[str],
    home: str | os.PathLike[str] | Store,
    *,
    kind: str = AUTO,
    step: int = 0,
    only: Iterable[str] | None = None,
    under: str | None = None,
    allow_expanded: bool = False,
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Imported:
    """Import a checkpoint of another tool into a new home.

    The name of a tensor is its path: keys of nested dicts, joined by dots. Everything else becomes a value.
        Code in the source is never run: torch's pickles are loaded with `weights_only`, and DCP's metadata
        with a list of allowed names.

    Memory: about 20 MiB in addition to torch, for any size. Files of torch before 1.6 and DCP items that
        are not contiguous are loaded whole; a tensor of torch.save that is not contiguous is mapped whole.

    Args:
        source: file or folder to import.
        home: path or URL of a new home.
        kind: one of `source_kinds.KINDS`, or "auto" to detect the kind from the content.
        step: step of the checkpoint.
        only: prefixes of the names to import ("model" includes "model.weight"). By default everything is
            imported.
        under: top-level key to put everything under, such as "model" for a bare state dict.
        allow_expanded: allow tensors with more than `MAX_EXPANSION` times the bytes of the source.
        on_total: called once with the size of all tensors in bytes, before they are read.
        on_bytes: called with a number of bytes after they have been read.

    Raises:
        NotFound: the source or one of its files does not exist, or it has no names with a prefix of `only`.
        InvalidInput: the kind is unknown, or the source contains a value that a checkpoint cannot hold.
        Unsupported: the source needs code to load, or has a dtype that is not supported; or the home is not
            supported.
        Corrupt: the source is damaged.
        Conflict: the home is not new.
        RetryLater: reading the source or writing to the home failed.

    Ranks: not collective. Call it in one process.
    Blocks: until the checkpoint is durable.
    """
    began = time.perf_counter()
    path = Path(source).expanduser()
    store = home if isinstance(home, Store) else open_store(home)
    if step < 0:
        raise InvalidInput(f"step is {step}, but a step is a number of completed optimizer steps: 0 or more.")
    refuse_existing_home(store)
    found = detect_kind(path) if kind == AUTO else kind
    prefixes = None if only is None else tuple(only)
    opened = open_source(path, found, only=prefixes, under=under)
    if prefixes is not None:
        below = prefixes if under is None else tuple(f"{under}.{prefix}" for prefix in prefixes)
        opened = _select(opened, below, str(path))
    if not allow_expanded:
        _check_expansion(path, opened)
    if on_total is not None:
        on_total(sum(tensor.shard.num_bytes for tensor in opened))
    file = write_home(store, opened, step=step, origin=f"{path} ({found})", on_bytes=on_bytes)
    seconds = time.perf_counter() - began
    return Imported(store.url, step, found, len(opened.tensors), file.num_bytes, seconds)


def _check_expansion(path: Path, opened: Source) -> None:
    """Check that an import does not write many times the size of its source, as of expanded tensors."""
    folder = path.parent if path.name.endswith(".index.json") else path
    files = folder.iterdir() if folder.is_dir() else (path,)
    source_bytes = sum(file.stat().st_size for file in files if file.is_file())
    tensor_bytes = sum(tensor.shard.num_bytes for tensor in opened)
    if tensor_bytes > MAX_EXPANSION * source_bytes + _FREE_BYTES:
        raise InvalidInput(
            f"The tensors of {path} have {tensor_bytes} bytes, but its files only {source_bytes}: some "
            "tensors are expanded or share their bytes. Nothing was written. To write more than "
            f"{MAX_EXPANSION} times the bytes of the source, pass --allow-expanded (allow_expanded=True).",
            key=str(path),
        )


def _select(opened: Source, prefixes: tuple[str, ...], what: str) -> Source:
    names = [*(tensor.name for tensor in opened), *opened.tied, *opened.values]
    chosen = set(select(names, prefixes, what))
    tied = {alias: name for alias, name in opened.tied.items() if alias in chosen}
    first = {name: alias for alias, name in reversed(tied.items()) if name not in chosen}
    tensors = [
        tensor if tensor.name in chosen else replace(tensor, name=first[tensor.name])
        for tensor in opened
        if tensor.name in chosen or tensor.name in first
    ]
    tied = {alias: first.get(name, name) for alias, name in tied.items() if alias not in first.values()}
    kept = {*(tensor.name for tensor in tensors), *tied}
    return Source(tuple(tensors), tied, prune(touched_by(prefixes, opened.values), kept))


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
    if (path / torch_files.DCP_METADATA).is_file():
        return "dcp"
    return "hf" if any(path.glob("*.safetensors")) or any(path.glob(_BIN)) else None


def open_source(path: Path, kind: str, *, only: tuple[str, ...] | None, under: str | None) -> Source:
    """Open a source of one of `KINDS`, with everything under a top-level key. Only DCP leaves out names."""
    if kind not in KINDS:
        raise InvalidInput(f"Unknown kind of source {kind!r}: use {', '.join(KINDS)}.")
    _check_shape(path, kind)
    if kind == "torch":
        return torch_files.open_files([path], under=under)
    if kind == "dcp":
        return _nest_under(torch_files.open_dcp_folder(path, only=only), under)
    if kind == "safetensors":
        return _nest_under(safetensors_files.open_files([path]), under)
    return _open_hf(path, under)


def _check_shape(path: Path, kind: str) -> None:
    """Check that a source is a file or a folder, as its kind requires."""
    if not path.exists():
        raise NotFound(f"{path} does not exist.", key=str(path))
    if path.is_dir() != (kind in ("dcp", "hf")) and not path.name.endswith(".index.json"):
        needed = "a folder" if kind in ("dcp", "hf") else "a file"
        raise InvalidInput(f"{path} is not a source of kind {kind!r}, which is {needed}.", key=str(path))
    if kind == "dcp" and not (path / torch_files.DCP_METADATA).is_file():
        raise InvalidInput(
            f"{path} has no file {torch_files.DCP_METADATA}: it is not a DCP checkpoint, or its save was "
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
    tensors = tuple(replace(tensor, name=f"{under}.{tensor.name}") for tensor in source)
    tied = {f"{under}.{alias}": f"{under}.{name}" for alias, name in source.tied.items()}
    if not source.values:
        return Source(tensors, tied, {under: {}})
    values = {key: _nest_references(value, under) for key, value in source.values.items()}
    return Source(tensors, tied, {under: values})


def _nest_references(value: Any, under: str) -> Any:
    if isinstance(value, TensorRef):
        return TensorRef(f"{under}.{value.name}")
    return change_items(value, lambda item, _: _nest_references(item, under))
