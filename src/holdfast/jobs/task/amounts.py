"""Amounts of CPUs, memory and accelerators in task files, in any of the forms that these allow; pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B?)?\+?", re.I)
_MULTIPLE = re.compile(r"\d+(?:\.\d+)?x", re.I)
_MIB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def parse_cpus(value: Any) -> float | None:
    """Return the number of a `resources.cpus` value, or None if it is invalid."""
    try:
        found = float(str(value).removesuffix("+"))
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None


def memory_mib(value: Any) -> int | None:
    """Return the MiB of a `resources.memory` value, where a plain number means GiB. None if invalid."""
    found = _SIZE.fullmatch(str(value).strip())
    return None if found is None else int(float(found[1]) * _MIB[(found[2] or "G").upper()])


def is_multiple(value: Any) -> bool:
    """Return True if a `resources.memory` value is a multiple of the CPUs, such as 4x."""
    return _MULTIPLE.fullmatch(str(value).strip()) is not None


_ONE = re.compile(r"[A-Za-z0-9][\w.\-/+]*(?::\d+(?:\.\d+)?)?")


class Accelerators(Struct, frozen=True):
    """Requested accelerators."""

    choices: tuple[tuple[str, float], ...]  # alternatives, each with name and number per node
    is_ordered: bool = False  # the first available one is preferred
    is_folded: bool = False  # the file has lines that YAML joins into one text

    @property
    def num_per_node(self) -> int:
        """The greatest number of any choice, as a whole number. 0 without choices."""
        return max((int(count) for _, count in self.choices), default=0)

    def plain(self) -> Any:
        """Return the accelerators in a form that SkyPilot parses correctly."""
        if self.is_ordered:
            return [f"{name}:{_number(count)}" for name, count in self.choices]
        if len(self.choices) == 1:
            name, count = self.choices[0]
            return f"{name}:{_number(count)}"
        return {name: _number(count) for name, count in self.choices}


def parse_accelerators(plain: Any) -> Accelerators | str:
    """Parse accelerators in any form. Return an error message if they are invalid.

    Forms: `A100`, `A100:8`, `{A100: 8}`, `{A100:1, V100:1}` (a set: any of them), `[A100:1, V100:1]` (in
    order), and lines without a space after the colon, which YAML folds into one text (treated as that set).
    """
    if plain is None:
        return Accelerators(())
    if isinstance(plain, str):
        words = plain.split()
        return _read_all(words, is_ordered=False, is_folded=len(words) > 1)
    if isinstance(plain, Mapping):
        words = [str(name) if count is None else f"{name}:{count}" for name, count in plain.items()]
        return _read_all(words, is_ordered=False)
    return _read_all([str(word) for word in plain], is_ordered=True)


def _read_all(words: list[str], *, is_ordered: bool, is_folded: bool = False) -> Accelerators | str:
    bad = [word for word in words if not _ONE.fullmatch(word)]
    if bad or not words:
        found = repr(bad[0]) if bad else "nothing"
        return f"expected NAME or NAME:COUNT, as A100:8, found {found}"
    pairs = (word.partition(":") for word in words)
    choices = tuple((name, float(count or 1)) for name, _, count in pairs)
    return Accelerators(choices, is_ordered=is_ordered, is_folded=is_folded)


def _number(count: float) -> int | float:
    return int(count) if count == int(count) else count
