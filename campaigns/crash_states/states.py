"""States that a power cut or a kill may leave of a folder, drawn from the log of its operations.

The model is POSIX's, which promises less than any file system keeps: a change is safe when an fsync of its
file or directory that was entered after it has returned. Until then a crash keeps it or loses it. What is
lost is drawn by one of these rules:

- "killed": nothing; the processes die and the page cache stays.
- "ordered": entries are kept up to some moment, the same one for all directories.
- "by directory": entries are kept up to some moment, another one for each directory.
- "any": any subset of the entries is kept.

A file's bytes that no fsync covers are kept, lost, kept up to some byte, kept in some blocks while others
are zeros or noise, or all zeros under the full length. A rename is kept as a whole or not at all.

Source: ALICE, in Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from campaigns.crash_states.operations import NEVER, ROOT, DataChange, EntryChange, Log

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
RULES = ("killed", "ordered", "by directory", "any")
_VARIANTS = ("all", "none", "zeros", "prefix", "blocks", "noise")


@dataclass(frozen=True, slots=True)
class State:
    """One state: everything durable at the cut, and of what was pending there the changes that are kept."""

    cut: int  # line of the log before which the crash comes
    kept: frozenset[int]  # numbers of pending entry changes that the crash keeps
    data: tuple[tuple[int, str], ...]  # of files with pending bytes: which are kept; default all


@dataclass(slots=True)
class Tree:
    """Files and directories that can be reached in a state, by path below the recorded folder."""

    files: dict[str, int]
    directories: list[str]


def cuts(log: Log) -> list[int]:
    """Return every moment at which a crash may differ from one before."""
    moments = {0}
    for change in log.entries:
        moments |= {change.began + 1, change.ended + 1, change.durable_at + 1}
    for changes in log.data.values():
        for one in changes:
            moments |= {one.began + 1, one.ended + 1, one.durable_at + 1}
    moments |= {mark.at + 1 for mark in log.marks}
    return sorted(moment for moment in moments if moment <= NEVER)


def promises(log: Log, cut: int) -> list[str]:
    """Return the marks that the workload had been given before the crash."""
    return [mark.text for mark in log.marks if mark.at < cut]


def draw(log: Log, seed: int) -> Iterator[tuple[str, State]]:
    """Return states without end, each with its rule: first those of every cut, then random ones."""
    moments, random_ = cuts(log), random.Random(seed)
    systematic = list(moments)
    random_.shuffle(systematic)
    for cut in systematic:
        yield from _extremes(log, cut)
    for cut in systematic:
        yield from _one_by_one(log, cut, random_)
    while True:
        cut = random_.choice(moments)
        rule = random_.choice(RULES[1:])
        pending = _pending_entries(log, cut)
        yield rule, _with_data(log, cut, _kept(log, pending, rule, random_), random_)


def _extremes(log: Log, cut: int) -> Iterator[tuple[str, State]]:
    """Return the states of a cut in which everything pending is kept, or nothing."""
    pending = _pending_entries(log, cut)
    files = _pending_files(log, cut)
    complete = frozenset(number for number in pending if log.entries[number].ended < cut)
    for kept in {frozenset(pending), complete}:
        yield "killed", State(cut, kept, ())
    yield "ordered", State(cut, frozenset(), tuple((number, "none") for number in files))
    yield "ordered", State(cut, complete, tuple((number, "zeros") for number in files))


def _one_by_one(log: Log, cut: int, random_: random.Random) -> Iterator[tuple[str, State]]:
    """Return the states of a cut in which one pending change is kept or lost, or those up to one are kept."""
    pending = _pending_entries(log, cut)
    whole = frozenset(pending)
    for number in pending:
        earlier = frozenset(other for other in pending if other <= number)
        yield "ordered", _with_data(log, cut, earlier, random_)
        yield "any", _with_data(log, cut, whole - {number}, random_)
        yield "any", _with_data(log, cut, frozenset({number}), random_)


def _kept(log: Log, pending: list[int], rule: str, random_: random.Random) -> frozenset[int]:
    if rule == "any":
        share = random_.random()
        return frozenset(number for number in pending if random_.random() < share)
    if rule == "ordered":
        return frozenset(pending[: random_.randint(0, len(pending))])
    ends: dict[int, int] = {}
    for number in pending:
        for folder, _, _ in log.entries[number].slots:
            ends.setdefault(folder, random_.randint(pending[0], pending[-1] + 1))
    return frozenset(
        number
        for number in pending
        if all(number < ends[folder] for folder, _, _ in log.entries[number].slots)
    )


def _with_data(log: Log, cut: int, kept: frozenset[int], random_: random.Random) -> State:
    same = random_.choice([*_VARIANTS, ""])  # one variant for all files, or another for each
    data = []
    for number in _pending_files(log, cut):
        kind = same or random_.choice(_VARIANTS)
        data.append((number, kind if kind in ("all", "none", "zeros") else f"{kind}:{random_.randrange(64)}"))
    return State(cut, kept, tuple(data))


def _pending_entries(log: Log, cut: int) -> list[int]:
    return [number for number, one in enumerate(log.entries) if one.began < cut <= one.durable_at]


def _pending_files(log: Log, cut: int) -> list[int]:
    return [
        number
        for number, changes in log.data.items()
        if any(one.began < cut <= one.durable_at for one in changes)
    ]


# -- what a state is like ------------------------------------------------------------------------------------


def tree(log: Log, state: State) -> Tree:
    """Return the names that a state has."""
    names = {number: dict(found) for number, found in _durable_names(log, state.cut).items()}
    for number in sorted(state.kept):
        _apply(names, log.entries[number])
    found = Tree({}, [])
    _walk(log, names, ROOT, "", found)
    return found


def _apply(names: dict[int, dict[str, int]], change: EntryChange) -> None:
    for folder, name, number in change.slots:
        if number is None:
            names.setdefault(folder, {}).pop(name, None)
        else:
            names.setdefault(folder, {})[name] = number


_NAMES: dict[int, tuple[int, dict[int, dict[str, int]]]] = {}  # of each log: the last cut, and its names


def _durable_names(log: Log, cut: int) -> dict[int, dict[str, int]]:
    known = _NAMES.get(id(log))
    if known is None or known[0] != cut:
        names: dict[int, dict[str, int]] = {}
        for change in log.entries:
            if change.durable_at < cut:
                _apply(names, change)
        _NAMES.clear()
        known = _NAMES[id(log)] = cut, names
    return known[1]


def _walk(log: Log, names: dict[int, dict[str, int]], folder: int, prefix: str, found: Tree) -> None:
    for name, number in names.get(folder, {}).items():
        if number in log.directories:
            found.directories.append(prefix + name)
            _walk(log, names, number, f"{prefix}{name}/", found)
        elif number not in log.pipes:
            found.files[prefix + name] = number


def content(log: Log, state: State, number: int) -> bytes:
    """Return the bytes of a file in a state."""
    return _content(*_content_key(log, state, number))


def _content_key(log: Log, state: State, number: int) -> tuple[_Key, int, int, int, str]:
    """Return all that the bytes of a file depend on."""
    begun = [one for one in log.data.get(number, ()) if one.began < state.cut]
    durable = sum(one.durable_at < state.cut for one in begun)
    variant = dict(state.data).get(number, "all") if durable < len(begun) else "all"
    return _Key(log), number, len(begun), state.cut if durable < len(begun) else 0, variant


@dataclass(frozen=True, slots=True)
class _Key:
    """A log as the key of a cache: the same object is the same log."""

    log: Log

    def __hash__(self) -> int:
        return id(self.log)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.log is self.log


@lru_cache(maxsize=2048)
def _content(key: _Key, number: int, num_begun: int, cut: int, variant: str) -> bytes:
    changes = sorted(key.log.data.get(number, ()), key=lambda one: one.ended)
    begun = [one for one in changes if one.began < cut or not cut][:num_begun]
    base, full = bytearray(), bytearray()
    for one in begun:
        _write(full, one)
        if one.durable_at < cut or not cut:
            _write(base, one)
    if variant == "all":
        return bytes(full)
    if variant == "none":
        return bytes(base)
    return _mixed(bytes(base), bytes(full), begun, cut, variant)


def _write(there: bytearray, change: DataChange) -> None:
    if change.size is not None:
        del there[change.size :]
        there.extend(bytes(change.size - len(there)))
        return
    if change.offset > len(there):
        there.extend(bytes(change.offset - len(there)))
    there[change.offset : change.offset + len(change.data)] = change.data


def _mixed(base: bytes, full: bytes, begun: list[DataChange], cut: int, variant: str) -> bytes:
    """Return a file of whose pending bytes some are kept, under the full length."""
    kind, _, text = variant.partition(":")
    random_ = random.Random(int(text or 0))
    if kind == "prefix":
        return _prefix(base, begun, cut, random_)
    result = bytearray(base[: len(full)] + bytes(max(0, len(full) - len(base))))
    if kind == "zeros":
        return bytes(result)
    for start in range(0, len(full), BLOCK_BYTES):
        block = slice(start, start + BLOCK_BYTES)
        if random_.random() < 0.5:
            result[block] = full[block]
        elif kind == "noise" and result[block] != full[block]:
            result[block] = random_.randbytes(len(full[block]))
    return bytes(result)


def _prefix(base: bytes, begun: list[DataChange], cut: int, random_: random.Random) -> bytes:
    """Return a file to which the pending bytes were written in order, up to some sector."""
    result = bytearray(base)
    pending = [one for one in begun if one.durable_at >= cut]
    left = random_.randint(0, sum(len(one.data) for one in pending))
    for one in pending:
        if one.size is not None:
            _write(result, one)
            continue
        count = len(one.data) if left >= len(one.data) else left // SECTOR_BYTES * SECTOR_BYTES
        _write(result, DataChange(one.began, one.ended, one.offset, one.data[:count]))
        left -= len(one.data)
        if left < 0:
            break
    return bytes(result)


def digest(log: Log, state: State) -> bytes:
    """Return a hash of the names and bytes of a state; nothing reads the bytes of unfinished files."""
    shape = tree(log, state)
    text = hashlib.blake2b(digest_size=16)
    for path in sorted(shape.directories):
        text.update(path.encode() + b"/\0")
    for path in sorted(shape.files):
        text.update(path.encode() + b"\0")
        if ".unfinished-" not in path:
            text.update(_digest(*_content_key(log, state, shape.files[path])))
    return text.digest()


@lru_cache(maxsize=1 << 16)
def _digest(key: _Key, number: int, num_begun: int, cut: int, variant: str) -> bytes:
    return hashlib.blake2b(_content(key, number, num_begun, cut, variant), digest_size=16).digest()
