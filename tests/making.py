"""Checkpoints for tests, made with the format's own functions, without a trainer or a keeper."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from msgspec.structs import replace

from holdfast.checkpoint.format import manifest, names, part, run, values
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.dtypes import TORCH_NAMES
from holdfast.checkpoint.format.hashes import chunk_bytes_for, digest, hash_chunks
from holdfast.checkpoint.format.layout import (
    EvenPartitioning,
    ListedPartitioning,
    Region,
    Shard,
    lay_out,
    whole,
)
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.sealed import dumps, seal
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.history import History, read_lines
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.keeper import KeeperConfig
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.inbox import TrainerInbox
from holdfast.checkpoint.keeper.messages import KeeperMessage
from holdfast.checkpoint.keeper.reports import Reports
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.contract import Store

RUN_ID = "run-one"
CREATED_UNIX_S = 1_700_000_000.0
_NAMES = {
    getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items() if hasattr(torch, torch_name)
}

LocalShard = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]
"""A rank's part of a tensor: its elements, their offsets, the whole tensor's shape."""


def make_home(store: Store, *, run_id: str = RUN_ID, attempts: Sequence[int] = (1,)) -> None:
    """Make `holdfast.json` and the claims of some attempts."""
    store.put(names.RUN, run.document(run.Run(run_id, CREATED_UNIX_S)))
    for number in attempts:
        claim = run.AttemptClaim(number, run_id, 1, "host", 1000 + number, CREATED_UNIX_S + number)
        store.put(names.attempt(number), run.document(claim))


def history_lines(home: str | os.PathLike[str], *events: str) -> list[dict[str, Any]]:
    """Return the lines of some kinds in the history of a home, by time."""
    return [line for line in read_lines(open_store(home))[0] if line["event"] in events]


def flip(store: Store, name: str, *positions: int) -> None:
    """Flip a bit of some bytes of an object, by default of the last one."""
    content = bytearray(store.get(name))
    for position in positions or (-1,):
        content[position] ^= 16
    store.put(name, content)


def make_checkpoint(
    store: Store,
    step: int,
    attempt: int = 1,
    tensors: Sequence[Mapping[str, torch.Tensor | LocalShard]] = ({},),
    *,
    per_rank: Collection[str] = (),
    tied: Mapping[str, str] | None = None,
    values: Sequence[Mapping[str, Any]] | None = None,
    base: tuple[int, int] | None = None,
    ancestors: Iterable[tuple[int, int]] = (),
    partitionings: Mapping[str, EvenPartitioning] | None = None,
    frozen: Collection[str] = (),
    run_id: str = RUN_ID,
    chunk_bytes: int | None = None,
    commit: bool = True,
    id: str | None = None,
    created_unix_s: float = CREATED_UNIX_S,
    mark: Mark = Mark.NONE,
) -> Manifest:
    """Write a whole checkpoint: every rank's data file and part, and the manifest.

    Args:
        store: the home.
        step: step of the checkpoint.
        attempt: attempt that saves it.
        tensors: what each rank writes; a `LocalShard` where it writes only a region.
        per_rank: names of which every rank writes its own.
        tied: alias -> name.
        values: each rank's values by top-level key, not encoded.
        base: (attempt, step) that the attempt was restored from, as its only ancestor.
        partitionings: the rule of a tensor's regions; without one they are listed.
        frozen: names that stand in the second file.
        commit: write the manifest, which is returned in any case.
        mark: of a watch of the run, about the state.
    """
    catalog = _catalog(tensors, per_rank, frozen, dict(tied or {}), partitionings or {})
    parts = []
    for rank, held in enumerate(tensors):
        written = catalog.written_by(rank)
        shared = [Shard(n, t.dtype, t.shape, *region, frozen=t.frozen) for n, t, region in written]
        own = [
            Shard.whole(name, _NAMES[value.dtype], tuple(value.shape), per_rank=True)
            for name, value in held.items()
            if name in per_rank and isinstance(value, torch.Tensor)
        ]
        files, starts = {}, {}
        for is_frozen in (False, True) if any(shard.frozen for shard in shared) else (False,):
            shards = [shard for shard in (*shared, *own) if shard.frozen == is_frozen]
            layout = lay_out(shards, rank)
            image = bytearray(layout.file_bytes)
            image[: len(layout.header)] = layout.header
            for shard, start in zip(shards, layout.starts, strict=True):
                raw = raw_bytes(_elements(held[shard.name]))
                image[start : start + len(raw)] = raw
                starts[shard.name] = start
            store.put((names.frozen if is_frozen else names.data)(step, attempt, rank), bytes(image))
            files[is_frozen] = data_file(bytes(image), chunk_bytes)
        facts = part.PartFacts(
            run=run_id,
            step=step,
            attempt=attempt,
            rank=rank,
            world_size=len(tensors),
            ancestors=tuple(CheckpointId(*one) for one in ((base,) if base else ancestors)),
            values=_encoded(values[rank] if values else {}),
            own=tuple((shard.name, shard.dtype, shard.shape, starts[shard.name]) for shard in own),
        )
        draft = part.draft(facts, [starts[shard.name] for shard in shared], catalog_text(catalog))
        document = part.finish(draft, files[False], files.get(True))
        store.put(names.part(step, attempt, rank), document)
        parts.append(part.parse(document, "part"))
    merged = manifest.merge(parts, id=id or f"id-{step}-{attempt}", created_unix_s=created_unix_s)
    if mark is not Mark.NONE:
        merged = replace(merged, watches={"toy": Section(1, {}, mark, ("reason",))})
    if commit:
        store.put(names.manifest(step, attempt), manifest.document(merged))
    return merged


def _catalog(
    tensors: Sequence[Mapping[str, torch.Tensor | LocalShard]],
    per_rank: Collection[str],
    frozen: Collection[str],
    tied: dict[str, str],
    partitionings: Mapping[str, EvenPartitioning],
) -> Catalog:
    """The catalog of all ranks: a whole tensor is its writer's, regions follow a rule or are listed."""
    rows: dict[str, list[tuple[int, Region]]] = {}
    found: dict[str, Tensor] = {}
    for rank, held in enumerate(tensors):
        for name, value in held.items():
            if name in per_rank:
                continue
            elements = _elements(value)
            partitioning, shape = whole(rank), tuple(elements.shape)
            if not isinstance(value, torch.Tensor):
                _, offsets, shape = value
                rows.setdefault(name, []).append((rank, Region(offsets, tuple(elements.shape))))
                partitioning = partitionings.get(name) or ListedPartitioning(tuple(rows[name]))
            dtype, writers = _NAMES[elements.dtype], partitioning.ranks
            found[name] = Tensor(dtype, shape, partitioning, writers, name in frozen)
    return Catalog(found, tied)


