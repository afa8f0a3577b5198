"""From the tags and partition names that Nebula's users choose to steps and keys of a checkpoint; pure."""

from __future__ import annotations

import re
from typing import Any

from holdfast.errors import InvalidInput

META = "nebula"
"""Top-level key of a checkpoint under which its tag and partitions are told."""
EXPLICIT = -2
"""The number of files that means: complete when `commit` says so."""
_STEP = re.compile(r"global_step([0-9]{1,15})")
_RESERVED = frozenset({META, "rng"})


def check_tag(tag: Any) -> str:
    """The tag, if it can be one.

    Raises:
        InvalidInput: it is no text, or empty.
    """
    if not isinstance(tag, str) or not tag:
        raise InvalidInput(f"A tag must be a string such as 'global_step500', got {tag!r}.")
    return tag


def check_num_of_files(count: Any) -> int | None:
    """The number of files, if it can be one.

    Raises:
        InvalidInput: it is neither None, -2 nor 1 or more.
    """
    is_number = isinstance(count, int) and not isinstance(count, bool)
    if count is None or (is_number and (count == EXPLICIT or count >= 1)):
        return count
    message = (
        f"num_of_files must be 1 or more, or -2 for a checkpoint that commit() completes; got {count!r}."
    )
    raise InvalidInput(message)


def named_step(tag: str) -> int | None:
    """500 for "global_step500"; None for a tag that names no step."""
    found = _STEP.fullmatch(tag)
    return int(found[1]) if found else None


def next_step(tag: str, last: int | None) -> int:
    """The step under which a tag is saved: the one that it names if that is new, else the next number.

    Args:
        tag: the tag.
        last: the step before it on its line; None if there is none.
    """
    named = named_step(tag)
    if named is not None and (last is None or named > last):
        return named
    return 1 if last is None else last + 1


def goes_back(tag: str, last: int | None, loaded: int | None) -> bool:
    """True if a tag repeats steps since an older checkpoint was loaded.

    Only then: whoever merely looks at an older checkpoint, and goes on counting, has not gone back.

    Args:
        tag: the tag that is saved.
        last: step saved last.
        loaded: step loaded since then; None if nothing was.
    """
    named = named_step(tag)
    return None not in (named, last, loaded) and named <= last and loaded < last  # type: ignore[operator]


def key_of(name: Any) -> str:
    """The key under which a partition is kept: its name, but for what keys cannot hold.

    Raises:
        InvalidInput: no name.
    """
    if not isinstance(name, str) or not name:
        raise InvalidInput(f"A partition's name must be a string that is not empty, got {name!r}.")
    key = name.replace("%", "%25").replace("/", "%2F").replace("@", "%40")
    return f"%{ord(key[0]):02X}{key[1:]}" if key in _RESERVED else key
