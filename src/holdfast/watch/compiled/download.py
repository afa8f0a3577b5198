"""Download of the compile cache from a trusted home into a local directory, with verification."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError, NotFound
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled.build_environment import BuildEnvironment, format_difference
from holdfast.watch.compiled.directory import Directory
from holdfast.watch.compiled.index import (
    CacheIndex,
    IndexName,
    PackedFile,
    folder_of,
    index_name,
    newest,
    pack_name,
    parse,
    parse_name,
)
from holdfast.watch.compiled.packs import unpack

MAX_INDICES = 256
"""Most indices to read, newest first."""
_READS_AT_ONCE = 4


@dataclass(slots=True)
class DownloadResult:
    """Result of a download.

    Attributes:
        there: paths that exist in the directory now.
        lacking: paths in an index that could not be downloaded.
        num_placed: number of downloaded files.
        num_bytes: bytes of downloaded files.
        problems: errors, as text.
    """

    there: set[str] = field(default_factory=set)
    lacking: set[str] = field(default_factory=set)
    num_placed: int = 0
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def read_indices(store: Store, key: str, facts: BuildEnvironment) -> tuple[list[CacheIndex], list[str]]:
    """Read the indices of a key, newest attempt first, and the errors of unreadable ones.

    Of each writer the newest readable index counts.

    Raises:
        RetryLater: the store failed.
    """
    names = (parse_name(entry.name) for entry in store.list(folder_of(key)))
    writers = newest(name for name in names if isinstance(name, IndexName))[:MAX_INDICES]
    found: list[CacheIndex] = []
    problems: list[str] = []
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        for index, wrong in pool.map(lambda numbers: _first_good(store, facts, numbers), writers):
            found += [index] if index is not None else []
            problems += wrong
    return found, problems


def _first_good(
    store: Store, facts: BuildEnvironment, names: list[IndexName]
) -> tuple[CacheIndex | None, list[str]]:
    problems = []
    for one in names:
        name = index_name(one.key, one.attempt, one.rank, one.number)
        try:
            index = parse(store.get(name), name)
        except NotFound:
            continue  # just replaced by its writer
        except HoldfastError as error:
            problems.append(str(error))
            continue
        if index.facts != facts:
            problems.append(
                f"{name} is for another environment: it differs in {format_difference(facts, index.facts)}."
            )
            continue
        return index, problems
    return None, problems


def load(
    store: Store, key: str, facts: BuildEnvironment, directory: Directory, *, limit_s: float
) -> DownloadResult:
    """Download every file of a key that the directory lacks.

    A file with a wrong hash is skipped, and an older copy used, if one exists.

    Args:
        store: the store of the home, which the user trusts.
        limit_s: time limit, after which no further pack is downloaded.

    Raises:
        RetryLater: the store failed before anything was read.
    """
    deadline = time.monotonic() + limit_s
    loaded = DownloadResult()
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


def _wanted(index: CacheIndex, directory: Directory, there: set[str]) -> dict[str, list[PackedFile]]:
    """Return the files of an index that the directory lacks, by pack. Adds the others to `there`."""
    wanted: dict[str, list[PackedFile]] = {}
    for file in index.files:
        if file.path in there:
            continue
        if directories.has(directory, file.path, file.num_bytes):
            there.add(file.path)
        else:
            wanted.setdefault(file.pack, []).append(file)
    return wanted


def _fetch(
    store: Store, name: str, files: list[PackedFile], directory: Directory, deadline: float
) -> tuple[list[PackedFile], list[str]]:
    if time.monotonic() > deadline:
        return [], [f"{name} was not downloaded in time."]
    try:
        whole = store.get(name)
    except HoldfastError as error:
        return [], [str(error)]
    results = [(file, _place(whole, file, directory)) for file in files]
    return (
        [file for file, problem in results if problem is None],
        [problem for _, problem in results if problem is not None],
    )


def _place(whole: bytes, file: PackedFile, directory: Directory) -> str | None:
    """Write a file, and return the error, or None."""
    try:
        directories.place(directory, file.path, unpack(whole, file))
    except (HoldfastError, OSError) as error:
        return str(error)
    return None


def listed_paths(indices: list[CacheIndex]) -> Iterator[str]:
    """Yield every path in the indices."""
    for index in indices:
        yield from (file.path for file in index.files)
