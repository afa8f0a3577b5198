"""Judges of checkpoints: halves of watches that make the sections of a manifest from those of all parts."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import Struct

import holdfast
from holdfast.checkpoint.format import sections
from holdfast.checkpoint.format.catalog import parse_catalog
from holdfast.checkpoint.format.part import Ancestors, Part
from holdfast.checkpoint.format.sections import MAX_MANIFEST_BYTES, Mark, Section, Sections, health_of

_MAX_MADE = 4
"""Checkpoints of an attempt whose sections are kept, for the next one."""


class CompleteSave(Struct, frozen=True):
    """Save whose parts all exist, for the judge of one watch.

    Attributes:
        step: optimizer steps completed.
        world_size: number of ranks.
        sections: the watch's section of each rank that has one, from rank 0 on.
        tensor_names: returns the names of a rank's tensors, in the order of its catalog.
        base: the watch's section in the manifest of the checkpoint before; None without one.
        is_base_healthy: health of that checkpoint; None if it is not known.
    """

    step: int
    world_size: int
    sections: Mapping[int, Section]
    tensor_names: Callable[[int], tuple[str, ...]]
    base: Section | None = None
    is_base_healthy: bool | None = None


class Judge(Protocol):
    """Half of a watch that judges checkpoints."""

    def committing(self, save: CompleteSave) -> Section | None:
        """Return the section of the manifest."""
        ...


class PartSections:
    """Sections of the parts of one checkpoint, collected part by part."""

    def __init__(self) -> None:
        self.step = self.world_size = 0
        self.ancestors: Ancestors = ()
        self.by_watch: dict[str, dict[int, Section]] = {}
        self._catalogs: dict[str, tuple[bytes, str]] = {}  # text and name by digest
        self._names: dict[str, tuple[str, ...]] = {}  # in the catalogs that were parsed
        self._digests: list[str] = []  # by rank

    def add(self, part: Part) -> Part:
        """Add the next rank's part, and return it."""
        self.step, self.world_size, self.ancestors = part.step, part.world_size, part.ancestors
        for name, section in part.watches.items():
            self.by_watch.setdefault(name, {})[part.rank] = section
        self._catalogs.setdefault(part.catalog_digest, (part.catalog_text, part.what))
        self._digests.append(part.catalog_digest)
        return part

    def tensor_names(self, rank: int) -> tuple[str, ...]:
        """Return the names of a rank's tensors, in the order of its catalog."""
        digest = self._digests[rank]
        if digest not in self._names:
            self._names[digest] = tuple(parse_catalog(*self._catalogs[digest]).tensors)
        return self._names[digest]


class Judges:
    """Judges of the checkpoints of one attempt, with the sections of its newest ones. Threads may share it.

    Every place that makes a manifest uses such an object, so that a checkpoint has the same health whichever
    process commits it (design note 045).

    Args:
        judges: by watch. A section without one gets the greatest mark of all ranks.
        read_base: returns the sections of the checkpoint that an attempt continues, by its ancestors.
        on_error: called with the name of a watch whose judge has failed, and the error.
    """

    def __init__(
        self,
        judges: Mapping[str, Judge] = MappingProxyType({}),
        *,
        read_base: Callable[[Ancestors], Sections] = lambda _: {},
        on_error: Callable[[str, Exception], None] = lambda _name, _error: None,
    ) -> None:
        self._judges, self._read_base, self._on_error = judges, read_base, on_error
        self._made: dict[int, Sections] = {}  # by step
        self._base: Sections | None = None  # of the checkpoint that the attempt continues
        self._lock = threading.Lock()

    def sections(self, parts: PartSections) -> dict[str, Section]:
        """Return the sections of a manifest. A second call for a step replaces the first."""
        if not parts.by_watch:
            return {}
        with self._lock:
            base = self._sections_before(parts)
            found: dict[str, Section] = {}
            for name in [*(one for one in list(self._judges) if one in parts.by_watch), *parts.by_watch]:
                section = None if name in found else self._judge(name, parts, base)
                if section is not None:
                    found[name] = section
            self._made[parts.step] = found
            self._made = dict(sorted(self._made.items())[-_MAX_MADE:])
            return found

    def made(self, step: int) -> Sections:
        """Return the sections that were made for a step."""
        with self._lock:
            return self._made.get(step, {})

    def _judge(self, name: str, parts: PartSections, base: Sections) -> Section | None:
        judge, found = self._judges.get(name), parts.by_watch[name]
        if judge is None:
            return sections.merge(found[rank] for rank in sorted(found))
        save = CompleteSave(
            parts.step, parts.world_size, found, parts.tensor_names, base.get(name), health_of(base).healthy
        )
        try:
            section = judge.committing(save)
            return None if section is None else sections.check(section, max_bytes=MAX_MANIFEST_BYTES)
        except Exception as error:  # noqa: BLE001 - a watch, which may be the user's, must not fail a save
            self._on_error(name, error)
            return failed(name)

    def _sections_before(self, parts: PartSections) -> Sections:
        before = max((step for step in self._made if step < parts.step), default=None)
        if before is not None:
            return self._made[before]
        if self._base is None:
            self._base = self._read_base(parts.ancestors)
        return self._base


def failed(name: str) -> Section:
    """Return the section of a watch that could not judge a checkpoint."""
    return Section(0, {}, Mark.UNSURE, (f"the watch {name!r} has failed",))


def load_class(half: str) -> Any:
    """Return the class of a watch's half, which is named as "module:Class"."""
    module, _, name = half.partition(":")
    return getattr(importlib.import_module(module), name)


def default_judges() -> Judges:
    """Return the judges of the default watches, for a checkpoint whose keeper has ended before its commit."""
    found: dict[str, Judge] = {}
    for watch in holdfast.default_watches():
        if watch.keeper is not None:
            found[watch.name] = load_class(watch.keeper)(watch.options())
    return Judges(found)
