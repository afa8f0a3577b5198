"""Sections of watches in documents: what a watch has found about a checkpoint, and its mark.

The core stores sections and merges their marks. It does not know what they contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format.catalog import columns
from holdfast.checkpoint.format.sealed import dumps
from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import MAX_COUNT, Fields, decode, read_integers

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


class Section(Struct, frozen=True):
    """Finding of a watch about one checkpoint, stored in its documents.

    Attributes:
        version: of the contents of `data`; the watch chooses it.
        data: JSON of the watch.
        mark: opinion about the checkpoint.
        reasons: of the mark, a sentence without its end each.
    """

    version: int
    data: Mapping[str, Any] = {}
    mark: Mark = Mark.NONE
    reasons: tuple[str, ...] = ()


Sections = Mapping[str, Section]  # sections by the names of their watches


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
        read_integers([section.version])
    except (TypeError, ValueError, RecursionError, Corrupt) as error:
        raise InvalidInput(f"its section cannot be stored: {error}") from error
    return Section(section.version, data, mark, reasons)


def members(sections: Sections) -> dict[str, Any]:
    """Return sections as JSON, as a member of a document."""
    if not sections:
        return {}
    rows = {
        name: [one.version, int(one.mark), one.reasons, one.data]
        for name, one in list(sections.items())[:MAX_SECTIONS]
    }
    return {"watches": rows}


def read(body: Fields, *, max_bytes: int) -> dict[str, Section]:
    """Return the sections in a document."""
    if "watches" not in body:
        return {}
    rows = body.fields("watches").members
    if len(rows) > MAX_SECTIONS:
        raise ValueError(f"it has {len(rows)} sections of watches, at most {MAX_SECTIONS} are allowed")
    return {name: _section(name, row, max_bytes) for name, row in rows.items()}


def _section(name: str, row: Any, max_bytes: int) -> Section:
    version, mark, reasons, data = columns(row, 4, "a section")
    if not WATCH_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.100} is no name of a watch")
    read_integers([version], at_most=MAX_COUNT)
    read_integers([mark], at_most=max(Mark))
    what = f"the section of {name!r}"
    if type(reasons) is not list or len(reasons) > MAX_REASONS:
        raise ValueError(f"{what} has no list of at most {MAX_REASONS} reasons")
    if any(type(one) is not str or len(one) > MAX_REASON_CHARS for one in reasons):
        raise ValueError(f"{what} has a reason that is no text of at most {MAX_REASON_CHARS} characters")
    if type(data) is not dict or len(dumps(data)) > max_bytes:
        raise ValueError(f"{what} has no JSON object of at most {max_bytes} bytes")
    return Section(version, data, Mark(mark), tuple(reasons))
