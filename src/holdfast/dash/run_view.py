"""Runs as the page shows them: their curves, drawn as in the report, and the report itself."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.errors import NotFound
from holdfast.format import names
from holdfast.home.listing import list_home
from holdfast.redaction import redact
from holdfast.report.figures.curves import curves
from holdfast.report.headline import headline
from holdfast.report.page import make_page
from holdfast.report.summary import RunSummary, read_summary
from holdfast.store import open_store

_MIN_AGE_S = 4.0
_REST = 9.0
"""Pause between two readings of a home, as a multiple of the time that one takes."""
_MAX_KEPT = 16
"""Homes whose curves are kept in memory."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """Home of a run, which the page names by a hash: no path of a request is ever opened."""

    place: str

    @property
    def id(self) -> str:
        """Name of the home in URLs."""
        return hashlib.blake2b(self.place.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    @property
    def is_remote(self) -> bool:
        """True for a bucket, which is read only on request."""
        return "://" in self.place and not self.place.startswith(("file://", "memory://"))

    def as_json(self) -> dict[str, Any]:
        """Return the home for the page, without secrets of its URL."""
        return {"id": self.id, "place": redact(self.place), "is_remote": self.is_remote}


def find_place(places: Iterable[str], wanted: str) -> RunPlace:
    """Return the home with an id among those that may be read.

    Raises:
        NotFound: it is not one of them.
    """
    for one in map(RunPlace, places):
        if one.id == wanted:
            return one
    raise NotFound("This home is not among those of the job or of the command line.")


@dataclass(frozen=True, slots=True)
class _Kept:
    value: dict[str, Any]
    next_s: float


class RunView:
    """Reader of runs for all pages. One home is read at a time, to limit memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def curves(self, place: RunPlace) -> dict[str, Any]:
        """Return the curves of a run as JSON, as they were read a moment ago.

        Raises:
            HoldfastError: the home cannot be read.

        Blocks: while homes are read.
        """
        with self._lock:
            began_s = time.monotonic()
            kept = self._kept.get(place.place)
            if kept is None or began_s >= kept.next_s:
                value = _curves(_read(place))
                ended_s = time.monotonic()
                kept = _Kept(value, ended_s + max(_MIN_AGE_S, _REST * (ended_s - began_s)))
                self._kept[place.place] = kept
            self._kept.move_to_end(place.place)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return kept.value

    def report(self, place: RunPlace) -> str:
        """Return the report of a run as an HTML page.

        Raises:
            HoldfastError: the home cannot be read, or the chart library is not installed.

        Blocks: while homes are read.
        """
        with self._lock:
            summary = _read(place)
            name = redact(place.place).rstrip("/").rpartition("/")[2] or place.place
            return make_page(summary, name=name, made_unix_s=time.time())


def _read(place: RunPlace) -> RunSummary:
    store = open_store(place.place)
    if store.size(names.RUN) is None:
        home = list_home(store)
        if not home.saved and not home.attempts:
            raise NotFound(f"{redact(place.place)} does not contain a run yet.")
    return read_summary(store)


def _curves(summary: RunSummary) -> dict[str, Any]:
    figures = [
        {"id": one.id, "title": one.title, "text": one.text, "spec": one.spec} for one in curves(summary)
    ]
    return {"headline": headline(summary), "figures": figures}
