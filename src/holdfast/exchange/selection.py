"""Which names are taken, and what they are called on the other side; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.errors import InvalidInput, NotFound


def is_under(name: str, prefix: str) -> bool:
    """True if a name is `prefix` or lies below it: "a.b" and "a.b.c" are under "a.b", "a.bc" is not."""
    return not prefix or name == prefix or name.startswith(f"{prefix}.")


def select(names: Iterable[str], only: Iterable[str] | None, what: str) -> list[str]:
    """The names under any of the prefixes, in their order; all if `only` is None.

    Raises:
        NotFound: a prefix that no name is under.
    """
    every = list(names)
    if only is None:
        return every
    prefixes = list(only)
    for prefix in prefixes:
        if not any(is_under(name, prefix) for name in every):
            tops = ", ".join(list(dict.fromkeys(name.partition(".")[0] for name in every))[:10]) or "nothing"
            message = f"{what} holds nothing under {prefix!r}; its names begin with {tops}."
            raise NotFound(message, key=prefix)
    return [name for name in every if any(is_under(name, prefix) for prefix in prefixes)]


def rename(names: Iterable[str], prefixes: Mapping[str, str] | None) -> dict[str, str]:
    """New name -> name, after the longest prefix that fits was replaced; "" takes a prefix off, dot included.

    Raises:
        InvalidInput: two names become one, or a name becomes empty.
    """
    by_length = sorted((prefixes or {}).items(), key=lambda pair: -len(pair[0]))
    found: dict[str, str] = {}
    for name in names:
        old, new = next(((old, new) for old, new in by_length if is_under(name, old)), ("", ""))
        rest = name[len(old) :].removeprefix(".")
        called = f"{new}.{rest}" if new and rest else new or rest
        if not called or called in found:
            clash = f"{found[called]!r} is called so too" if called else "a name is needed"
            raise InvalidInput(f"{name!r} would be called {called!r}, but {clash}.", key=name)
        found[called] = name
    return found
