"""Sections of watches in documents: what a watch has found about a checkpoint, and its mark.

The core stores sections and merges their marks. It does not know what they contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from holdfast.checkpoint.format.sealed import dumps
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import Count, decode, read_as

WATCH_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")  # form of the name of a watch
MAX_SECTIONS = 32
MAX_PART_BYTES, MAX_MANIFEST_BYTES = 1 << 20, 64 << 10
"""Largest section in a part and in a manifest, as JSON."""
MAX_REASONS = 32
MAX_REASON_CHARS = 1000
_MAX_DEPTH = 16


class Mark(IntEnum):
    """Opinion of a watch about a checkpoint. Of several opinions, the greatest counts."""

    NONE = 0
    FOR = 1  # it is healthy
    UNSURE = 2
    AGAINST = 3  # it is not healthy


@dataclass(frozen=True, slots=True)
class Section:
    """Finding of a watch about one checkpoint, stored in its documents.

    Attributes:
        version: of the contents of `data`; the watch chooses it.
        data: JSON of the watch.
        mark: opinion about the checkpoint.
        reasons: of the mark, a sentence without its end each.
    """

    version: int
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mark: Mark = Mark.NONE
    reasons: tuple[str, ...] = ()


Sections = Mapping[str, Section]  # sections by the names of their watches
SectionRow = tuple[
    Count,
    Mark,
    Annotated[tuple[Annotated[str, Meta(max_length=MAX_REASON_CHARS)], ...], Meta(max_length=MAX_REASONS)],
    dict[str, Any],
]
SectionRows = Annotated[
    dict[Annotated[str, Meta(pattern=rf"\A{WATCH_NAME.pattern}\Z")], SectionRow],
    Meta(max_length=MAX_SECTIONS),
]
"""Sections in a document: version, mark, reasons and data, by the names of their watches."""


class Health(Struct, frozen=True):
    """Health of a checkpoint, by the marks of all its watches.

    Attributes:
        healthy: None if it is not known.
        reasons: findings; for a checkpoint that is not healthy, those that count against it.
    """

    healthy: bool | None
    reasons: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The judgement as a word: "healthy", "unhealthy" or "unknown"."""
        return "unknown" if self.healthy is None else "healthy" if self.healthy else "unhealthy"


UNKNOWN = Health(None, ("saved without a check of its health",))  # health of a checkpoint without sections


def health_of(sections: Sections) -> Health:
    """Return the health of a checkpoint with these sections in its manifest."""
    mark = max((one.mark for one in sections.values()), default=Mark.NONE)
    is_against = mark is Mark.AGAINST
    chosen = [one for one in sections.values() if not is_against or one.mark is mark]
    reasons = tuple(reason for one in chosen for reason in one.reasons)
    if not reasons:
        return UNKNOWN if mark is Mark.NONE else Health(_HEALTHY[mark])
    return Health(_HEALTHY[mark], reasons)


_HEALTHY = {Mark.NONE: None, Mark.FOR: True, Mark.UNSURE: None, Mark.AGAINST: False}


def merge(found: Iterable[Section]) -> Section | None:
    """Return one section for those of all ranks, from the lowest rank on: its data, and the greatest mark."""
    sections = list(found)
    if not sections:
        return None
    mark = max(one.mark for one in sections)
    reasons = dict.fromkeys(reason for one in sections if one.mark is mark for reason in one.reasons)
    return Section(sections[0].version, sections[0].data, mark, tuple(reasons))


def check(section: Section, *, max_bytes: int) -> Section:
    """Return a section as its document will have it, with as many reasons as fit."""
    if not isinstance(section, Section):  # pyright: ignore[reportUnnecessaryIsInstance] - a user's watch
        raise InvalidInput(f"expected a Section or None, got {section!r:.100}")
    try:
        reasons = tuple(str(reason)[:MAX_REASON_CHARS] for reason in section.reasons[:MAX_REASONS])
        mark = Mark(section.mark)
        dumps(reasons)
        data = decode(dumps(dict(section.data)), "it", max_bytes=max_bytes, max_depth=_MAX_DEPTH)
        version = int(read_as(Count, section.version, "its version"))
    except (TypeError, ValueError, RecursionError, Corrupt) as error:
        raise InvalidInput(f"its section cannot be stored: {error}") from error
    return Section(version, data, mark, reasons)


def write(sections: Sections) -> SectionRows:
    """Return sections as they are in a document."""
    written = list(sections.items())[:MAX_SECTIONS]
    return {name: (one.version, one.mark, one.reasons, dict(one.data)) for name, one in written}


def read(rows: SectionRows, *, max_bytes: int) -> dict[str, Section]:
    """Return the sections in a document."""
    for name, (_, _, _, data) in rows.items():
        if len(dumps(data)) > max_bytes:
            raise ValueError(f"the section of {name!r} has no JSON object of at most {max_bytes} bytes")
    return {
        name: Section(version, data, mark, reasons) for name, (version, mark, reasons, data) in rows.items()
    }
