"""Format versions: every document states its own, and each version that can be read has a parser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from holdfast.errors import Corrupt, Unsupported
from holdfast.system.documents import Fields, shown

_Parser = TypeVar("_Parser", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class Versions(Generic[_Parser]):
    """Versions of one kind of document that can be read, each with its parser.

    A new version is one more entry of `parsers`; the older ones stay. `written` follows when every reader in
    use can read it. A document with content that `written` does not allow has a greater version.
    """

    kind: str
    written: int
    parsers: Mapping[int, _Parser]

    @property
    def header(self) -> dict[str, Any]:
        """First members of a document that is written."""
        return self.header_of(self.written)

    def header_of(self, version: int) -> dict[str, Any]:
        """Return the first members of a document of a version."""
        return {"format": self.kind, "version": version}

    def parser(self, body: Fields, what: str) -> _Parser:
        """Return the parser of the version that a document states.

        Raises:
            Corrupt: it is another kind of document.
            Unsupported: its version is newer than all that can be read.
        """
        kind = body.members.get("format")
        if kind != self.kind:
            raise Corrupt(f"{what} is a {shown(kind)} document, expected {self.kind!r}.", key=what)
        version = body.members.get("version")
        if type(version) is not int or version not in self.parsers:
            raise Unsupported(
                f"{what} has format version {shown(version)}; this Holdfast reads up to {max(self.parsers)}. "
                "Upgrade it.",
                key=what,
            )
        return self.parsers[version]
