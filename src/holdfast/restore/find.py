"""What a home holds: checkpoints with and without a manifest, which is newest, which are whole."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.documents import shown
from holdfast.errors import Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported
from holdfast.format import manifest as manifest_format
from holdfast.format import names, run
from holdfast.format import part as part_format
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.hashes import MAX_CHUNK_BYTES, digest
from holdfast.format.layout import BLOCK_BYTES, Piece
from holdfast.format.manifest import Manifest
from holdfast.format.part import Part
from holdfast.home.attempts import note_saved
from holdfast.store.contract import Store
from holdfast.store.memory import MemoryStore
from holdfast.store.nearest import first_good


@dataclass(slots=True)
class Saved:
    """What a listing shows of one step of one attempt, complete or not."""

    step: int
    attempt: int
    manifest_bytes: int | None = None  # None: no manifest, so not a checkpoint (yet)
    parts: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    data: dict[int, int] = field(default_factory=dict)  # rank -> bytes
    frozen: dict[int, int] = field(default_factory=dict)  # rank -> bytes of its file of frozen tensors
    was_passed: bool = False  # a restore has passed it over, see `holdfast.restore.passed`

    @property
    def is_committed(self) -> bool:
        """True if there is a manifest; says nothing about what is in it."""
        return self.manifest_bytes is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of all objects of this save."""
        return (self.manifest_bytes or 0) + sum(
            sum(files.values()) for files in (self.parts, self.data, self.frozen)
        )


@dataclass(frozen=True, slots=True)
class Home:
    """One listing of a home. `saved` is keyed by (step, attempt)."""

    attempts: tuple[int, ...]  # claimed, ascending
    saved: dict[tuple[int, int], Saved]
    foreign: tuple[str, ...]  # objects in step directories that are none of ours


@dataclass(frozen=True, slots=True)
class Passed:
    """A checkpoint that was passed over, and why."""

    step: int
    attempt: int
    reason: str
    is_superseded: bool = False  # a newer attempt resumed from an older one: nothing speaks against its bytes


def list_home(store: Store, *, step: int | None = None) -> Home:
    """List a home once.

    Args:
        store: the home.
        step: list only this step's directory (attempts are then not listed).

    Raises:
        RetryLater: the store failed.
    """
    attempts: list[int] = []
    foreign: list[str] = []
    saved: dict[tuple[int, int], Saved] = {}
    passed: list[tuple[int, int]] = []
    for entry in store.list("" if step is None else names.step_dir(step) + "/"):
        facts = names.parse(entry.name)
        if facts is None:
            continue
        if facts.kind == "attempt":
            attempts.append(facts.attempt)
            continue
        if facts.kind == "refusal":
            continue  # a word between keepers
        if facts.kind == "passed":
            passed.append((facts.step, facts.attempt))
            continue
        if facts.kind == "step-other":
            foreign.append(entry.name)
            continue
        one = saved.setdefault((facts.step, facts.attempt), Saved(facts.step, facts.attempt))
        if facts.kind == "manifest":
            one.manifest_bytes = entry.num_bytes
        else:
            files = {"part": one.parts, "data": one.data, "frozen": one.frozen}[facts.kind]
            files[facts.rank] = entry.num_bytes
    for key in passed:
        if key in saved:  # else only the note about it is left
            saved[key].was_passed = True
    return Home(tuple(sorted(attempts)), saved, tuple(sorted(foreign)))


def candidates(home: Home) -> list[tuple[int, int]]:
    """(attempt, step) of everything that has a manifest, newest first; mind the order of the pair."""
    return sorted(((one.attempt, one.step) for one in home.saved.values() if one.is_committed), reverse=True)


def read_run(store: Store) -> run.Run | None:
    """The run that this home holds, None for a home that was never used.

    Every claim of an attempt, every manifest and every part names the run too, so a damaged or lost
    `holdfast.json` makes no checkpoint a stranger's.

    Raises:
        Corrupt: the home's own document is damaged, and nothing else in the home tells the run.
        Unsupported: written by a newer format.
        RetryLater: the store failed.
    """
    damage: Corrupt | None = None
    try:
        found = read_run_document(store)
    except Corrupt as error:
        found, damage = None, error
    found = found or next(_runs_named_elsewhere(store), None)
    if found is None and damage is not None:
        raise damage
    return found


