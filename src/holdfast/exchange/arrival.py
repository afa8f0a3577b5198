"""Import: from a source in another format to a new home with one checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.exchange.offer import Offered
from holdfast.exchange.selection import is_under, select
from holdfast.exchange.sources import Asked, open_source, tell_kind
from holdfast.exchange.trees import prune
from holdfast.exchange.writing import refuse_used, write_home
from holdfast.store import Store, open_store

AUTO = "auto"
MAX_EXPANSION = 4
"""Bytes that an import writes for each byte of its source, if not told otherwise."""
_FREE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did. `num_bytes` is the size of the data file."""

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
    """Make a checkpoint of what another tool has saved, in a home that is new.

    Tensors get the names of their places: keys of nested dicts, joined by dots. What is no tensor becomes
    values. No code of the source is run: torch's pickles are read weights-only, DCP's metadata by a list of
    what it needs.

    Memory: some 20 MiB beside torch, whatever the size. A file of torch before 1.6, and a DCP item that is
    not contiguous, are loaded whole; a tensor of torch.save that is not contiguous is mapped whole.

    Args:
        source: file or folder.
        home: path or URL of a home that does not exist yet.
        kind: one of `sources.KINDS`, or "auto" to tell it from what is there.
        step: step that the checkpoint is of.
        only: prefixes of the names that are taken ("model" takes "model.weight"); default all.
        under: top-level key that everything is put under, such as "model" for a bare state dict.
        allow_expanded: write also more than `MAX_EXPANSION` times the bytes of the source.
        on_total: called once with the bytes of all tensors, before they are read.
        on_bytes: called with the bytes of tensors when they have been read.

    Raises:
        NotFound: no such source, a file of it is missing, or it holds nothing under a prefix.
        InvalidInput: it is of no known kind, or holds what no checkpoint can.
        Unsupported: it needs code that is not safe to load, or a dtype or a home that is not supported.
        Corrupt: it is damaged.
        Conflict: the home is not new.
        RetryLater: source or home failed.

    Ranks: not collective; one process.
    Blocks: until the checkpoint is durable.
    """
    began = time.perf_counter()
    path = Path(source).expanduser()
    store = home if isinstance(home, Store) else open_store(home)
    if step < 0:
        raise InvalidInput(f"step is {step}; a step is a count of completed optimizer steps, 0 or more.")
    refuse_used(store)
    found = tell_kind(path) if kind == AUTO else kind
    prefixes = None if only is None else tuple(only)
    offered = open_source(path, found, Asked(prefixes, under))
    if prefixes is not None:
        below = prefixes if under is None else tuple(f"{under}.{prefix}" for prefix in prefixes)
        offered = _selected(offered, below, str(path))
    if not allow_expanded:
        _check_expansion(path, offered)
    if on_total is not None:
        on_total(sum(offer.piece.num_bytes for offer in offered))
    file = write_home(store, offered, step=step, origin=f"{path} ({found})", on_bytes=on_bytes)
    seconds = time.perf_counter() - began
    return Imported(store.url, step, found, len(offered.tensors), file.num_bytes, seconds)


def _check_expansion(path: Path, offered: Offered) -> None:
    """Refuse to write much more than the source has: an expanded tensor of any size takes few bytes in it.

    Raises:
        InvalidInput: the tensors have more bytes than `MAX_EXPANSION` times the source.
    """
    folder = path.parent if path.name.endswith(".index.json") else path
    files = folder.iterdir() if folder.is_dir() else (path,)
    there = sum(file.stat().st_size for file in files if file.is_file())
    wanted = sum(offer.piece.num_bytes for offer in offered)
    if wanted > MAX_EXPANSION * there + _FREE_BYTES:
        message = (
            f"The tensors of {path} have {wanted} bytes, and its files {there}: some are expanded, or share "
            f"their bytes. Nothing was written, since more than {MAX_EXPANSION} times the bytes of a source "
            "are only written if you allow it (--allow-expanded, allow_expanded=True)."
        )
        raise InvalidInput(message, key=str(path))


def _selected(offered: Offered, prefixes: tuple[str, ...], what: str) -> Offered:
    names = [*(offer.name for offer in offered), *offered.tied, *offered.values]
    taken = set(select(names, prefixes, what))
    tied = {alias: name for alias, name in offered.tied.items() if alias in taken}
    first = {name: alias for alias, name in reversed(tied.items()) if name not in taken}
    tensors = [
        offer if offer.name in taken else replace(offer, name=first[offer.name])
        for offer in offered
        if offer.name in taken or offer.name in first
    ]
    tied = {alias: first.get(name, name) for alias, name in tied.items() if alias not in first.values()}
    held = {*(offer.name for offer in tensors), *tied}
    values = {
        key: value
        for key, value in offered.values.items()
        if any(is_under(key, prefix) or is_under(prefix, key) for prefix in prefixes)
    }
    return Offered(tuple(tensors), tied, prune(values, held))
