"""All checkpoints of a home, each with its state, as a listing and the manifests tell it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound, Unsupported
from holdfast.format import names, run
from holdfast.format.manifest import Manifest
from holdfast.home.documents import check_files, read_manifest, read_run, read_run_document
from holdfast.home.listing import ListedSave, Listing, list_home
from holdfast.policy import Line, line_of
from holdfast.quantity import plural
from holdfast.store import Store, open_store
from holdfast.store.nearest import Nearest

COMPLETE, SUPERSEDED, INCOMPLETE = "complete", "superseded", "incomplete"
DAMAGED, UNSUPPORTED, PASSED = "damaged", "unsupported", "passed over"
"""States. Damaged: the manifest cannot be read, or a file it names is missing or has another size.

Passed over: a restore has found it damaged or could not read it; retention leaves it alone.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint, or what might have become one. `num_bytes` counts all its files."""

    step: int
    attempt: int
    state: str
    is_newest: bool
    ranks: int | None
    num_bytes: int
    created_unix_s: float | None
    base_step: int | None
    reason: str | None  # what is wrong, where the state does not say it
    tiers: tuple[str, ...] = ()  # where it is, nearest first, if more than one place was looked at

    def as_json(self) -> dict[str, Any]:
        """Its members for JSON; `tiers` only where they were asked for."""
        members = asdict(self)
        if not self.tiers:
            del members["tiers"]
        return members


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a home holds. `rows` are newest first; the newest is the first complete one."""

    home: Listing
    run_id: str | None
    rows: tuple[Row, ...]

    @property
    def newest(self) -> Row | None:
        """What a restore would try first of all that looks whole."""
        return next((row for row in self.rows if row.is_newest), None)


def open_home(place: str) -> tuple[Store, Listing]:
    """The store and the listing of a home that exists.

    Raises:
        NotFound: there is no home.
        InvalidInput: no place that can be.
        Unsupported: a kind of place that this version does not read.
        RetryLater: the store failed.
    """
    store = open_store(place)
    home = list_home(store)
    if not home.saved and not home.attempts and store.size(names.RUN) is None:
        found = re.fullmatch(r"(.*?)/*(step-\d{8,})/?", place)
        hint = f"HOME is the folder above it: {found[1] or '.'}." if found else "Check the path."
        message = f"{place} holds no run: there is no {names.RUN} and no checkpoint in it. {hint}"
        raise NotFound(message)
    return store, home


def read_run_id(store: Store) -> str | None:
    """Id of the run that a home holds; a damaged `holdfast.json` is told on stderr and passed over."""
    try:
        read_run_document(store)
    except Corrupt as error:
        print(f"holdfast: {error} Going on with what the rest of the home says.", file=sys.stderr)
    try:
        found = read_run(store)
    except (Corrupt, Unsupported) as error:
        print(f"holdfast: {error} Going on without it.", file=sys.stderr)
        return None
    return found.id if found else None


def open_tiers(place: str, local: str) -> tuple[Store, Listing, dict[str, Listing]]:
    """A home and a host's local folder as one store, with its listing and those of both.

    Raises:
        NotFound: there is no home, or nothing of a run in the folder.
        InvalidInput: the folder holds another run.
        RetryLater: a store failed.
    """
    home, in_home = open_home(place)
    near, in_near = open_home(local)
    runs = read_run(home), read_run(near)
    if None not in runs and len({run.id for run in runs if run}) > 1:
        message = f"{local} holds another run than {place}: it is not a local folder of it."
        raise InvalidInput(message)
    store = Nearest([near, home])
    return store, list_home(store), {"local": in_near, "home": in_home}


def take_inventory(store: Store, home: Listing, tiers: Mapping[str, Listing] | None = None) -> Inventory:
    """Read all manifests of a home and tell the state of everything in it.

    Args:
        store: the home, or several tiers of it as one.
        home: its listing.
        tiers: the listing of each tier, to tell for every checkpoint where it is.

    Raises:
        RetryLater: the store failed.
    """
    run_id = read_run_id(store)
    manifests: dict[tuple[int, int], Manifest] = {}
    wrong: dict[tuple[int, int], HoldfastError] = {}
    for key, saved in home.saved.items():
        if not saved.is_committed:
            continue
        try:
            manifests[key] = read_manifest(store, *key, run_id)
            check_files(list(tiers.values()) if tiers else [home], manifests[key])
        except (Corrupt, NotFound, Unsupported) as error:
            wrong[key] = error
    passed = {key: _passed_reason(store, *key) for key, saved in home.saved.items() if saved.was_passed}
    found = {(a, s): one.ancestors for (s, a), one in manifests.items() if (s, a) not in passed}
    line = line_of(found, max(found), found[max(found)]) if found else Line((), ())
    superseded = {(step, attempt) for attempt, step in line.superseded}
    whole = (key for key in manifests if key not in wrong and key not in superseded and key not in passed)
    newest = max(whole, key=lambda key: (key[1], key[0]), default=None)
    order = sorted(home.saved, key=lambda key: (key[1], key[0]), reverse=True)
    rows = (
        _row(home.saved[key], manifests.get(key), wrong.get(key), key in superseded, key == newest)
        for key in order
    )
    rows = (
        replace(row, state=PASSED, reason=passed[row.step, row.attempt])
        if (row.step, row.attempt) in passed
        else row
        for row in rows
    )
    placed = (replace(row, tiers=_tiers_of(row, tiers or {})) for row in rows)
    return Inventory(home, run_id, tuple(placed))


def _passed_reason(store: Store, step: int, attempt: int) -> str:
    """Return why a checkpoint was passed over, as the note about it says."""
    name = names.passed(step, attempt)
    try:
        reason = run.parse(run.Passed, store.get(name), name).reason
    except (Corrupt, NotFound, Unsupported) as error:
        reason = str(error)
    return f"passed over by a restore: {reason}"


def _tiers_of(row: Row, tiers: Mapping[str, Listing]) -> tuple[str, ...]:
    """The tiers that have something of a checkpoint, with the ranks whose files are there if not all are."""
    found: list[str] = []
    for tier, listing in tiers.items():
        saved = listing.saved.get((row.step, row.attempt))
        if saved is None:
            continue
        ranks = sorted(saved.parts.keys() & saved.data.keys())
        is_whole = saved.is_committed and len(ranks) == row.ranks
        found.append(tier if is_whole else f"{tier} (ranks {_say_ranks(ranks)})")
    return tuple(found)


def _say_ranks(ranks: Sequence[int]) -> str:
    """Numbers in a few words: `0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def _row(
    saved: ListedSave, manifest: Manifest | None, error: HoldfastError | None, superseded: bool, newest: bool
) -> Row:
    reason = str(error) if error else None
    if not saved.is_committed:
        state = INCOMPLETE
        reason = (
            f"no manifest; {plural(len(saved.data), 'data file')} and "
            f"{plural(len(saved.parts), 'part')} are there"
        )
    elif error:
        state = UNSUPPORTED if isinstance(error, Unsupported) else DAMAGED
    else:
        state = SUPERSEDED if superseded else COMPLETE
    return Row(
        step=saved.step,
        attempt=saved.attempt,
        state=state,
        is_newest=newest,
        ranks=manifest.world_size if manifest else None,
        num_bytes=saved.num_bytes,
        created_unix_s=manifest.created_unix_s if manifest else None,
        base_step=manifest.base_step if manifest else None,
        reason=reason,
    )
