"""Upload of data files to a bucket, compressed where its link is slower than a core compresses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.compression import BLOCK_BYTES, compress
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.persist import paced, verified_blocks
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.bucket import ObjectStore
from holdfast.errors import HoldfastError

_FILES_PER_BASE = 4
"""Files that are differences to the same base: later ones are less like it."""
_LEAST_WIRE_SHARE = 0.2
"""Share of an upload's time that it waits for the link; below it, the link is faster than the compression."""


class _Base(Struct):
    """File that the next files of a rank are differences to. It has a name of its own in both tiers."""

    checkpoint: CheckpointId
    name: str
    file: DataFile
    num_files: int = 0


class CompressingUpload:
    """Upload of the data files of a keeper's ranks, one after the other."""

    def __init__(self, local: Store, home: Store, config: KeeperConfig) -> None:
        assert isinstance(home, ObjectStore)  # as `Tiers` has checked
        self._local, self._home, self._config = local, home, config
        self._sent_per_s: float | None = None  # bytes; None until a file is sent as it is
        self._bases: dict[int, _Base] = {}
        self.delete_local_bases()  # of a keeper that was killed

    def send(self, name: str, file: DataFile, *, if_absent: bool) -> None:
        """Put a data file, as `Store.put_parts`."""
        facts = names.parse(name)
        assert facts is not None
        base = self._bases.get(facts.rank)
        if base is not None and base.num_files >= _FILES_PER_BASE:
            base = None
        began_s = time.monotonic()
        found = _Compressing(self._pairs(name, file, base))
        first_bytes = min(BLOCK_BYTES, file.num_bytes)
        if facts.kind != "data" or not found.saves_time(first_bytes, self._sent_per_s):
            blocks = paced(verified_blocks(self._local, name, file), self._config.bandwidth)
            self._home.put_parts(name, blocks, file.num_bytes, if_absent=if_absent)
            self._sent_per_s = file.num_bytes / (time.monotonic() - began_s)
            return
        parts = paced(found.parts(), self._config.bandwidth)
        number = None if base is None else base.checkpoint
        self._home.put_compressed(name, number, parts, file.num_bytes, if_absent=if_absent)
        seconds = time.monotonic() - began_s
        is_slow = seconds - found.seconds >= _LEAST_WIRE_SHARE * seconds
        self._sent_per_s = found.num_bytes / seconds if is_slow else None
        if base is not None:
            base.num_files += 1
        elif facts.attempt == self._config.attempt:
            self._make_base(name, file, facts)

    def _pairs(
        self, name: str, file: DataFile, base: _Base | None
    ) -> Iterator[tuple[memoryview, memoryview | None]]:
        """Yield the blocks of a file, each with that of the base."""
        olds = iter(()) if base is None else self._blocks_of(base)
        for block in verified_blocks(self._local, name, file):
            old = next(olds, None)
            for start in range(0, len(block), BLOCK_BYTES):
                piece = slice(start, start + BLOCK_BYTES)
                yield block[piece], None if old is None else old[piece]

    def _blocks_of(self, base: _Base) -> Iterator[memoryview]:
        # Verified, since a difference to damaged bytes could never be read. Without it only bytes are lost.
        with contextlib.suppress(HoldfastError):
            yield from verified_blocks(self._local, base.name, base.file)

    def _make_base(self, name: str, file: DataFile, facts: names.Parsed) -> None:
        """Give a file without differences another name in both tiers, so that it outlives its step."""
        base = _Base(facts.checkpoint_id, names.base(facts.step, facts.attempt, facts.rank), file)
        before = self._bases.pop(facts.rank, None)
        with contextlib.suppress(HoldfastError):  # then the next files are larger: not all stores can link
            if before is not None:
                self._local.delete(before.name)
            self._local.link(name, base.name)
            self._home.link(name, base.name)
            self._bases[facts.rank] = base
            if self._config.rank == 0:
                for unused in self._home.unused_bases(self._config.attempt):
                    self._home.delete(unused)

    def delete_local_bases(self) -> None:
        """Delete the bases of this keeper's ranks in the local tier."""
        with contextlib.suppress(HoldfastError):
            for entry in self._local.list("bases/"):
                facts = names.parse_record("base", entry.name)
                if facts is not None and self._config.is_responsible_for(facts.rank):
                    self._local.delete(entry.name)


class _Compressing:
    """Compression of one file, and its measurement: bytes so far, and the time of a core that they took."""

    def __init__(self, blocks: Iterator[tuple[memoryview, memoryview | None]]) -> None:
        self._parts = compress(blocks)
        self.num_bytes, self.seconds = 0, 0.0
        self._first = b""

    def saves_time(self, first_bytes: int, sent_per_s: float | None) -> bool:
        """Compress the first block. Return True if that costs a core less time than it saves."""
        if sent_per_s is None:
            return False
        self._first = self._next() or b""
        return sent_per_s * self.seconds < first_bytes - self.num_bytes

    def parts(self) -> Iterator[bytes]:
        """Yield the compressed form of the file."""
        yield self._first
        yield from iter(self._next, None)

    def _next(self) -> bytes | None:
        began_s = time.thread_time()
        part = next(self._parts, None)
        self.seconds += time.thread_time() - began_s
        self.num_bytes += len(part or b"")
        return part
