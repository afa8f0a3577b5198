"""Values whose type is a class of the program: a checkpoint names that class only as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SavedEnum:
    """An enum member: `type` is "module:qualified name" of its class, `name` is its name.

    The name of a combination of flags has all their names, joined by "|".
    """

    type: str
    name: str


@dataclass(frozen=True, slots=True)
class SavedNamedTuple:
    """A named tuple: `type` is "module:qualified name" of its class, `fields` has names with values."""

    type: str
    fields: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class SavedDataclass:
    """An instance of a dataclass: `type` is "module:qualified name" of its class, `fields` by name."""

    type: str
    fields: dict[str, Any]


NAMED_TYPES = (SavedEnum, SavedNamedTuple, SavedDataclass)
