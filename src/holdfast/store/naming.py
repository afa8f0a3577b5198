"""Which object names every store accepts, so that what one place holds can be copied to any other."""

from __future__ import annotations

from holdfast.errors import InvalidInput

UNFINISHED = ".unfinished-"
"""Parts of names that begin so are kept for files of puts that have not finished."""
MAX_PART_BYTES = 255
"""Longest part between two slashes that common file systems accept, in UTF-8."""


def check_name(name: str) -> str:
    """The name itself, if it can name an object.

    Raises:
        InvalidInput: empty, absolute, with an empty, "." or ".." part, a reserved or too long part, or not
            text that a file system takes.
    """
    for part in name.split("/"):
        if fault := _fault(part):
            raise InvalidInput(f"{name!r} cannot name an object in a store: {fault}.", key=name)
    return name


def check_prefix(prefix: str) -> str:
    """The prefix itself, if names can begin with it; its last part may be empty or incomplete.

    Raises:
        InvalidInput: no object's name can begin so.
    """
    if parent := prefix.rpartition("/")[0]:
        check_name(parent)
    elif prefix.startswith("/"):
        raise InvalidInput(f"{prefix!r} cannot begin an object's name: names are relative.", key=prefix)
    return prefix


def _fault(part: str) -> str | None:
    if part == "":
        return 'a part is empty (names are relative, with single "/" between parts)'
    if part in (".", ".."):
        return f"it has a {part!r} part"
    if part.startswith(UNFINISHED):
        return f"names with a part that begins with {UNFINISHED!r} are kept for unfinished puts"
    if "\0" in part:
        return "it holds a NUL character"
    try:
        num_bytes = len(part.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode text"
    if num_bytes > MAX_PART_BYTES:
        return f"a part has {num_bytes} bytes; the most is {MAX_PART_BYTES}"
    return None
