"""Import of a checkpoint in another format into a new home."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.checkpoint.exchange.home_writer import refuse_existing_home, write_home
from holdfast.checkpoint.exchange.source import Source
from holdfast.checkpoint.exchange.source_kinds import detect_kind, open_source
from holdfast.checkpoint.exchange.trees import select
from holdfast.checkpoint.format.nesting import is_under, prune
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import InvalidInput

AUTO = "auto"
MAX_EXPANSION = 4
"""Maximum of bytes written per byte of the source, unless `allow_expanded` is set."""
_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Imported:
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
    """Check that an import does not write many times the size of its source.

    An expanded tensor of any size has few bytes in a file.
    """
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
    values = {
        key: value
        for key, value in opened.values.items()
        if any(is_under(key, prefix) or is_under(prefix, key) for prefix in prefixes)
    }
    return Source(tuple(tensors), tied, prune(values, kept))
