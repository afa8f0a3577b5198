"""Index of values that the ranks of a save have divided, as in DCP; pure."""

from __future__ import annotations

import json

from msgspec import Struct

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES, Rank
from holdfast.errors import Corrupt
from holdfast.system.documents import decode_as, read_as, to_plain

INDEX = "@dcp"  # key of the index of all ranks' values, in the values of rank 0


class ValueIndex(Struct, frozen=True, rename={"ranks": "values"}):
    """Index of the values of all ranks. A reader needs only rank 0's part for it."""

    ranks: dict[str, Rank]  # rank whose part has a value, by its name
    paths: dict[str, tuple[str | int, ...]]
    """Paths in the nested state dict that are not the names split at dots."""

    def text(self) -> str:
        """Return the index as a JSON string, which is one line wherever values are shown."""
        return json.dumps(to_plain(self), ensure_ascii=False)

    @classmethod
    def parse(cls, text: object, world_size: int) -> ValueIndex:
        """Parse the index of a save by `world_size` ranks."""
        what = "the index of values"
        found = decode_as(cls, read_as(str, text, what), what, max_bytes=MAX_DOCUMENT_BYTES)
        for name, rank in found.ranks.items():
            if rank >= world_size:
                raise Corrupt(f"{what}: {name} is listed for rank {rank} of {world_size}.", key=name)
        return found

    def path(self, name: str) -> tuple[str | int, ...]:
        """Return the path of a tensor or value in the nested state dict."""
        return self.paths.get(name, tuple(name.split(".")))
