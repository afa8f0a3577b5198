"""Verification of a checkpoint: every byte is hashed again, and all problems are collected."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.manifest import EACH, Manifest
from holdfast.checkpoint.format.part import Part
from holdfast.checkpoint.home.documents import expected_sizes, read_manifest, size_error
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import FileRead, Want, discard, read
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Corrupt, Denied, HoldfastError, RetryLater


class Problem(Struct, frozen=True):
    """One problem of a checkpoint."""

    kind: str  # corrupt, not-found, unsupported; retry-later or denied if a file could not be read
    rank: int | None
    key: str | None  # the tensor or file concerned
    message: str


class VerifyReport(Struct, frozen=True):
    """Result of a verification. `extra` files belong to no checkpoint, and do no harm."""

    step: int
    attempt: int
    problems: tuple[Problem, ...]
    extra: tuple[str, ...]
    num_files: int
    num_bytes: int  # of data files, read and hashed
    seconds: float

    @property
    def is_good(self) -> bool:
        """True if every byte equals the one that was written."""
        return not self.problems

    @property
    def damage(self) -> tuple[Problem, ...]:
        """Problems of the checkpoint itself, without those of a store that does not answer."""
        return tuple(one for one in self.problems if one.kind not in (RetryLater.kind, Denied.kind))


_UNREAD = {kind.kind: kind for kind in (RetryLater, Denied)}


def verify(
    store: Store, manifest: Manifest, *, num_threads: int = 4, on_bytes: Callable[[int], None] | None = None
) -> VerifyReport:
    """Check every file of every rank of a checkpoint. Damage is collected, not raised.

    Args:
        on_bytes: called with the size of each read when it has been hashed; in all at most
            `manifest.data_bytes`.

    Blocks: until everything has been read once.
    """
    began = time.perf_counter()
    problems: list[Problem] = []

    def note(error: HoldfastError) -> None:
        problems.append(Problem(error.kind, error.rank, error.key, str(error)))

    home = list_home(store, step=manifest.step)
    saved = home.saved.get(manifest.checkpoint_id)
    present = {} if saved is None else saved.sizes
    try:
        read_manifest(store, manifest.checkpoint_id, manifest.run)
    except HoldfastError as error:
        note(error)
    jobs, parts, num_parts = [], Parts(store, manifest), 0
    for rank in range(manifest.world_size):
        try:
            part = parts.part(rank)
        except HoldfastError as error:
            note(error)
            continue
        num_parts += 1
        for frozen in (False, True)[: len(part.files)]:
            num_bytes = _present_bytes(present, part, note, frozen=frozen)
            jobs.append(FileRead(part, [Want(0, num_bytes, discard)], frozen))
    if num_parts == manifest.world_size:
        _check_tensors(parts, note)
    stats = read(store, jobs, num_threads=num_threads, on_bytes=on_bytes, on_error=note)
    return VerifyReport(
        step=manifest.step,
        attempt=manifest.attempt,
        problems=tuple(problems),
        extra=tuple(sorted({*home.foreign, *present} - _named(manifest))),
        num_files=1 + manifest.world_size + len(jobs),
        num_bytes=stats.num_bytes,
        seconds=time.perf_counter() - began,
    )


def _present_bytes(
    present: Mapping[str, int], part: Part, note: Callable[[HoldfastError], None], *, frozen: bool
) -> int:
    """Return the bytes of a data file to hash: all, or the chunks before a truncation."""
    name = part.file_name(frozen=frozen)
    file, found = part.files[name], present.get(name)
    expected = file.num_bytes
    error = size_error(name, expected, found, step=part.step, rank=part.rank)
    if error is None:
        return expected
    note(error)
    return min(expected, found - found % file.chunk_bytes) if found else 0


def _check_tensors(parts: Parts, note: Callable[[HoldfastError], None]) -> None:
    """Note each tensor that the parts hold in another form than the manifest has it."""
    for name, tensor in parts.manifest.tensors.items():
        if tensor.owner == EACH:
            continue  # a rank may have none
        try:
            for _ in parts.shards_of(name, 0):
                pass
        except Corrupt as error:
            note(error)


def _named(manifest: Manifest) -> set[str]:
    """Return the names of the files that belong to a checkpoint."""
    files = {name for sizes in expected_sizes(manifest).values() for name in sizes}
    return {names.manifest(manifest.step, manifest.attempt), *files}


def check_verified(report: VerifyReport) -> None:
    """Raise the most important problem of a report: damage before a failure to read."""
    if report.damage:
        raise Corrupt(report.damage[0].message, step=report.step)
    for problem in report.problems:
        raise _UNREAD[problem.kind](problem.message, step=report.step, key=problem.key)
