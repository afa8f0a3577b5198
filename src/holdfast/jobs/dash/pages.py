"""Contents of the pages: all jobs, read once for all of them, facts and output of a job, curves of runs."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format import names
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.store import open_store
from holdfast.errors import HoldfastError, InvalidInput, NotFound, RetryLater, printable, redact
from holdfast.jobs import description
from holdfast.jobs.description import JobDescription
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import job_folder, state_dir
from holdfast.jobs.history import Change, JobAttempt, read_changes
from holdfast.jobs.interface import queue
from holdfast.jobs.output import LogReader, interleaved, texts
from holdfast.jobs.records import Records
from holdfast.system.documents import to_plain
from holdfast.system.units import plural
from holdfast.watch.report.figures import curves
from holdfast.watch.report.kept_readings import KeptReadings
from holdfast.watch.report.page import headline, headline_numbers, make_page
from holdfast.watch.report.style import framed
from holdfast.watch.report.summary import RunSummary, read_summary

_T = TypeVar("_T")
WAIT_S = 3.0  # time that a request waits for the state folder
_MIN_AGE_S = 1.0
_REST = 4.0  # pause between two readings, as a multiple of the time that one takes
MAX_HOMES = 100  # homes of a job that the page lists
MAX_ENDED = 200  # jobs of the list that have ended. `holdfast queue --all` has all.


class JobListing(Struct, frozen=True):
    """All jobs at one moment."""

    jobs: tuple[Job, ...] = ()  # those that have not ended first, newest first
    rows: tuple[dict[str, Any], ...] = ()  # as JSON, at most `MAX_ENDED` of jobs that have ended
    problems: tuple[str, ...] = ()  # why some jobs are missing or out of date, a message for each reason
    is_old: bool = False  # they could not be read this time

    def as_json(self) -> dict[str, Any]:
        """Return the list for the page."""
        return {"jobs": self.rows, "left_out": len(self.jobs) - len(self.rows), "problems": self.problems}

    def find(self, number: int) -> Job:
        """Return the job with a number."""
        found = next((job for job in self.jobs if job.id == number), None)
        if found is None and self.is_old:
            raise RetryLater(" ".join(self.problems))
        if found is None:
            raise NotFound(f"Job {number} does not exist. See `holdfast queue`.")
        return found


class JobBoard:
    """Board of all jobs. The longer reading takes, the less often they are read."""

    def __init__(self) -> None:
        self._readings = KeptReadings[JobListing](least_age_s=_MIN_AGE_S, rest=_REST)
        self._parts = KeptReadings[Any](least_age_s=0.0)
        self._listing = JobListing()

    def listing(self) -> JobListing:
        """Return all jobs, as they were read a moment ago."""
        try:
            self._listing = self._readings.get("The list of jobs", self._read, wait_s=WAIT_S)
        except RetryLater as error:
            return replace(self._listing, problems=(str(error),), is_old=True)
        return self._listing

    def read(self, number: int, part: str, read: Callable[[Job], _T]) -> _T:
        """Return what is read from a job's folder. Blocks: at most 3 s, and as `listing`."""
        job = self.listing().find(number)
        return self._parts.get(f"The folder of job {number}", lambda: read(job), part=part, wait_s=WAIT_S)

    def _read(self) -> JobListing:
        problems: list[str] = []
        try:
            records = Records(state_dir())
            engines = sorted({record.job.engine for record in records.all()})
            problems += records.unreadable()
        except HoldfastError as error:
            return replace(self._listing, problems=(str(error),), is_old=True)
        jobs: list[Job] = []
        for name in engines:
            try:
                jobs += queue(on=name)
            except HoldfastError as error:  # jobs of the other engines are shown
                jobs += [job for job in self._listing.jobs if job.engine == name]
                problems.append(f"Jobs on {name}: {error}")
        jobs.sort(key=lambda job: (job.status.is_final, -job.id))
        return JobListing(tuple(jobs), self._rows(jobs), tuple(problems))

    def _rows(self, jobs: Sequence[Job]) -> tuple[dict[str, Any], ...]:
        num_active = sum(not job.status.is_final for job in jobs)
        # The row of a job that has ended is read once.
        ended = {(row["id"], row["task_id"]): row for row in self._listing.rows if row["is_final"]}
        return tuple(ended.get((job.id, job.task_id)) or _row(job) for job in jobs[: num_active + MAX_ENDED])


def job_page(job: Job) -> dict[str, Any]:
    """Return everything that is recorded about a job as JSON, except its output."""
    found = description.describe_job(job)
    homes = list(found.checkpoints.items())[:MAX_HOMES]
    return {
        "job": _row(job),
        "attempts": [_attempt(one, found) for one in found.attempts],
        **{name: getattr(found, name) for name in ("lost_s", "folder", "workdirs", "logs")},
        "homes": [{**RunPlace(place).as_json(), "step": step} for place, step in homes],
    }


def homes_of(job: Job) -> list[str]:
    """Return the homes with steps that a job has reported, at most `MAX_HOMES`."""
    return list(description.recorded_homes(job_folder(state_dir(), job.id)))[:MAX_HOMES]


def _row(job: Job) -> dict[str, Any]:
    changes = read_changes(job_folder(state_dir(), job.id))
    facts = {**to_plain(job), "status": job.status.value, "is_final": job.status.is_final}
    return facts | _durations(job, changes)


