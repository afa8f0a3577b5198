"""Amounts of CPUs and memory in task files; pure."""

from __future__ import annotations

import math
import re
from typing import Any

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
