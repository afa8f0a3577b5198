"""Selection of names by prefix, and replacement of prefixes; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.checkpoint.format.nesting import is_under
from holdfast.errors import InvalidInput, NotFound


def select(names: Iterable[str], only: Iterable[str] | None, what: str) -> list[str]:
    """Return the names with any of the prefixes, in their order; all names if `only` is None.

    Raises:
        NotFound: a prefix matches no name.
    """
    every = list(names)
    if only is None:
        return every
    prefixes = list(only)
    for prefix in prefixes:
        if not any(is_under(name, prefix) for name in every):
            tops = ", ".join(list(dict.fromkeys(name.partition(".")[0] for name in every))[:10]) or "nothing"
            raise NotFound(f"{what} has no names under {prefix!r}. Its names begin with {tops}.", key=prefix)
    return [name for name in every if any(is_under(name, prefix) for prefix in prefixes)]


def rename(names: Iterable[str], prefixes: Mapping[str, str] | None) -> dict[str, str]:
    """Return new names with their old ones, after the longest matching prefix is replaced.

    "" removes a prefix and its dot.

    Raises:
        InvalidInput: two names become equal, or a name becomes empty.
    """
    prefixes = prefixes or {}
    by_length = sorted(prefixes, key=len, reverse=True)
    found: dict[str, str] = {}
    for name in names:
        prefix = next((old for old in by_length if is_under(name, old)), None)
        renamed = name if prefix is None else _replace(name, prefix, prefixes[prefix])
        is_emptied = not renamed and renamed != name
        if is_emptied or renamed in found:
            clash = "a name cannot be empty" if is_emptied else f"{found[renamed]!r} gets that name too"
            raise InvalidInput(f"{name!r} would be renamed to {renamed!r}, but {clash}.", key=name)
        found[renamed] = name
    return found


def _replace(name: str, old: str, new: str) -> str:
    rest = name[len(old) :].removeprefix(".") if old else name
    return f"{new}.{rest}" if new and rest else new or rest
