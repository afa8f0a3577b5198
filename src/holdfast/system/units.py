"""Sizes ("8GiB"), durations ("10m"), step numbers and lists: from and as text, and divided by size."""

from __future__ import annotations

import datetime
import operator
import re
from collections.abc import Iterable

from holdfast.errors import InvalidInput

Duration = str | float | datetime.timedelta  # type of durations: text ("10m"), seconds, or a timedelta

_NUMBER = r"\s{0,9}([0-9]{1,18}(?:\.[0-9]{1,18})?)\s{0,9}"
_SIZE = re.compile(_NUMBER + r"([kmgtp]?)(i?)b?\s{0,9}", re.IGNORECASE | re.ASCII)
_TIME = re.compile(_NUMBER + r"(ms|s|sec|m|min|h|d)\s{0,9}", re.IGNORECASE | re.ASCII)
MAX_STEP = 10**15 - 1  # greatest step; every JSON reader represents integers up to here exactly
MAX_SECONDS = 1e10  # upper limit of durations, 300 years
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(value: str | int, what: str) -> int:
    """Return the bytes of `8GiB` (binary), `8GB` (decimal) or a plain number."""
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        factor = (1024 if found[3] else 1000) ** " kmgtp".index(found[2].lower() or " ")
        value = int(float(found[1]) * factor)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        shown = f"{value!r:.100}" if not isinstance(value, int) else "a number out of range"
        raise InvalidInput(f"{what} must be a size like '8GiB' or a positive number of bytes, got {shown}.")
    return value


def parse_duration(value: Duration, what: str) -> float:
    """Return the seconds of `10m`, `1.5h`, a timedelta or a plain number."""
    if isinstance(value, datetime.timedelta):
        value = value.total_seconds()
    elif isinstance(value, str) and (found := _TIME.fullmatch(value)):
        value = float(found[1]) * _SECONDS[found[2].lower()]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MAX_SECONDS:
        raise InvalidInput(f"{what} must be a duration like '10m' or a timedelta, got {value!r:.100}.")
    return float(value)


def parse_timeout(value: Duration | None, what: str) -> float | None:
    """Return the seconds of a `timeout=` argument; 0 for no wait, None for no limit."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0):
        return None if value is None else 0.0
    return parse_duration(value, what)


def parse_step(value: object, what: str) -> int:
    """Return a number of steps as a plain int; `value` may be an integer scalar of numpy or torch.

    Blocks: on the device of a tensor that is not on the CPU.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        step = operator.index(value)  # pyright: ignore[reportArgumentType] the error below is for the others
    except (TypeError, ValueError, RuntimeError):
        is_bool, step = True, 0
    if not is_bool and 0 <= step <= MAX_STEP:
        return step
    kind = type(value).__name__
    fix = ""
    if isinstance(value, float) and value.is_integer() and 0 <= value <= MAX_STEP:
        fix = f" Write int(...) around it, here {int(value)}."
    raise InvalidInput(
        f"{what}: a step is a whole number from 0 to 10**15 - 1, found {value!r:.80} ({kind}). "
        f"Nothing was done.{fix}"
    )


def format_bytes(num_bytes: float) -> str:
    """Return a size as text, such as `1.5 GB`, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5 or unit == "TB":
            return (
                f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.5 else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1000
    raise AssertionError


def format_duration(seconds: float) -> str:
    """Return a duration as text: `1.2 ms`, `3.4 s`, `5 min 20 s`, `2 h 5 min` or `3 d 4 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: `1 checkpoint`, `2 checkpoints`; by default several have an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {nouns or noun + 's'}"


def some(items: Iterable[object], most: int = 8) -> str:
    """Return the first of several texts or numbers as text, and how many more there are."""
    found = list(map(str, items))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def divide(sizes: Iterable[tuple[str, int]], max_bytes: int) -> list[list[str]]:
    """Divide names into groups of at most `max_bytes` each. One that is larger has its own group."""
    groups: list[list[str]] = []
    room = 0
    for name, num_bytes in sizes:
        if not groups or num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= num_bytes
    return groups
