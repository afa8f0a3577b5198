"""All checkpoints of a home, each with its state, as a listing and the manifests tell it."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import Corrupt, HoldfastError, NotFound, Unsupported
from holdfast.format import names
from holdfast.format.manifest import Manifest
from holdfast.policy import Line, line_of
from holdfast.restore.find import (
    Home,
    Saved,
    check_files,
    list_home,
    read_manifest,
    read_run,
    read_run_document,
)
from holdfast.store import Store, open_store

COMPLETE, SUPERSEDED, INCOMPLETE = "complete", "superseded", "incomplete"
DAMAGED, UNSUPPORTED = "damaged", "unsupported"
"""States. Damaged: the manifest cannot be read, or a file it names is missing or has another size."""


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

    def as_json(self) -> dict[str, Any]:
        """Its members for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a home holds. `rows` are newest first; the newest is the first complete one."""

    home: Home
    run_id: str | None
    rows: tuple[Row, ...]

    @property
    def newest(self) -> Row | None:
        """What a restore would try first of all that looks whole."""
        return next((row for row in self.rows if row.is_newest), None)


def open_home(place: str) -> tuple[Store, Home]:
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
        run = read_run(store)
    except (Corrupt, Unsupported) as error:
        print(f"holdfast: {error} Going on without it.", file=sys.stderr)
        return None
    return run.id if run else None


def take_inventory(store: Store, home: Home) -> Inventory:
    """Read all manifests of a home and tell the state of everything in it.

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
            check_files([home], manifests[key])
        except (Corrupt, NotFound, Unsupported) as error:
            wrong[key] = error
    found = {(one.attempt, one.step): one.ancestors for one in manifests.values()}
    line = line_of(found, max(found), found[max(found)]) if found else Line((), ())
    superseded = {(step, attempt) for attempt, step in line.superseded}
    whole = (key for key in manifests if key not in wrong and key not in superseded)
    newest = max(whole, key=lambda key: (key[1], key[0]), default=None)
    order = sorted(home.saved, key=lambda key: (key[1], key[0]), reverse=True)
    rows = (
        _row(home.saved[key], manifests.get(key), wrong.get(key), key in superseded, key == newest)
        for key in order
    )
    return Inventory(home, run_id, tuple(rows))


def _row(
    saved: Saved, manifest: Manifest | None, error: HoldfastError | None, superseded: bool, newest: bool
) -> Row:
    reason = str(error) if error else None
    if not saved.is_committed:
        state = INCOMPLETE
        reason = f"no manifest; {len(saved.data)} data files and {len(saved.parts)} parts are there"
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
