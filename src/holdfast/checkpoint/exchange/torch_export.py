"""Export to one file of torch.save, written as a stream. Tied tensors share their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.torch_archive import ArchivedTensor, write_archive
from holdfast.checkpoint.exchange.trees import make_plain, nest, rename_top_level
from holdfast.checkpoint.format.nesting import plain_form, unflatten
from holdfast.checkpoint.restore.atomic_output import atomic_file


def write_file(selection: ExportSelection, path: Path, *, overwrite: bool) -> None:
    """Write a file for `torch.load(path, weights_only=True, mmap=True)`.

    Raises:
        Conflict: the file exists.
        Corrupt: the checkpoint is damaged. The file was not written.
        RetryLater: the file could not be written.
    """
    stored, tree = build_tree(selection)
    stream = selection.stream(list(stored))
    with atomic_file(path, overwrite=overwrite) as partial, partial.open("wb") as file:
        write_archive(file, tree, stored.values(), lambda one: stream.read(one.num_bytes))


def build_tree(selection: ExportSelection) -> tuple[dict[str, ArchivedTensor], dict[str, Any]]:
    """Return a placeholder per stored tensor, and the nested state dict that refers to them.

    Raises:
        NotFound: a key to rename does not exist.
        InvalidInput: two tensors or values would have the same name.
    """
    stored: dict[str, ArchivedTensor] = {}
    for name, one in selection.tensors.items():
        if selection.original(name) == name:
            stored[name] = ArchivedTensor(str(len(stored)), one.dtype, one.shape)

    def tensor(name: str) -> ArchivedTensor:
        return stored[selection.original(name)]

    index = selection.checkpoint.value_index()
    if index is None:
        tree = unflatten(selection.tensors, selection.values(), tensor, selection.only)
    else:
        leaves = {**selection.values(), **{name: tensor(name) for name in selection.tensors}}
        tree = nest({index.path(name): plain_form(leaf) for name, leaf in leaves.items()})
    return stored, rename_top_level(make_plain(tree, ArchivedTensor), selection.rename)
