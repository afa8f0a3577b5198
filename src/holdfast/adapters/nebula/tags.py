"""Conversion of Nebula's tags and partition names to steps and keys of a checkpoint; pure."""

from __future__ import annotations

import re
from typing import Any

from holdfast.checkpoint.exchange.partitions import partition_key
from holdfast.errors import InvalidInput

META = "nebula"
"""Top-level key of a checkpoint's tag and partitions."""
EXPLICIT = -2
"""Number of files of a checkpoint that `commit` completes."""
_STEP = re.compile(r"global_step([0-9]{1,15})")
_RESERVED = frozenset({META, "rng"})


def check_tag(tag: Any) -> str:
    """Return a tag, if it is valid.

    Raises:
        InvalidInput: the tag is not a string, or is empty.
    """
    if not isinstance(tag, str) or not tag:
        raise InvalidInput(f"A tag must be a string such as 'global_step500', not {tag!r}.")
    return tag


def check_num_of_files(count: Any) -> int | None:
    """Return a number of files, if it is valid.

    Raises:
        InvalidInput: the number is not None, -2, or 1 or more.
    """
    is_number = isinstance(count, int) and not isinstance(count, bool)
    if count is None or (is_number and (count == EXPLICIT or count >= 1)):
        return count
    raise InvalidInput(
        f"num_of_files must be 1 or more, or -2 for a checkpoint that commit() completes, not {count!r}."
    )


def named_step(tag: str) -> int | None:
    """Return the step in a tag: 500 for "global_step500", None for other tags."""
    found = _STEP.fullmatch(tag)
    return int(found[1]) if found else None


def next_step(tag: str, last: int | None) -> int:
    """Return the step of a new tag: the step in its name if that is new, or else the next number.

    Args:
        last: previous step, or None.
    """
    named = named_step(tag)
    if named is not None and (last is None or named > last):
        return named
    return 1 if last is None else last + 1


def goes_back(tag: str, last: int | None, loaded: int | None) -> bool:
    """Return True if a tag repeats steps after an older checkpoint was loaded.

    Loading an older checkpoint and continuing with new steps is not going back.

    Args:
        last: step that was saved last.
        loaded: step that was loaded since then, or None.
    """
    named = named_step(tag)
    return None not in (named, last, loaded) and named <= last and loaded < last  # type: ignore[operator]


def key_of(name: Any) -> str:
    """Return the key of a partition: its name, with characters escaped that keys cannot have.

    Raises:
        InvalidInput: the name is not a string, or is empty.
    """
    return partition_key(name, _RESERVED)
