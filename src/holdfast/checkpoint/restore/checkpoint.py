"""A checkpoint opened for reading, without a model: its facts, tensors, values and verification."""

from __future__ import annotations

import datetime
import difflib
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Union

from msgspec import Struct

from holdfast.checkpoint.format import values as value_format
from holdfast.checkpoint.format.composites import shown_type
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.nesting import composites
from holdfast.checkpoint.format.value_index import ValueIndex
from holdfast.checkpoint.home import newest
from holdfast.checkpoint.home.listing import Listing, candidates
from holdfast.checkpoint.home.metrics import read_metrics, read_values
from holdfast.checkpoint.home.newest import Patience, Skipped
from holdfast.checkpoint.restore import verify as verifying
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.slices import SLICE_BYTES, TensorSlice, read_slices
from holdfast.checkpoint.restore.verify import VerifyReport
from holdfast.checkpoint.retention import best_first, check_mode, line_of
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.command_limit import command_limit
from holdfast.checkpoint.store.contract import Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import Corrupt, HoldfastError, InvalidInput, MissingKey, NotFound
from holdfast.system.units import parse_duration, plural

if TYPE_CHECKING:
    import torch

    from holdfast.checkpoint.restore.fill import Loaded

_T = TypeVar("_T")
HomeLike = Union[str, "os.PathLike[str]", Store]


