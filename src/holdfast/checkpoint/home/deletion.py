"""Deletion of a checkpoint's files, in the one order that is safe to interrupt."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import Store

_ORDER = {"manifest": 0, "part": 1, "refusal": 2, "frozen": 3, "data": 4, "metrics": 5, "skipped": 6}


def delete_files(
    store: Store, found: Iterable[str], *, on_deleted: Callable[[str], None] = lambda name: None
) -> None:
    """Delete files of one checkpoint, so that no document outlives the files it describes.

    The manifest goes first: a checkpoint without its files never looks complete. The note that a restore has
    skipped it goes last: the rest stays noted until then.

    Args:
        store: the home, or a nearer tier.
        found: names of the files; those that do not exist are skipped.
        on_deleted: called with each name, after it is deleted.

    Blocks: until the removal is durable.
    """
    for name in sorted(found, key=_position):
        store.delete(name)
        on_deleted(name)


def _position(name: str) -> tuple[int, str]:
    facts = names.parse(name)
    return _ORDER.get(facts.kind, len(_ORDER)) if facts else len(_ORDER), name
