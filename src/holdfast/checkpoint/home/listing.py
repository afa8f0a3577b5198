"""Listings of a home: which checkpoints it holds, complete or not, and which files each of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.store.contract import ObjectInfo, Store


class ListedSave(OfCheckpoint, Struct):
    """Files of one step of one attempt, complete or not."""

    step: int
    attempt: int
    manifest_bytes: int | None = None  # None: no manifest, so not a checkpoint (yet)
    parts: dict[int, int] = {}  # rank -> bytes
    data: dict[int, int] = {}  # rank -> bytes
    frozen: dict[int, int] = {}  # rank -> bytes of its file of frozen tensors
    was_skipped: bool = False  # a restore has skipped it, see `holdfast.checkpoint.home.newest`
    has_metrics: bool = False  # see `holdfast.checkpoint.home.metrics`

    @property
    def is_committed(self) -> bool:
        """True if it has a manifest, which may be damaged."""
        return self.manifest_bytes is not None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of its manifest, parts and data files, by name."""
        key = self.step, self.attempt
        found = {} if self.manifest_bytes is None else {names.manifest(*key): self.manifest_bytes}
        for name, files in ((names.part, self.parts), (names.data, self.data), (names.frozen, self.frozen)):
            found |= {name(*key, rank): num_bytes for rank, num_bytes in files.items()}
        return found

    @property
    def names(self) -> list[str]:
        """Names of these files, and of its metrics."""
        return [*self.sizes, *([names.metrics(self.step, self.attempt)] if self.has_metrics else [])]

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(self.sizes.values())


class Listing(Struct, frozen=True):
    """One listing of a home."""

    attempts: tuple[int, ...]  # claimed, ascending
    saved: dict[CheckpointId, ListedSave]
    foreign: tuple[str, ...]  # objects in step directories that Holdfast did not write

    def by_step(self) -> list[ListedSave]:
        """Return its saves by step, those of one step by attempt."""
        return sorted(self.saved.values(), key=lambda saved: (saved.step, saved.attempt))


def scan(store: Store, prefix: str = "") -> Iterator[tuple[ObjectInfo, names.Parsed]]:
    """Yield each object of a home with the facts in its name. Every listing of a home comes from here."""
    for entry in store.list(prefix):
        facts = names.parse(entry.name)
        if facts is not None:
            yield entry, facts


def scan_step(store: Store, step: int) -> Iterator[tuple[ObjectInfo, names.Parsed]]:
    """Yield each object of one step, of any attempt, with the facts in its name."""
    return scan(store, f"{names.step_dir(step)}/")


def list_home(store: Store, *, step: int | None = None) -> Listing:
    """List a home once, or only the directory of a step, which has no attempts."""
    attempts: list[int] = []
    foreign: list[str] = []
    saved: dict[CheckpointId, ListedSave] = {}
    notes: list[names.Parsed] = []
    for entry, facts in scan(store) if step is None else scan_step(store, step):
        if facts.kind == "attempt":
            attempts.append(facts.attempt)
            continue
        if facts.kind == "refusal":
            continue  # a message between keepers
        if facts.kind in ("skipped", "metrics"):
            notes.append(facts)
            continue
        if facts.kind == "step-other":
            foreign.append(entry.name)
            continue
        save = saved.setdefault(facts.checkpoint_id, ListedSave(step=facts.step, attempt=facts.attempt))
        if facts.kind == "manifest":
            save.manifest_bytes = entry.num_bytes
        else:
            files = {"part": save.parts, "data": save.data, "frozen": save.frozen}[facts.kind]
            files[facts.rank] = entry.num_bytes
    for facts in notes:
        if noted := saved.get(facts.checkpoint_id):  # else only the note about it is left
            noted.was_skipped |= facts.kind == "skipped"
            noted.has_metrics |= facts.kind == "metrics"
    return Listing(tuple(sorted(attempts)), saved, tuple(sorted(foreign)))


def candidates(listing: Listing) -> list[CheckpointId]:
    """Return everything that has a manifest, newest first."""
    return sorted((one for one, saved in listing.saved.items() if saved.is_committed), reverse=True)


def part_sizes(store: Store, step: int, attempt: int) -> dict[int, int]:
    """Return the size of each part of a save, by rank."""
    found = scan_step(store, step)
    return {one.rank: entry.num_bytes for entry, one in found if (one.kind, one.attempt) == ("part", attempt)}


def missing_ranks(store: Store, writer: WriterId, step: int) -> list[int]:
    """Return the ranks of the writer's attempt that have not written their part of `step`."""
    found = part_sizes(store, step, writer.attempt)
    return [rank for rank in range(writer.world_size) if rank not in found]


def files_of(
    store: Store, is_chosen: Callable[[names.Parsed], bool] = lambda _: True
) -> dict[CheckpointId, list[str]]:
    """Return the names of the chosen files of checkpoints, complete or not, by checkpoint."""
    files: dict[CheckpointId, list[str]] = {}
    for entry, facts in scan(store, "step-"):
        if facts.kind not in ("attempt", "step-other") and is_chosen(facts):
            files.setdefault(facts.checkpoint_id, []).append(entry.name)
    return files


class WriterId(Struct, frozen=True):
    """One rank of one attempt of a run."""

    run: str
    attempt: int
    rank: int
    world_size: int


class LiveTrainer(Struct, frozen=True):
    """A living process that may still save to the home."""

    attempt: int
    rank: int
    pid: int
