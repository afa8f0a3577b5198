"""Mutations of documents: of the structure that is in them, and of their bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.format.sealed import seal

_STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**9, 10**18),
    *(
        0.5,
        -0.0,
        1e308,
        1e-320,
        "",
        "a",
        "0",
        "x" * 300,
        "../x",
        "/etc/passwd",
        "a\0b",
        "é",
        "\u202e",
        "$tuple",
    ),
    *([], {}, [[]], [0], [None], {"": 0}, ["a", 1], {"$int": "1"}, {"$ndarray": ["<U0", [10**9], ""]}),
]
_RAW = [
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 25, b"9" * 5000, b'"\\ud800"', b"1." + b"0" * 200),
    *(
        b"[" * 5000 + b"]" * 5000,
        b'{"a":' * 5000 + b"0" + b"}" * 5000,
        b'{"a":1,"a":2}',
        b'"' + b"y" * 70000 + b'"',
    ),
    *(b'"\xff"', b"", b"//", b"[" + b"0," * 20000 + b"0]"),
]
_HOLE = "\ue000hole\ue001"


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with a few of them changed, cut, repeated or added."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed) + 1)
        long = chance.choice((1, 2, 4, 8, 64))
        kind = chance.randrange(6)
        if kind == 0 and changed:
            changed[min(at, len(changed) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            changed[at : at + long] = chance.randbytes(long)
        elif kind == 2:
            del changed[at : at + long]
        elif kind == 3:
            changed[at:at] = changed[at : at + long] * chance.choice((1, 3, 100))
        elif kind == 4:
            extremes = (b"\xff" * long, b"\0" * long, b"\x7f" + b"\xff" * 7, b"\0\0\0\x80")
            changed[at : at + long] = chance.choice(extremes)
        else:
            del changed[at:]
    return bytes(changed)


def mutate_json(text: bytes, chance: random.Random) -> bytes:
    """Return JSON with a few members, items or values changed; now and then what is no JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return mutate_bytes(text, chance)
    raw: list[bytes] = []
    try:
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            value = _mutated(value, chance, raw)
        written = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
            "utf-8", "surrogatepass"
        )
    except (RecursionError, ValueError):
        return text
    for one in raw:
        written = written.replace(json.dumps(_HOLE, ensure_ascii=False).encode(), one, 1)
    return written if chance.randrange(40) else mutate_bytes(written, chance)


def _mutated(value: Any, chance: random.Random, raw: list[bytes]) -> Any:
    places = [((), value), *_places(value, (), 400)]
    path, found = places[chance.randrange(len(places))]
    return _replaced(value, path, _other(found, chance, raw, places))


def _places(value: Any, path: tuple[Any, ...], most: int) -> list[tuple[tuple[Any, ...], Any]]:
    found: list[tuple[tuple[Any, ...], Any]] = []
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, item in items[:60]:
        if len(found) > most:
            break
        found.append(((*path, key), item))
        found += _places(item, (*path, key), most - len(found))
    return found


def _other(value: Any, chance: random.Random, raw: list[bytes], places: list[Any]) -> Any:
    kind = chance.randrange(8)
    if kind == 0:
        return chance.choice(_STRANGE)
    if kind == 1:
        raw.append(chance.choice(_RAW))
        return _HOLE
    if kind == 2:
        return chance.choice(places)[1]
    if isinstance(value, bool):
        return chance.choice((int(value), str(value), not value))
    if isinstance(value, (int, float)):
        near = (
            value + 1,
            value - 1,
            -value,
            value * 2,
            value * 10**9,
            value + 4096,
            float(value) if abs(value) < 2**1000 else 0.5,
            str(value) if abs(value) < 2**1000 else "0",
            [value],
        )
        return chance.choice(near)
    if isinstance(value, str):
        return chance.choice(
            (value + "x", value[:-1], value * 2, value.upper(), value + "/..", [value], "\n" + value)
        )
    if isinstance(value, list):
        return _other_list(value, chance)
    if isinstance(value, dict):
        return _other_dict(value, chance)
    return chance.choice(_STRANGE)


def _other_list(value: list[Any], chance: random.Random) -> Any:
    kind = chance.randrange(6)
    if kind == 0 and value:
        return value[:-1]
    if kind == 1 and value:
        return value + [chance.choice(value)] * chance.choice((1, 2, 1000))
    if kind == 2:
        return [*value, chance.choice(_STRANGE)]
    if kind == 3:
        return chance.sample(value, len(value))
    if kind == 4:
        return dict(enumerate(map(str, value[:10])))
    return [value]


def _other_dict(value: dict[Any, Any], chance: random.Random) -> Any:
    keys = list(value)
    kind = chance.randrange(5)
    if kind == 0 and keys:
        gone = chance.choice(keys)
        return {key: item for key, item in value.items() if key != gone}
    if kind == 1 and keys:
        return {
            **value,
            str(chance.choice(keys)) + chance.choice(("x", "", "/..", "\0")): chance.choice(_STRANGE),
        }
    if kind == 2:
        return list(value.items())[:20]
    if kind == 3 and keys:
        a, b = chance.choice(keys), chance.choice(keys)
        return {**value, a: value[b], b: value[a]}
    return {**value, "extra": chance.choice(_STRANGE)}


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {
            key: _replaced(item, path[1:], new) if key == path[0] else item for key, item in value.items()
        }
    if isinstance(value, list):
        return [_replaced(item, path[1:], new) if i == path[0] else item for i, item in enumerate(value)]
    return value


def mutate_sealed(document: bytes, chance: random.Random) -> bytes:
    """Return a sealed document with a line mutated, sealed again so that inner checks are reached."""
    if not chance.randrange(50):
        return mutate_bytes(document, chance)
    first, *lines = document.split(b"\n")
    every = [b"{" + first[first.find(b",") + 1 :], *lines]
    at = chance.randrange(len(every))
    every[at] = mutate_json(every[at], chance)
    if not chance.randrange(20):
        every = chance.choice((every[:-1] or every, every + every[-1:], chance.sample(every, len(every))))
    head, at = every[0], every[0].find(b'"catalog":"') + 11
    if len(every) == 1 or at < 11:
        return seal(b"\n".join(every))
    *sealed, catalog = every  # of a part, which names its catalog
    if chance.randrange(10):
        sealed[0] = head[:at] + digest(catalog).encode() + head[at + 32 :]
    return seal(b"\n".join(sealed)) + b"\n" + catalog


def mutate_lines(text: bytes, chance: random.Random) -> bytes:
    """Return lines of JSON, one of them mutated."""
    lines = text.split(b"\n")
    at = chance.randrange(len(lines))
    lines[at] = mutate_json(lines[at], chance)
    return b"\n".join(lines)


def mutate_text(text: bytes, chance: random.Random, words: tuple[bytes, ...] = ()) -> bytes:
    """Return text with words of its language put in, repeated or taken away."""
    if not words or not chance.randrange(4):
        return mutate_bytes(text, chance)
    changed = text
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(changed) + 1)
        word = chance.choice(words) * chance.choice((1, 1, 1, 2, 500))
        changed = changed[:at] + word + changed[at + chance.choice((0, 0, 1, 5)) :]
    return changed


Mutation = Callable[[bytes, random.Random], bytes]