def read_run_document(store: Store) -> run.Run | None:
    """What `holdfast.json` says; None if there is none.

    Raises:
        Corrupt: it is damaged.
        Unsupported: written by a newer format.
        RetryLater: the store failed.
    """
    with contextlib.suppress(NotFound):
        return first_good(store, lambda copy: run.parse(run.Run, copy.get(names.RUN), names.RUN))
    return None


def _runs_named_elsewhere(store: Store) -> Iterator[run.Run]:
    home = list_home(store)
    for number in sorted(home.attempts, reverse=True):
        with contextlib.suppress(Corrupt, NotFound, Unsupported):
            claim = first_good(store, lambda copy, number=number: _read_claim(copy, number))
            yield run.Run(claim.run, claim.started_unix_s)
    for attempt, step in candidates(home):
        with contextlib.suppress(Corrupt, NotFound, Unsupported):
            manifest = read_manifest(store, step, attempt, None)
            yield run.Run(manifest.run, manifest.created_unix_s)
    for (step, attempt), saved in sorted(home.saved.items(), reverse=True):
        for rank in saved.parts:
            with contextlib.suppress(Corrupt, NotFound, Unsupported):
                name = names.part(step, attempt, rank)
                part = first_good(store, lambda copy, name=name: part_format.parse(copy.get(name), name))
                yield run.Run(part.run, time.time())


def _read_claim(store: Store, number: int) -> run.Attempt:
    return run.parse(run.Attempt, store.get(names.attempt(number)), names.attempt(number))


def read_manifest(store: Store, step: int, attempt: int, run_id: str | None) -> Manifest:
    """The manifest of a step of an attempt, after checking that it is what its name says.

    Args:
        store: the home.
        step: step in the manifest's name.
        attempt: attempt in the manifest's name.
        run_id: id of the run that the home holds; None skips that check (a home without `holdfast.json`).

    Raises:
        NotFound: no such manifest.
        Corrupt: damaged, or the manifest of another step, attempt or run.
        Unsupported: written by a newer format.
        RetryLater: the store failed.
    """
    return first_good(store, lambda copy: _read_manifest(copy, step, attempt, run_id))


def _read_manifest(store: Store, step: int, attempt: int, run_id: str | None) -> Manifest:
    name = names.manifest(step, attempt)
    found = manifest_format.parse(store.get(name), name)
    if (found.step, found.attempt) != (step, attempt):
        message = f"{name} is the manifest of step {found.step}, attempt {found.attempt}, under a wrong name."
        raise Corrupt(message, step=step, key=name)
    if run_id is not None and found.run != run_id:
        message = f"{name} belongs to another run: expected run {run_id}, found {found.run}."
        raise Corrupt(message, step=step, key=name)
    left = found.data_bytes
    for key, tensor in found.tensors.items():
        if tensor.cut is not None:
            left -= math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if left < 0:
            message = f"{name} names tensors that need more than the {found.data_bytes} bytes of its files."
            raise Corrupt(message, step=step, key=key)
    return found


def check_files(listings: Sequence[Home], manifest: Manifest) -> None:
    """Check that some copy of every file of a checkpoint has the right size.

    Args:
        listings: of the tiers, nearest first.
        manifest: the checkpoint.

    Raises:
        NotFound: a file is missing.
        Corrupt: a file has another size.
    """
    key = manifest.step, manifest.attempt
    copies = [listing.saved.get(key, Saved(*key)) for listing in listings]
    for file in manifest.parts:
        rank = file.rank
        sizes = [(file.part_bytes, one.parts.get(rank)) for one in copies]
        _check_sizes(names.part(*key, rank), sizes, manifest.step, rank)
        sizes = [(file.data_bytes, one.data.get(rank)) for one in copies]
        _check_sizes(names.data(*key, rank), sizes, manifest.step, rank)
        if file.frozen_bytes is not None:
            sizes = [(file.frozen_bytes, one.frozen.get(rank)) for one in copies]
            _check_sizes(names.frozen(*key, rank), sizes, manifest.step, rank)