def _elements(value: torch.Tensor | LocalShard) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def reseal(
    store: Store, name: str, *, catalog: bytes | None = None, starts: list[int] | None = None, **facts: Any
) -> None:
    """Change a sealed document and seal it again, as another writer would have written it.

    It has other members in its first line, and perhaps another only catalog, which a part then names.
    """
    first, *rest = store.get(name).split(b"\n")
    if b'"catalog":"' in first:
        *rest, last = rest
        last = last if catalog is None else catalog
        facts = facts | {"catalog": digest(last)}
        rest = rest if starts is None else [dumps(starts), *rest[1:]]
        text = resealed([b"{" + first[first.index(b",") + 1 :], *rest], facts) + b"\n" + last
    else:
        rest = rest if catalog is None else [catalog]
        text = resealed([b"{" + first[first.index(b",") + 1 :], *rest], facts)
    store.put(name, text)


def resealed(lines: Sequence[bytes], change: Mapping[str, Any]) -> bytes:
    """Seal lines, the first of them with other members; None takes a member away."""
    first, *rest = lines
    body = {name: value for name, value in {**json.loads(first), **change}.items() if value is not None}
    return seal(b"\n".join([json.dumps(body, ensure_ascii=False).encode(), *rest]))


def data_file(image: bytes, chunk_bytes: int | None = None) -> part.DataFile:
    """Size and chunk hashes of a file image."""
    size = chunk_bytes or chunk_bytes_for(len(image))
    return part.DataFile(len(image), size, hash_chunks(memoryview(image), size))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits of any dtype; 0 and 1 for bool."""
    count, top = math.prod(shape) * dtype.itemsize, 2 if dtype is torch.bool else 256
    bits = torch.randint(0, top, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The tensor's row-major bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _encoded(held: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values.encode(value, key) for key, value in held.items()}


def kept(place: Path | str) -> list[CheckpointId]:
    """Return all complete checkpoints of a place, oldest first."""
    return sorted(candidates(list_home(open_store(str(place)))))


def steps_kept(place: Path | str) -> list[int]:
    """Return their steps, in order."""
    return sorted(checkpoint.step for checkpoint in kept(place))


def no_watches() -> KeeperWatches:
    """The halves of the watches in a keeper whose run has none."""

    def run_of(name: str) -> NoReturn:
        raise AssertionError(f"there is no watch {name!r}")

    return KeeperWatches((), run_of, lambda _: {})


class RecordingInbox(TrainerInbox):
    """Inbox that keeps what it would send to the trainer."""

    def __init__(self) -> None:
        super().__init__(None, os.getpid())  # pyright: ignore[reportArgumentType] - nothing is sent
        self.replies: list[KeeperMessage] = []

    def reply(self, message: KeeperMessage) -> None:
        self.replies.append(message)


def make_reports(store: Store, config: KeeperConfig, tier: str = "home") -> tuple[RecordingInbox, Reports]:
    """An inbox, and the reports of a keeper to it."""
    inbox = RecordingInbox()
    return inbox, Reports(History(store, config.writer), inbox, tier, config.home)


def make_components(store: Store, config: KeeperConfig, home: Store | None = None) -> KeeperComponents:
    """The components of a keeper without watches."""
    inbox, reports = make_reports(store, config, "home" if home is None else "local")
    return KeeperComponents(config, inbox, reports, no_watches(), store, home)
