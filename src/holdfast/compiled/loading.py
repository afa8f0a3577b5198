"""Brings the compile cache of a trusted home into a local directory, each file checked before it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from holdfast.compiled import directory as directories
from holdfast.compiled.directory import Directory
from holdfast.compiled.facts import Facts, say_difference
from holdfast.compiled.index import (
    Index,
    IndexName,
    Packed,
    folder_of,
    index_name,
    newest,
    pack_name,
    parse,
    parse_name,
)
from holdfast.compiled.packs import unpack
from holdfast.errors import HoldfastError, NotFound
from holdfast.store import Store

MAX_INDICES = 256
"""Older ones are not read: so many restarts have compiled something new since."""
_READS_AT_ONCE = 4


@dataclass(slots=True)
class Loaded:
    """What became of a load.

    `there` - paths that are in the directory now, or were before. `lacking` - paths that an index lists and
    that could not be had. `num_placed` and `num_bytes` - the files that were brought. `problems` - why files
    were not, in words.
    """

    there: set[str] = field(default_factory=set)
    lacking: set[str] = field(default_factory=set)
    num_placed: int = 0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def read_indices(store: Store, key: str, facts: Facts) -> tuple[list[Index], list[str]]:
    """The indices of a key, the newest attempt first, and what is wrong with others.

    Of each writer the newest that can be read counts.

    Raises:
        RetryLater: the store failed.
    """
    names = (parse_name(entry.name) for entry in store.list(folder_of(key)))
    writers = newest(name for name in names if isinstance(name, IndexName))[:MAX_INDICES]
    found: list[Index] = []
    problems: list[str] = []
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        for index, wrong in pool.map(lambda numbers: _first_good(store, facts, numbers), writers):
            found += [index] if index is not None else []
            problems += wrong
    return found, problems


def _first_good(store: Store, facts: Facts, names: list[IndexName]) -> tuple[Index | None, list[str]]:
    problems = []
    for one in names:
        name = index_name(one.key, one.attempt, one.rank, one.number)
        try:
            index = parse(store.get(name), name)
        except NotFound:
            continue  # its writer has just replaced it
        except HoldfastError as error:
            problems.append(str(error))
            continue
        if index.facts != facts:
            problems.append(
                f"{name} is for another machine: it differs in {say_difference(facts, index.facts)}."
            )
            continue
        return index, problems
    return None, problems


def load(store: Store, key: str, facts: Facts, directory: Directory, *, limit_s: float) -> Loaded:
    """Place every file that the home has for a key and the directory has not.

    A file that does not match its hash is not placed; an older copy of it is, if there is one.

    Args:
        store: the home, which the user trusts.
        key: of this machine.
        facts: behind the key.
        directory: of torch.compile.
        limit_s: no further pack is fetched after that.

    Raises:
        RetryLater: the store failed before anything was read.
    """
    deadline = time.monotonic() + limit_s
    loaded = Loaded()
    indices, loaded.problems = read_indices(store, key, facts)
    for index in indices:
        wanted = _wanted(index, directory, loaded.there)
        with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
            fetched = pool.map(
                lambda pack, files, attempt=index.attempt: _fetch(
                    store, pack_name(key, attempt, pack), files, directory, deadline
                ),
                wanted,
                wanted.values(),
            )
            for placed, problems in fetched:
                loaded.there |= {file.path for file in placed}
                loaded.num_placed += len(placed)
                loaded.num_bytes += sum(file.num_bytes for file in placed)
                loaded.problems += problems
    loaded.lacking = set(listed_paths(indices)) - loaded.there
    return loaded


def _wanted(index: Index, directory: Directory, there: set[str]) -> dict[str, list[Packed]]:
    """Files of an index that the directory lacks, by pack; those that it has are added to `there`."""
    wanted: dict[str, list[Packed]] = {}
    for file in index.files:
        if file.path in there:
            continue
        if directories.has(directory, file.path, file.num_bytes):
            there.add(file.path)
        else:
            wanted.setdefault(file.pack, []).append(file)
    return wanted


def _fetch(
    store: Store, name: str, files: list[Packed], directory: Directory, deadline: float
) -> tuple[list[Packed], list[str]]:
    if time.monotonic() > deadline:
        return [], [f"{name} was not fetched: time ran out."]
    try:
        whole = store.get(name)
    except HoldfastError as error:
        return [], [str(error)]
    results = [(file, _place(whole, file, directory)) for file in files]
    return (
        [file for file, problem in results if problem is None],
        [problem for _, problem in results if problem is not None],
    )


def _place(whole: bytes, file: Packed, directory: Directory) -> str | None:
    """What prevented a file from being placed; None if it was."""
    try:
        directories.place(directory, file.path, unpack(whole, file))
    except (HoldfastError, OSError) as error:
        return str(error)
    return None


def listed_paths(indices: list[Index]) -> Iterator[str]:
    """Every path that an index lists."""
    for index in indices:
        yield from (file.path for file in index.files)