def check_listed(store: Store, manifest: Manifest, *, besides: Sequence[Home] = ()) -> None:
    """Check by listings that some copy of every file of a checkpoint has the right size.

    Args:
        store: the home, in one copy or several.
        manifest: the checkpoint.
        besides: listings of nearer places.

    Raises:
        NotFound: a file is missing.
        Corrupt: a file has another size.
        RetryLater, Denied: a copy could not be listed, and the others do not have every file.
    """
    listings, unread = list(besides), []
    for copy in store.copies():
        try:
            listings.append(list_home(copy, step=manifest.step))
        except (Denied, RetryLater) as error:
            unread.append(error)
    if not listings:
        raise unread[0]
    try:
        check_files(listings, manifest)
    except (Corrupt, NotFound):
        if unread:
            raise unread[0] from None
        raise


def _check_sizes(name: str, sizes: list[tuple[int, int | None]], step: int, rank: int) -> None:
    """Raise what is wrong with the nearest copy that is there, unless one is as expected.

    Args:
        sizes: (expected, found) for each tier.
    """
    errors = [size_error(name, expected, found, step=step, rank=rank) for expected, found in sizes]
    if None not in errors:
        wrong = [error for error in errors if isinstance(error, Corrupt)]
        raise (wrong or [error for error in errors if error])[0]


def size_error(
    name: str, expected: int, found: int | None, *, step: int, rank: int
) -> NotFound | Corrupt | None:
    """What is wrong with a file of `found` bytes (None: there is none), if anything."""
    if found is None:
        return NotFound(f"{name} is missing: expected {expected} bytes.", step=step, rank=rank, key=name)
    if found == expected:
        return None
    how = "truncated" if found < expected else "too long"
    message = f"{name} is {how}: expected {expected} bytes, found {found}."
    return Corrupt(message, step=step, rank=rank, key=name)


def read_part(store: Store, manifest: Manifest, rank: int) -> Part:
    """A rank's part, after checking that it is the one that was committed.

    Raises:
        NotFound: no such part.
        Corrupt: damaged, or not the one that the manifest names.
        Unsupported: written by a newer format.
        RetryLater: the store failed.
    """
    return first_good(store, lambda copy: _read_part(copy, manifest, rank))


def _read_part(store: Store, manifest: Manifest, rank: int) -> Part:
    name = names.part(manifest.step, manifest.attempt, rank)
    text = store.get(name)
    expected, found = manifest.parts[rank].part_xxh3, digest(text)
    if found != expected:
        message = (
            f"{name} is not the part that was committed: expected {manifest.parts[rank].part_bytes} bytes "
            f"with xxh3:{expected}, found {len(text)} bytes with xxh3:{found}."
        )
        raise Corrupt(message, step=manifest.step, rank=rank, key=name)
    part = part_format.parse(text, name)
    check_part(part, rank, name)
    expected_sizes = manifest.parts[rank].data_bytes, manifest.parts[rank].frozen_bytes
    sizes = part.file.num_bytes, None if part.frozen is None else part.frozen.num_bytes
    if sizes != expected_sizes:
        message = f"{name} and the manifest disagree about data files: {sizes} and {expected_sizes} bytes."
        raise Corrupt(message, step=manifest.step, rank=rank, key=name)
    return part


def check_part(part: Part, rank: int, name: str) -> None:
    """Check that a part can be read with: its rank, its chunk size, and that its pieces lie inside its file.

    A stranger's part may be sealed and still ask for reads outside its file or for buffers without bound.

    Raises:
        Corrupt: something in it does not hold.
    """
    if part.rank != rank:
        raise Corrupt(f"{name} is the part of rank {part.rank}.", step=part.step, rank=rank, key=name)
    for file in part.files.values():
        if not 0 < file.chunk_bytes <= MAX_CHUNK_BYTES or file.chunk_bytes % BLOCK_BYTES:
            message = (
                f"{name} has chunks of {file.chunk_bytes} bytes: expected a multiple of 4 KiB up to 8 MiB."
            )
            raise Corrupt(message, step=part.step, rank=rank, key=name)
    sizes = {False: part.file.num_bytes, True: part.frozen.num_bytes if part.frozen else -1}
    left = dict(sizes)  # bytes that no piece has: shared ones would let a small file ask for any memory
    for piece, start in zip(part.pieces, part.starts, strict=True):
        is_inside = _is_box(piece) and 0 <= start <= sizes[piece.frozen] - piece.num_bytes
        left[piece.frozen] -= piece.num_bytes if is_inside else 0
        if not is_inside or (left[piece.frozen] < 0 and piece.num_bytes):
            where = f"{list(piece.lengths)} at {list(piece.offsets)} of {piece.dtype}{list(piece.shape)}"
            message = f"{name} places {shown(piece.name)} at byte {start} as {where}, which cannot be."
            raise Corrupt(message, step=part.step, rank=rank, key=piece.name)


