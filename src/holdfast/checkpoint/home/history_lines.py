"""Lines of the history of a home, decoded within limits."""

from __future__ import annotations

import math
from typing import Any

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.limits import MAX_LINE_BYTES
from holdfast.checkpoint.format.sealed import dumps
from holdfast.checkpoint.store import Store
from holdfast.errors import Corrupt, NotFound
from holdfast.system.documents import decode

_MAX_NEW_BYTES = 8 << 20
"""Bytes of a log that are read at a time."""
Line = dict[str, Any]
"""One line of a history log."""


def read_lines(store: Store, attempt: int | None = None) -> tuple[list[Line], int]:
    """Read all lines of a home by time, and count those that are incomplete.

    Args:
        attempt: read only the logs of this attempt.
    """
    lines: list[Line] = []
    num_torn = 0
    for entry in sorted(store.list("history/"), key=lambda entry: entry.name):
        if not entry.name.endswith(".jsonl") or attempt not in (None, names.attempt_in(entry.name)):
            continue
        found, torn = _read_log(store, entry.name)
        lines += found
        num_torn += torn
    return sorted(lines, key=lambda line: line["t"]), num_torn


def read_log(store: Store, name: str) -> list[Line]:
    """Return the lines of one log that are complete."""
    return _read_log(store, name)[0]


def _read_log(store: Store, name: str) -> tuple[list[Line], int]:
    """Return the lines of one log, and the number of incomplete ones."""
    try:
        text = store.get(name)
    except NotFound:
        return [], 0  # deleted since it was listed
    # A keeper's successor may write its lines again.
    parsed = [_parse(one) for one in dict.fromkeys(text.splitlines())]
    lines = [line for line in parsed if line is not None]
    return lines, len(parsed) - len(lines)


def read_new_lines(store: Store, attempt: int, offsets: dict[str, int], event: str) -> list[Line]:
    """Read the lines of one kind that are new in the logs.

    Args:
        offsets: bytes of each log that were read; updated.
        event: kind of the lines. Others are skipped without decoding them.
    """
    mark, found = dumps(event), []
    for entry in sorted(store.list("history/"), key=lambda entry: entry.name):
        if not entry.name.endswith(".jsonl") or names.attempt_in(entry.name) != attempt:
            continue
        offset = offsets.get(entry.name, 0)
        length = min(entry.num_bytes - offset, _MAX_NEW_BYTES)
        if length <= 0:
            continue
        text = bytearray(length)
        try:
            store.read_into(entry.name, offset, memoryview(text))
        except (NotFound, Corrupt):  # deleted, or shorter, since it was listed
            continue
        whole = text.rfind(b"\n") + 1
        offsets[entry.name] = offset + (whole or (length if length == _MAX_NEW_BYTES else 0))
        found += [line for one in bytes(text[:whole]).splitlines() if mark in one and (line := _parse(one))]
    return [line for line in found if line["event"] == event]


def _parse(text: bytes) -> Line | None:
    try:
        line = decode(text, "a line", max_bytes=MAX_LINE_BYTES, any_text=True)
    except Corrupt:
        return None
    if b"\\u" in text:
        line = _printable(line)
    whole = isinstance(line, dict) and isinstance(line.get("event"), str)
    return line if whole and is_number(line.get("t")) else None


def _printable(value: object) -> Any:
    r"""Return a value with escaped bytes, such as `\xff`, in texts that are not UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # half a surrogate pair, which cannot come from a file name
            return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(one) for key, one in value.items()}
    return [_printable(one) for one in value] if isinstance(value, list) else value


def is_number(value: object) -> bool:
    """Return True if a value of JSON is a finite number."""
    # Python's JSON accepts NaN and Infinity, which cannot be sorted.
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond any float
        return False
