"""Exports to one file of torch.save, written as a stream: nested dicts, tied tensors sharing their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.exchange.archive import Stored, write_archive
from holdfast.exchange.outgoing import Outgoing
from holdfast.exchange.trees import assemble, make_plain, rename_top
from holdfast.restore.placing import placed_file


def write_file(outgoing: Outgoing, path: Path, *, overwrite: bool) -> None:
    """Write a file that `torch.load(path, weights_only=True, mmap=True)` takes.

    Raises:
        Conflict: the file exists.
        Corrupt: the checkpoint is damaged; no file was written.
        RetryLater: it could not be written.
    """
    stored, tree = plant(outgoing)
    feed = outgoing.feed(list(stored))
    with placed_file(path, overwrite=overwrite) as partial, partial.open("wb") as file:
        write_archive(file, tree, stored.values(), lambda one: feed.take(one.num_bytes))


def plant(outgoing: Outgoing) -> tuple[dict[str, Stored], dict[str, Any]]:
    """What stands for each tensor that has its own bytes, and the tree of all with these in it.

    Raises:
        NotFound: a key that is to be renamed is not there.
        InvalidInput: two things would have one name.
    """
    stored: dict[str, Stored] = {}
    for name, piece in outgoing.pieces.items():
        if outgoing.original(name) == name:
            stored[name] = Stored(str(len(stored)), piece.dtype, piece.shape)
    tree = assemble(
        outgoing.pieces, outgoing.values(), lambda name: stored[outgoing.original(name)], outgoing.only
    )
    return stored, rename_top(make_plain(tree, Stored), outgoing.rename)