def _is_box(piece: Piece) -> bool:
    if piece.lengths == piece.shape and not any(piece.offsets):
        return len(piece.offsets) == len(piece.shape) and min(piece.shape, default=0) >= 0
    if not len(piece.offsets) == len(piece.lengths) == len(piece.shape):
        return False
    sides = zip(piece.offsets, piece.lengths, piece.shape, strict=True)
    return all(0 <= offset <= offset + length <= size for offset, length, size in sides)


def finish_commits(store: Store, home: Home, run_id: str | None) -> list[tuple[int, int]]:
    """Write the manifest of every save that is whole but for it: its keeper fell between part and manifest.

    Returns:
        (step, attempt) of what is now committed and was not in `home`.

    Raises:
        RetryLater: the store failed; what was finished before stays finished.
    """
    return [key for key, one in sorted(home.saved.items()) if finish_commit(store, one, run_id)]


def finish_commit(store: Store, saved: Saved, run_id: str | None) -> bool:
    """Write the manifest of one save if everything else of it is there.

    A save whose parts are missing, damaged or do not belong together is left as it is: nothing was ever
    promised about it.

    Returns:
        True if it is committed now and was not in the listing, by whomever.

    Raises:
        RetryLater: the store failed.
    """
    merged = merge_saved(store, saved, run_id)
    if merged is None:
        return False
    folder = names.step_dir(saved.step)
    store.sync(folder)  # its parts are visible, and their writers dead before the fsync perhaps
    try:
        store.put(names.manifest(saved.step, saved.attempt), manifest_format.document(merged), if_absent=True)
    except Conflict:  # its own keeper, or another rank's restore, was first
        store.sync(folder)
    note_saved(store, merged.run, saved.attempt, saved.step)
    return True


def merge_saved(store: Store, saved: Saved, run_id: str | None) -> Manifest | None:
    """Return the manifest that a save lacks, if everything else of it is there; writes nothing.

    Raises:
        RetryLater: the store failed.
    """
    if saved.is_committed or not saved.parts or saved.parts.keys() != saved.data.keys():
        return None
    try:
        parts = (read_draft(store, saved, rank) for rank in sorted(saved.parts))
        merged = manifest_format.merge(parts, id=uuid.uuid4().hex, created_unix_s=time.time())
    except (Corrupt, NotFound, Unsupported, InvalidInput):
        return None
    return merged if run_id in (None, merged.run) else None


def merge_in_memory(store: Store, step: int, attempt: int, run_id: str | None) -> Store | None:
    """Return a store with the manifest of a save that lacks only this; None if it has one by now.

    For readers, who must not commit what a living writer may be about to commit or refuse.

    Raises:
        RetryLater: the store failed.
    """
    for copy in store.copies():
        saved = list_home(copy, step=step).saved.get((step, attempt))
        merged = None if saved is None else merge_saved(copy, saved, run_id)
        if merged is not None:
            made = MemoryStore("manifest")
            made.put(names.manifest(step, attempt), manifest_format.document(merged))
            return made
    return None


def read_draft(store: Store, saved: Saved, rank: int) -> tuple[Part, bytes]:
    """A rank's part of a save that need not be committed, checked against the files that are beside it.

    Raises:
        NotFound: no such part.
        Corrupt: damaged, or not of the files beside it.
        Unsupported: written by a newer format.
        RetryLater: the store failed.
    """
    name = names.part(saved.step, saved.attempt, rank)
    text = store.get(name)
    part = part_format.parse(text, name)
    check_part(part, rank, name)
    frozen_bytes = part.frozen.num_bytes if part.frozen else saved.frozen.get(rank)
    found = saved.step, saved.attempt, saved.data[rank], saved.frozen.get(rank)
    if (part.step, part.attempt, part.file.num_bytes, frozen_bytes) != found:
        message = f"{name} does not describe the data file beside it."
        raise Corrupt(message, step=saved.step, rank=rank, key=name)
    return part, text
