"""Recorded values of the steps before a checkpoint, from the logs of a home."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.limits import MAX_LINE_BYTES
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, Denied, NotFound, RetryLater
from holdfast.system.documents import decode

_MAX_LOG_BYTES = 64 << 20
_MAX_ATTEMPTS = 64
"""Attempts whose logs are searched, the newest."""

Values = dict[int, dict[str, float]]
"""Values by name, by step."""


def read_recent_values(stores: Sequence[Store], line: Sequence[CheckpointId], num_steps: int) -> Values:
    """Return the values of the last steps before a checkpoint, in ascending order.

    What cannot be read is left out: the values only make a judgement possible sooner.

    Args:
        stores: the tiers, nearest first.
        line: the checkpoints that it continues, oldest first, and itself.
        num_steps: number of steps.
    """
    found: Values = {}
    bases = [-1, *(one.step for one in line)]
    for one, base in list(zip(line, bases, strict=False))[: -_MAX_ATTEMPTS - 1 : -1]:
        for line_of_log in reversed(_read_log(stores, one.attempt).splitlines()):
            for at, name, value in _values_of(line_of_log):
                if base < at <= one.step:
                    found.setdefault(at, {}).setdefault(name, value)  # the last one of a step counts
            if len(found) > num_steps:
                break
        if len(found) > num_steps:
            break
    return {step: found[step] for step in sorted(found)[-num_steps:]}


def _read_log(stores: Sequence[Store], attempt: int) -> bytes:
    name = names.history(attempt, 0)
    for store in stores:
        try:
            num_bytes = store.size(name)
            if num_bytes is not None and num_bytes <= _MAX_LOG_BYTES:
                return store.get(name)
        except (Corrupt, Denied, NotFound, RetryLater):
            continue
    return b""


def _values_of(text: bytes) -> Iterator[tuple[int, str, float]]:
    """Yield step, name and value of each value in a line, the last first."""
    if b'"metrics"' not in text:
        return
    try:
        line = decode(text, "a line", max_bytes=MAX_LINE_BYTES, any_text=True)
    except Corrupt:
        return  # torn by a kill, or damaged
    if not isinstance(line, dict) or line.get("event") != "metrics":
        return
    steps, columns = line.get("steps"), line.get("values")
    if not isinstance(steps, list) or not isinstance(columns, dict):
        return
    for name, column in columns.items():
        if isinstance(column, list):
            for step, value in list(zip(steps, column, strict=False))[::-1]:
                if type(step) is int and (number := _number(value)) is not None:
                    yield step, name, number


def _number(value: object) -> float | None:
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    if type(value) in (int, float):
        number = float(str(value))
        return number if math.isfinite(number) else None
    return None