def _durations(job: Job, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the durations up to the newest change, and the one that grows since then."""
    as_of_s = job.ended_unix_s or (changes[-1].unix_s if changes else job.started_unix_s)
    if as_of_s is None:
        return {"running_s": 0.0, "down_s": 0.0, "as_of_unix_s": None, "grows": ""}
    until, later = (
        description.durations_of(job, changes, now_unix_s=as_of_s + more_s) for more_s in (0.0, 1.0)
    )
    durations = {name: getattr(until, name) for name in ("running_s", "down_s")}
    grown = [name for name, value in durations.items() if getattr(later, name) > value]
    # A job may have ended at a time that is not known.
    grows = grown[0].removesuffix("_s") if grown and not job.status.is_final else ""
    return {**durations, "as_of_unix_s": as_of_s, "grows": grows}


def _attempt(attempt: JobAttempt, found: JobDescription) -> dict[str, Any]:
    same = ("number", "reason", "machines", "step", "lost_s")
    times = ("started_unix_s", "running_unix_s", "ended_unix_s")
    return {
        **{name: getattr(attempt, name) for name in (*same, *times)},
        "status": attempt.status.value,
        "exits": [attempt.exit_of(rank) for rank in range(found.job.num_nodes)],
        "checks": list(description.describe_checks(found.checks.get(attempt.number, {}))),
    }


MAX_BYTES = 256 << 10  # output in one response, of all nodes together
MAX_LINES = 2000  # lines in one response
MAX_CHARS = 4000  # characters of a line
_CURSOR = re.compile(r"(?:[0-9]{1,5}:[0-9]{1,16}(?:,(?!$)|$)){0,10000}", re.ASCII)
# Colours and cursor movements of terminals, and titles of their windows.
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)|[@-Z\\-_])")
_MIN_BYTES = 4 << 10
_MAX_LINE_BYTES = 64 << 10


def output_page(job: Job, *, cursor: str, node: str) -> dict[str, Any]:
    """Return new lines of a job as JSON, with the cursor of the next request. Too many: only the newest.

    An empty cursor stands for the newest lines, and an empty node for all nodes.
    """
    if not _CURSOR.fullmatch(cursor):
        raise InvalidInput("The cursor of an earlier response was expected.")
    pairs = (one.split(":") for one in cursor.split(",") if one)
    offsets = {int(rank): int(offset) for rank, offset in pairs}
    folder, ranks = job_folder(state_dir(), job.id), _ranks(job, node)
    share = max(_MIN_BYTES, MAX_BYTES // max(1, len(ranks)))
    skipped_bytes = 0
    readers: list[LogReader] = []
    for rank in ranks:
        begin, end, skipped = _bounds(folder.log(rank), offsets.get(rank, 0), share)
        skipped_bytes += skipped
        readers.append(LogReader(folder.log(rank), rank, is_timed=True, begin=begin, end=end))
    lines = [
        {"node": block.node, "unix_s": block.unix_s, "text": plain_text(text)}
        for block in interleaved(readers, is_end=job.status.is_final)
        for text in texts(block)
    ]
    return {
        "lines": lines[-MAX_LINES:],
        "cursor": ",".join(f"{reader.node}:{reader.offset}" for reader in readers),
        "progress": [
            {"node": reader.node, "text": plain_text(reader.progress.decode("utf-8", "replace"))}
            for reader in readers
            if reader.progress
        ],
        "skipped_bytes": skipped_bytes,
        "skipped_lines": max(0, len(lines) - MAX_LINES),
        "is_end": job.status.is_final,
    }


def plain_text(text: str) -> str:
    """Return a line without a terminal's colours, with control characters escaped, and shortened."""
    text = printable(_SEQUENCE.sub("", text))
    left_out = len(text) - MAX_CHARS
    return text if left_out <= 0 else f"{text[:MAX_CHARS]}... ({plural(left_out, 'character')} more)"


def _ranks(job: Job, node: str) -> range:
    if not node:
        return range(job.num_nodes)
    if not re.fullmatch(r"[0-9]{1,5}", node, re.ASCII):
        raise InvalidInput("The number of a node was expected.")
    if int(node) >= job.num_nodes:
        raise NotFound(f"Job {job.id} has {plural(job.num_nodes, 'node')}, counted from 0.")
    return range(int(node), int(node) + 1)


def _bounds(path: Path, offset: int, max_bytes: int) -> tuple[int, int, int]:
    """Return begin and end of the part to read, and the bytes skipped."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return 0, 0, 0
    with file:
        size = os.fstat(file.fileno()).st_size
        if offset > size:  # emptied by its owner
            offset = 0
        if size - offset <= max_bytes:
            return offset, size, 0
        # From the next line on, or within a very long one. Without a line break, `find` returns -1.
        begin = size - max_bytes
        begin += max(0, os.pread(file.fileno(), _MAX_LINE_BYTES, begin - 1).find(b"\n"))
        return begin, size, begin - offset


_RUN_AGE_S = 4.0
_RUN_REST = 9.0  # pause between two readings of a home, as a multiple of the time that one takes
_KEPT = 16  # homes whose curves are kept in memory


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
        self._curves = KeptReadings[dict[str, Any]](least_age_s=_RUN_AGE_S, rest=_RUN_REST, max_kept=_KEPT)
        self._summaries = KeptReadings[RunSummary](least_age_s=_RUN_AGE_S, rest=_RUN_REST)

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
    return read_summary(store, description.read_node_checks(store))


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