class TensorInfo(Struct, frozen=True):
    """Facts about a tensor from the manifest. `dtype` is a safetensors name, such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]
    owner: int | str  # the rank that saved it; "each": every rank has its own; "split": several hold regions
    tied_to: str | None  # the name whose bytes these are

    @property
    def num_items(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_items * ITEM_BYTES[self.dtype]


class Checkpoint:
    """One complete checkpoint, opened by `open`. Reads files on demand, and verifies every byte.

    Attributes:
        manifest: its tensors, ranks and files; reading it needs no other file.
        skipped: newer checkpoints that `open` skipped, since their manifests are damaged.
    """

    def __init__(self, store: Store, manifest: Manifest, skipped: tuple[Skipped, ...] = ()) -> None:
        self.manifest = manifest
        self.skipped = skipped
        self._parts = Parts(store, manifest)

    def __repr__(self) -> str:
        return f"<Checkpoint of {self._parts.store.url}: step {self.step}, attempt {self.attempt}>"

    @property
    def step(self) -> int:
        """Number of optimizer steps completed when it was taken."""
        return self.manifest.step

    @property
    def attempt(self) -> int:
        """Number of the attempt that saved it."""
        return self.manifest.attempt

    @property
    def world_size(self) -> int:
        """Number of ranks that saved it."""
        return self.manifest.world_size

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.manifest.run

    @property
    def created(self) -> float:
        """Unix time of the commit, in seconds, by the clock of the machine that committed."""
        return self.manifest.created_unix_s

    def metrics(self) -> dict[str, float]:
        """Return the metrics that were recorded for this checkpoint, such as its loss, by name.

        Raises:
            Corrupt: their document is damaged.
            Unsupported: it was written by a newer format.
            RetryLater: the store failed.
        """
        return read_metrics(self._parts.store, self.manifest.checkpoint_id)

    def keys(self) -> list[str]:
        """Names of all tensors, tied ones included."""
        return [*self.manifest.tensors, *self.manifest.tied]

    def __contains__(self, key: object) -> bool:
        return key in self.manifest.tensors or key in self.manifest.tied

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.manifest.tensors) + len(self.manifest.tied)

    def info(self, key: str) -> TensorInfo:
        """Return the facts about a tensor; for a per-rank one, those of the first rank.

        Raises:
            NotFound: no such tensor.
        """
        name = self._name(key)
        tensor = self.manifest.tensors[name]
        return TensorInfo(tensor.dtype, tensor.shape, tensor.owner, name if name != key else None)

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return a verified tensor on the CPU; for a per-rank one, that of the first rank.

        Raises:
            NotFound: no such tensor, or a file is missing.
            Corrupt: damage was found.
            RetryLater: the store failed.
        """
        return self.tensor(key)

    def tensor(self, key: str, *, rank: int = 0) -> torch.Tensor:
        """Return a rank's tensor, verified, on the CPU. Reads only the chunks that hold it.

        Raises:
            NotFound: no such tensor, that rank has none, or a file is missing.
            Corrupt: damage was found.
            RetryLater: the store failed.
        """
        name = self._name(key)
        self._parts.part(rank)  # raises for a rank that did not save
        found = self._read([name], rank, num_threads=4)
        if name not in found:
            raise MissingKey(
                f"{key} is a tensor per rank, and rank {rank} saved none at step {self.step}.",
                step=self.step,
                rank=rank,
                key=key,
            )
        return found[name]

    def tensors(
        self, rank: int = 0, *, keys: Sequence[str] | None = None, num_threads: int = 4
    ) -> dict[str, torch.Tensor]:
        """Return a rank's tensors by name, verified, on the CPU. Tied names share one tensor.

        Args:
            rank: rank whose per-rank tensors are returned; a tensor that it did not save is left out.
            keys: names of the tensors; all by default.
            num_threads: threads that read and hash.

        Raises:
            NotFound: no such tensor, or a file is missing.
            Corrupt: damage was found.
            RetryLater: the store failed.
        """
        self._parts.part(rank)
        chosen = {key: self._name(key) for key in (self.keys() if keys is None else keys)}
        found = self._read(list(dict.fromkeys(chosen.values())), rank, num_threads)
        return {key: found[name] for key, name in chosen.items() if name in found}

    def state_dict(
        self, key: str = "model", *, rank: int = 0, num_threads: int = 4
    ) -> dict[str, torch.Tensor]:
        """Return the state dict of a saved module: whole tensors, verified, on the CPU.

        Args:
            key: key of the module in the saved state.
            rank: rank whose per-rank tensors are returned; a tensor that it did not save is left out.
            num_threads: threads that read and hash.

        Raises:
            NotFound: nothing was saved under that key, or a file is missing.
            Corrupt: damage was found.
            RetryLater: the store failed.
        """
        prefix = f"{key}."
        wanted = [name for name in self.keys() if name.startswith(prefix)]
        if not wanted:
            held = sorted({name.partition(".")[0] for name in self.keys()})
            raise MissingKey(
                f"Step {self.step} holds no tensors under {key!r}; it has {', '.join(held) or 'none'}.",
                step=self.step,
                key=key,
            )
        found = self.tensors(rank, keys=wanted, num_threads=num_threads)
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def load_into(
        self,
        target: torch.nn.Module | MutableMapping[str, Any],
        key: str | None = None,
        *,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        num_threads: int = 4,
    ) -> Loaded:
        """Load this checkpoint into live objects, verified. Training may save to the home meanwhile.

        Only reads: nothing in the home changes, and no attempt is claimed. A rank reads the chunks that hold
        its parts of sharded tensors (DTensor, FSDP2), whatever layout was saved. Random number generators
        stay as they are.

        Args:
            target: a module; or objects by key, as a Checkpointer takes them, whose plain values are written
                back into the mapping; or tensors by name, such as a state dict, which are filled in place.
            key: key of the module in the saved state, by default "model"; or the prefix of the names of
                tensors.
            strict: refuse a checkpoint whose names differ from those of `target`.
            rename: saved names to names in `target`: a map of prefixes, or a function.
            num_threads: threads that read, hash and copy.

        Returns:
            The names in which the two differ.

        Raises:
            InvalidInput: the checkpoint does not fit; the message lists the differences. Nothing was changed.
            NotFound: a file is missing.
            Corrupt: damage was found; `target` may have been partly filled.
            RetryLater: the store failed; `target` may have been partly filled.

        Ranks: not collective; but with FSDP1, whose state dicts are, every rank calls it.
        Blocks: until `target` is filled.
        """
        from holdfast.checkpoint.restore.fill import load_into  # not above: reading does not need torch

        return load_into(self._parts, target, key, strict=strict, rename=rename, num_threads=num_threads)

    def values(self, rank: int = 0) -> dict[str, Any]:
        """Return the values that a rank saved, by top-level key. A `TensorRef` replaces each tensor.

        `dcp.save` divides the values among the ranks. Those are by name, and the same for every rank.

        Raises:
            NotFound: the rank's part is missing.
            Corrupt: the rank's part is damaged.
            Unsupported: it holds a value that this version does not know.
            RetryLater: the store failed.
        """
        encoded = self._parts.part(rank).values
        index = self._parts.value_index()
        try:
            if index is not None:
                encoded = {name: self._parts.part(of).values[name] for name, of in index.ranks.items()}
            return {key: value_format.decode(value) for key, value in encoded.items()}
        except HoldfastError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise Corrupt(
                f"The values of rank {rank} at step {self.step} cannot be decoded: {error!r}.",
                step=self.step,
                rank=rank,
            ) from error

    def value_index(self) -> ValueIndex | None:
        """Return the index of values and paths that `dcp.save` has written; None for other checkpoints.

        Raises:
            HoldfastError: as `values`.
        """
        return self._parts.value_index()

    def verify(self, on_bytes: Callable[[int], None] | None = None, num_threads: int = 4) -> VerifyReport:
        """Hash every byte of every file of every rank, and collect all damage.

        Args:
            on_bytes: called with the bytes of each read when hashed; never by two threads at once.
            num_threads: threads that read and hash.

        Raises:
            RetryLater: the store cannot even be listed.

        Blocks: until everything has been read once.
        """
        return verifying.verify(self._parts.store, self.manifest, num_threads=num_threads, on_bytes=on_bytes)

    def slices(
        self,
        keys: Sequence[str] | None = None,
        *,
        rank: int = 0,
        slice_bytes: int = SLICE_BYTES,
        num_threads: int = 4,
    ) -> Iterator[TensorSlice]:
        """Yield slices of tensors in order: verified bytes, with bounded memory. Does not import torch.

        Args:
            keys: names of the tensors, in order; by default all but tied ones. A tied one comes under the
                name that its bytes are stored under.
            rank: rank whose per-rank tensors are read; a tensor that it did not save is left out.
            slice_bytes: limit of the memory; a larger tensor comes in several slices.
            num_threads: threads that read and hash.

        Raises:
            NotFound: no such tensor, or a file is missing.
            Corrupt: damage was found; the slices before it are good.
            RetryLater: the store failed.
        """
        self._parts.part(rank)
        names = list(self.manifest.tensors) if keys is None else [self._name(key) for key in keys]
        return read_slices(self._parts, names, rank, slice_bytes=slice_bytes, num_threads=num_threads)

    def facts(self, rank: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the safetensors dtype and the shape of every tensor of a rank, aliases included.

        Raises:
            NotFound: a part is missing.
            Corrupt: a part is damaged.
            RetryLater: the store failed.
        """
        self._parts.part(rank)
        found = {name: self._parts.shape_of(name, rank) for name in self.manifest.tensors}
        facts = {name: saved for name, saved in found.items() if saved is not None}
        facts.update({key: facts[name] for key, name in self.manifest.tied.items() if name in facts})
        return facts

    def _name(self, key: str) -> str:
        name = self.manifest.tied.get(key, key)
        if name in self.manifest.tensors:
            return name
        inner = [one for one in self.keys() if one.startswith(f"{key}.")]
        if inner and (kind := self._composite_type(key)) is not None:
            raise MissingKey(
                f"{key} of step {self.step} was saved as {kind}, which is made of {', '.join(inner)}. Read "
                "these, or fill a live tensor of the same type with load_into().",
                step=self.step,
                key=key,
            )
        close = difflib.get_close_matches(key, self.keys(), n=3)
        hint = (
            f"Did you mean {' or '.join(close)}?"
            if close
            else f"It holds {plural(len(self), 'other')}; see keys()."
        )
        raise MissingKey(f"Step {self.step} holds no tensor {key!r}. {hint}", step=self.step, key=key)

    def _composite_type(self, key: str) -> str | None:
        """Return the type of the composite tensor with a name, or None."""
        for top, value in self.values().items():
            for path, saved in composites(value, top):
                if path == key:
                    return shown_type(saved.type, saved.facts)
        return None

    def _read(self, wanted: list[str], rank: int, num_threads: int) -> dict[str, torch.Tensor]:
        import torch  # not above: reading a checkpoint does not need it

        from holdfast.checkpoint.format.layout import FillTarget
        from holdfast.checkpoint.restore.fill import fill
        from holdfast.checkpoint.state.tensors import torch_dtype

        found = {}
        for name in wanted:
            saved = self._parts.shape_of(name, rank)
            if saved is not None:
                found[name] = torch.empty(saved[1], dtype=torch_dtype(saved[0]), device="cpu")
        targets = {name: [FillTarget(tensor)] for name, tensor in found.items()}
        fill(self._parts, targets, rank, num_threads=num_threads)
        return found


def open(
    home: HomeLike,
    step: int | None = None,
    attempt: int | None = None,
    *,
    best: str | None = None,
    mode: str | None = None,
    patience: str | float | datetime.timedelta = "20s",
) -> Checkpoint:
    """Open a checkpoint for reading. Needs no model, runs no code from it, and does not import torch.

    Args:
        home: path or URL of a run's checkpoints.
        step: step of the checkpoint; by default the newest complete one whose manifest can be read.
        attempt: attempt of the checkpoint, if several saved that step; by default the newest.
        best: name of a metric; opens the checkpoint with its best value, of those that the newest continues.
        mode: "min" if lower values of `best` are better, "max" if higher ones are. By default as in the
            run's `Keep(metric=..., mode=...)`; "min" for a metric that it does not keep checkpoints by.
        patience: time limit for retries of failed reads, in seconds or as "2m". An older checkpoint is never
            opened because a newer one could not be read.

    Raises:
        NotFound: no complete checkpoint there, or none of that step, or none with a value of `best`.
        InvalidInput: `best` with `step` or `attempt`, an unknown `mode`, or another one than the run's own.
        Corrupt: none of the checkpoints that match has a manifest that can be read.
        Unsupported: written by a newer format, or a kind of store that this version does not read.
        RetryLater: the store failed until the patience ended.
        Denied: the store refuses access.

    Blocks: while the store does not answer, for `patience`.
    """
    if best is not None and (step, attempt) != (None, None):
        raise InvalidInput("Give best= or a step and an attempt, not both: each chooses a checkpoint.")
    if mode is not None:
        check_mode(mode)
    store = home if isinstance(home, Store) else open_store(home)
    waits = Patience(_limit_s(store, patience), command_limit.notify)

    def read() -> Checkpoint:
        return _open_listed(store, step, attempt, best, mode, waits)

    return read() if step is not None else newest.from_listing(read)


def _open_listed(
    store: Store, step: int | None, attempt: int | None, best: str | None, mode: str | None, waits: Patience
) -> Checkpoint:
    home, matching = list_matching(store, waits, step, attempt)
    manifest, skipped = choose(store, matching, lambda manifest: manifest, waits)
    if best is not None:
        line = line_of(candidates(home), manifest.checkpoint_id, manifest.ancestors).current
        found = waits.spend(store.url, lambda: read_values(store, best, line))
        matching = best_first(line, found.values, found.choose_mode(mode, best))
        if not matching:
            raise NotFound(f"{store.url} holds no checkpoint with a finite value of {best!r}.")
        manifest, worse = choose(store, matching, lambda manifest: manifest, waits)
        skipped = tuple(dict.fromkeys((*skipped, *worse)))
    return Checkpoint(store, manifest, skipped)


def list_matching(
    store: Store, waits: Patience, step: int | None, attempt: int | None = None
) -> tuple[Listing, list[CheckpointId]]:
    """Return the listing of a home, and its complete checkpoints of a step and attempt, newest first."""
    home = newest.list_patiently(store, waits)
    every = candidates(home)
    matching = [one for one in every if step in (None, one.step) and attempt in (None, one.attempt)]
    if not matching:
        raise newest.no_such_checkpoint(store.url, every, step, attempt)
    return home, matching


def choose(
    store: Store, found: Sequence[CheckpointId], load: Callable[[Manifest], _T], waits: Patience
) -> tuple[_T, tuple[Skipped, ...]]:
    """Return the result of `load` for the first checkpoint that verifies, and those skipped before it."""
    skipped: dict[Skipped, HoldfastError] = {}
    for loaded in newest.usable(store, found, load, waits, skipped):
        return loaded, tuple(skipped)
    raise next(iter(skipped.values()))


def _limit_s(store: Store, patience: str | float | datetime.timedelta) -> float:
    limit_s = parse_duration(patience, "patience")
    if command_limit.limit_s is None:
        return limit_s
    return (
        command_limit.limit_s if isinstance(store, LocalStore) else 0.0
    )  # a bucket has spent it on its requests
