"""Inventory of a home: every checkpoint with its state, and the space for the next save."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.format.run import Metrics, encode_metric
from holdfast.checkpoint.format.sections import UNKNOWN, Health
from holdfast.checkpoint.home.documents import check_files, read_manifest
from holdfast.checkpoint.home.listing import ListedSave, Listing, candidates, list_home
from holdfast.checkpoint.home.metrics import read_document
from holdfast.checkpoint.home.newest import read_reason, was_deleted
from holdfast.checkpoint.retention import CheckpointLine, line_of
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.factory import open_store
from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.system.documents import to_plain
from holdfast.system.units import format_bytes, plural

COMPLETE, SUPERSEDED, INCOMPLETE = "complete", "superseded", "incomplete"
DAMAGED, UNSUPPORTED, SKIPPED = "damaged", "unsupported", "skipped"
"""States. Damaged: the manifest cannot be read, or a file it names is missing or has another size.

Skipped: a restore has found it damaged or could not read it; retention leaves it alone.
"""


class Row(OfCheckpoint, Struct, frozen=True):
    """One checkpoint, or an incomplete save. `num_bytes` counts all its files."""

    step: int
    attempt: int
    state: str
    is_newest: bool
    ranks: int | None
    num_bytes: int
    created_unix_s: float | None
    base_step: int | None
    reason: str | None  # what is wrong, beyond the state
    tiers: tuple[str, ...] = ()  # where it is, nearest first, if several places were listed
    metrics: Mapping[str, float] = {}  # recorded for its step
    metric_steps: Mapping[str, int] = {}  # of those recorded for another
    metric_modes: Mapping[str, str] = {}  # "min" or "max", of its best
    health: Health = UNKNOWN

    def as_json(self) -> dict[str, Any]:
        """Return its members for JSON; `tiers` only if several places were listed."""
        members = to_plain(self)
        members["metrics"] = {name: encode_metric(value) for name, value in self.metrics.items()}
        del members["health"]
        members |= {"healthy": self.health.healthy, "health_reasons": list(self.health.reasons)}
        if not self.tiers:
            del members["tiers"]
        return members


class Inventory(Struct, frozen=True):
    """All checkpoints and incomplete saves of a home, newest first."""

    home: Listing
    run_id: str | None
    rows: tuple[Row, ...]

    @property
    def newest(self) -> Row | None:
        """The checkpoint that a restore would try first."""
        return next((row for row in self.rows if row.is_newest), None)


def take_inventory(
    store: Store, home: Listing, run_id: str | None, tiers: Mapping[str, Listing] | None = None
) -> Inventory:
    """Read all manifests of a home, and return the state of each checkpoint.

    Args:
        store: the home, or several tiers of it as one.
        tiers: the listing of each tier, to find the tiers of every checkpoint.
    """
    manifests: dict[CheckpointId, Manifest] = {}
    troubles: dict[CheckpointId, tuple[str, str]] = {}  # state and reason of what is not complete
    gone: set[CheckpointId] = set()
    for key, saved in home.saved.items():
        if saved.was_skipped:
            troubles[key] = SKIPPED, f"skipped by a restore: {read_reason(store, key)}"
        elif not saved.is_committed:
            data, parts = plural(len(saved.data), "data file"), plural(len(saved.parts), "part")
            troubles[key] = INCOMPLETE, f"no manifest; {data} and {parts} are there"
        if not saved.is_committed:
            continue
        try:
            manifests[key] = read_manifest(store, key, run_id)
            check_files(list(tiers.values()) if tiers else [home], manifests[key])
        except (Corrupt, NotFound, Unsupported) as error:
            if was_deleted(store, key):
                gone.add(key)
                manifests.pop(key, None)
            else:
                state = UNSUPPORTED if isinstance(error, Unsupported) else DAMAGED
                troubles.setdefault(key, (state, str(error)))
    found = {key: one.ancestors for key, one in manifests.items() if not home.saved[key].was_skipped}
    line = line_of(found, max(found), found[max(found)]) if found else CheckpointLine((), ())
    superseded = set(line.superseded)
    newest = max(found.keys() - troubles.keys() - superseded, default=None)
    rows: list[Row] = []
    for key in sorted(home.saved.keys() - gone, reverse=True):
        saved, manifest = home.saved[key], manifests.get(key)
        state, reason = troubles.get(key, (SUPERSEDED if key in superseded else COMPLETE, None))
        metrics = _metrics_of(store, saved)
        ranks = manifest.world_size if manifest else None
        rows.append(
            Row(
                step=key.step,
                attempt=key.attempt,
                state=state,
                is_newest=key == newest,
                ranks=ranks,
                num_bytes=saved.num_bytes,
                created_unix_s=manifest.created_unix_s if manifest else None,
                base_step=manifest.base_step if manifest else None,
                reason=reason,
                tiers=_tiers_of(key, ranks, tiers or {}),
                metrics=metrics.values,
                metric_steps=metrics.of_steps,
                metric_modes=metrics.modes,
                health=manifest.health if manifest else UNKNOWN,
            )
        )
    return Inventory(home, run_id, tuple(rows))


def _metrics_of(store: Store, saved: ListedSave) -> Metrics:
    """Return the metrics of a checkpoint; without values where they are damaged."""
    if saved.has_metrics:
        with contextlib.suppress(Corrupt, Unsupported):
            return read_document(store, saved.checkpoint_id)
    return Metrics("", attempt=saved.attempt, step=saved.step, values={})


def _tiers_of(
    checkpoint: CheckpointId, num_ranks: int | None, tiers: Mapping[str, Listing]
) -> tuple[str, ...]:
    """Return the tiers that have files of a checkpoint, and which ranks' if not all."""
    found: list[str] = []
    for tier, listing in tiers.items():
        saved = listing.saved.get(checkpoint)
        if saved is None:
            continue
        ranks = sorted(saved.parts.keys() & saved.data.keys())
        is_whole = saved.is_committed and len(ranks) == num_ranks
        found.append(tier if is_whole else f"{tier} (ranks {format_ranks(ranks)})")
    return tuple(found)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as `0-3, 6`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


class SaveSpace(Struct, frozen=True):
    """Space of the next save."""

    home: str
    needed_bytes: int  # size of the newest checkpoint, without frozen tensors, which are linked
    free_bytes: int  # for this user, on the file system of the home

    @property
    def trouble(self) -> str:
        """Why the next save does not fit; empty if it does."""
        if self.free_bytes >= self.needed_bytes:
            return ""
        return (
            f"the next save does not fit: the newest checkpoint has {format_bytes(self.needed_bytes)}, and "
            f"{format_bytes(self.free_bytes)} are free"
        )


def is_folder(home: str) -> bool:
    """Return True for a home that is a folder which exists."""
    return "://" not in home and Path(home).is_dir()


def free_bytes(folder: str) -> int:
    """Return the free bytes of a folder's file system for this user."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def measure_space(home: str) -> SaveSpace | None:
    """Return the space of the next save. None: the home is not a folder, or has no checkpoint."""
    if not is_folder(home):
        return None
    listing = list_home(open_store(home))
    newest = next(iter(candidates(listing)), None)
    if newest is None:
        return None
    saved = listing.saved[newest]
    needed = sum(saved.data.values()) + sum(saved.parts.values()) + (saved.manifest_bytes or 0)
    return SaveSpace(home, needed, free_bytes(home))
