"""Runs as the page shows them: their curves, drawn as in the report, and the report itself."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store import open_store
from holdfast.errors import NotFound, redact
from holdfast.jobs.description import read_node_checks
from holdfast.system.documents import to_plain
from holdfast.watch.report.figures.curves import curves
from holdfast.watch.report.kept_readings import KeptReadings
from holdfast.watch.report.page import headline, headline_numbers, make_page
from holdfast.watch.report.style import framed
from holdfast.watch.report.summary import RunSummary, read_summary

_MIN_AGE_S = 4.0
_REST = 9.0  # pause between two readings of a home, as a multiple of the time that one takes
_MAX_KEPT = 16  # homes whose curves are kept in memory


class RunPlace(Struct, frozen=True):
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
    """Return the home with an id among those that may be read."""
    found = next((one for one in map(RunPlace, places) if one.id == wanted), None)
    if found is None:
        raise NotFound("This home is not among those of the job or of the command line.")
    return found


class RunView:
    """Reader of runs for all pages."""

    def __init__(self) -> None:
        self._curves = KeptReadings[dict[str, Any]](least_age_s=_MIN_AGE_S, rest=_REST, max_kept=_MAX_KEPT)
        self._summaries = KeptReadings[RunSummary](least_age_s=_MIN_AGE_S, rest=_REST)

    def curves(self, place: RunPlace) -> dict[str, Any]:
        """Return the curves of a run as JSON, as they were read a moment ago."""
        return self._curves.get(place.place, lambda: _curves(_read(place)))

    def state(self, place: RunPlace) -> dict[str, Any]:
        """Return the facts of a run for the list, without its curves."""
        found = self.curves(place)
        return {name: found[name] for name in ("state", "step", "last_unix_s")}

    def report(self, place: RunPlace) -> str:
        """Return the report of a run as an HTML page."""
        summary = self._summaries.get(place.place, lambda: _read(place))
        name = redact(place.place).rstrip("/").rpartition("/")[2] or place.place
        return make_page(summary, name=name, made_unix_s=time.time())


def _read(place: RunPlace) -> RunSummary:
    store = open_store(place.place)
    if store.size(names.RUN) is None:
        home = list_home(store)
        if not home.saved and not home.attempts:
            raise NotFound(f"{redact(place.place)} does not contain a run yet.")
    return read_summary(store, read_node_checks(store))


def _curves(summary: RunSummary) -> dict[str, Any]:
    figures = [
        {"id": id, "title": one.title, "text": one.text, "spec": framed(one.chart or {})}
        for id, one in curves(summary).items()
    ]
    home = summary.home_contents
    return {
        "headline": headline(summary),
        "state": "finished" if summary.finished else "not finished",
        "step": home.newest_step if home else None,
        "last_unix_s": summary.last_unix_s,
        "numbers": to_plain(headline_numbers(summary)),
        "figures": figures,
    }
