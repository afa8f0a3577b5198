"""Names of objects that every store accepts, so that objects can be copied between stores."""

from __future__ import annotations

from holdfast.errors import InvalidInput

UNFINISHED = ".unfinished-"
"""Prefix of name parts that is reserved for files of unfinished puts."""
MAX_PART_BYTES = 255
"""Longest name part that common file systems accept, in UTF-8."""


def check_name(name: str) -> str:
    """Return the name if it is valid.

    Raises:
        InvalidInput: it is empty, absolute, or not text that a file system accepts, or a part of it is empty,
            ".", "..", reserved or too long.
    """
    for part in name.split("/"):
        if fault := _fault(part):
            raise InvalidInput(f"{name!r} is not a valid object name: {fault}.", key=name)
    return name


def check_prefix(prefix: str) -> str:
    """Return the prefix if names can begin with it; its last part may be empty or incomplete."""
    if parent := prefix.rpartition("/")[0]:
        check_name(parent)
    elif prefix.startswith("/"):
        raise InvalidInput(f"{prefix!r} is not a valid prefix: names are relative.", key=prefix)
    return prefix


def _fault(part: str) -> str | None:
    if part == "":
        return 'a part is empty (names are relative, with single "/" between parts)'
    if part in (".", ".."):
        return f"it has a {part!r} part"
    if part.startswith(UNFINISHED):
        return f"parts that begin with {UNFINISHED!r} are reserved for unfinished puts"
    if "\0" in part:
        return "it contains a NUL character"
    try:
        num_bytes = len(part.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode text"
    if num_bytes > MAX_PART_BYTES:
        return f"a part has {num_bytes} bytes; the limit is {MAX_PART_BYTES}"
    return None
