"""Index of values that the ranks of a save have divided, as in DCP; pure."""

from __future__ import annotations

import json

from msgspec import Struct

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES
from holdfast.system.documents import decode_object, read_as, refuse

INDEX = "@dcp"  # key of the index of all ranks' values, in the values of rank 0


class ValueIndex(Struct, frozen=True):
    """Index of the values of all ranks. A reader needs only rank 0's part for it."""

    ranks: dict[str, int]  # rank whose part has a value, by its name
    paths: dict[str, tuple[str | int, ...]]
    """Paths in the nested state dict that are not the names split at dots."""

    def text(self) -> str:
        """Return the index as a JSON string, which is one line wherever values are shown."""
        return json.dumps({"values": self.ranks, "paths": self.paths}, ensure_ascii=False)

    @classmethod
    def parse(cls, text: object, world_size: int) -> ValueIndex:
        """Parse the index of a save by `world_size` ranks."""
        if type(text) is not str:
            refuse("the values", "the index", "a text", text)
        body = decode_object(text, "the index of values", max_bytes=MAX_DOCUMENT_BYTES)
        found, paths = body.fields("values"), body.fields("paths")
        ranks = {name: found.integer(name, at_most=world_size - 1) for name in found.members}
        return cls(
            ranks, {name: read_as(tuple[str | int, ...], paths.array(name), name) for name in paths.members}
        )

    def path(self, name: str) -> tuple[str | int, ...]:
        """Return the path of a tensor or value in the nested state dict."""
        return self.paths.get(name, tuple(name.split(".")))
