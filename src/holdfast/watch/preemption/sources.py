"""Preemption notices, and their sources: files, clouds, Ray Train, and ends that come at a given time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from typing_extensions import override

from holdfast.errors import Corrupt, InvalidInput
from holdfast.system.documents import decode_as, read_as, to_plain
from holdfast.system.environment import PREEMPTION
from holdfast.system.linux.files import write_atomic
from holdfast.system.linux.program_runs import run_program
from holdfast.system.units import format_duration, parse_duration

if TYPE_CHECKING:
    from http.client import HTTPResponse


class Notice(Struct, frozen=True):
    """Notice that this machine will be reclaimed, or may be."""

    source: str  # such as "SIGTERM", "aws", "holdfast preempt"
    detail: str = ""
    is_final: bool = True  # False: the machine may be reclaimed soon, so save once and continue

    @property
    def reason(self) -> str:
        """Source and detail in a few words."""
        return f"{self.source}: {self.detail}" if self.detail else self.source


_MAX_FILE_BYTES = 1 << 16


def write_notice(path: Path, notice: Notice) -> None:
    """Write a notice to a file that training processes watch."""
    write_atomic(path, json.dumps(to_plain(notice)), is_durable=False)


def read_notice(path: Path) -> Notice | None:
    """Return the notice in a file, or None if the file does not exist.

    Any other contents are a notice too, so that `touch PATH` is enough.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    try:
        members = decode_as(dict[str, Any], text, str(path), any_text=True)
        known = {name: value for name, value in members.items() if value is not None}
        return read_as(Notice, known | {"source": known.get("source") or "file"}, str(path))
    except Corrupt:
        return Notice("file", text.splitlines()[0][:200] if text else str(path))


class Unreachable(Exception):
    """Failure of a service to answer correctly, which may pass. Not raised outside of this folder."""


class Cloud(ABC):
    """Source of notices about this machine, of a cloud or a scheduler."""

    name: str  # the name that users write
    pause_s: float
    """Pause between two polls. 0 if the service itself holds a request until its response changes."""

    save_s: float = 0.0
    """Measured time of one step and one durable save, for sources that choose the moment themselves."""

    @abstractmethod
    def poll(self) -> Notice | None:
        """Return the notice for this machine, or None. Raises Unreachable if the service does not answer.

        Blocks: for one request, at most for about its `timeout_s`.
        """


_LINK_LOCAL, _GCP_BASE = "http://169.254.169.254", "http://metadata.google.internal"
"""Addresses of the metadata services of AWS and Azure, and of Google Cloud, on this machine's own link."""
_MAX_BYTES = 1 << 20


def request(
    base: str,
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    timeout_s: float = 2.0,
    expected: Collection[int] = (200,),
) -> tuple[HTTPResponse, str]:
    """Send a request; return the response and its text. Ignores proxies and redirects; reads at most 1 MiB.

    For a status that is not expected it raises Unreachable. The timeout is that of connecting, and of each
    wait for bytes.
    """
    # Here, because it also imports TLS, and most runs never send a request.
    import http.client

    url = urllib.parse.urlsplit(base)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=timeout_s)
    try:
        connection.request(method, url.path.rstrip("/") + path, headers=dict(headers))
        response = connection.getresponse()
        text = response.read(_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{base}{path}: {error!r}") from error
    finally:
        connection.close()
    if response.status not in expected:
        raise Unreachable(f"{base}{path}: status {response.status}")
    return response, text


_TOKEN_S = 3600


class _SpotAction(Struct, frozen=True):
    """Document of a spot interruption."""

    action: Annotated[str, Meta(max_length=64)]


class Aws(Cloud):
    """Source of spot interruptions and rebalance recommendations, from IMDSv2. The latter ask for one save.

    Source: EC2 user guide, "Spot Instance interruption notices"; aws-node-termination-handler.
    """

    name = "aws"
    pause_s = 5.0  # as the user guide recommends

    def __init__(self, base: str = "") -> None:
        self._base = base or _LINK_LOCAL
        self._token: str | None = None
        self._token_until_s = 0.0
        self._has_rebalanced = False

    @override
    def poll(self) -> Notice | None:
        text = self._get("/latest/meta-data/spot/instance-action")
        if text is not None:
            try:
                action = decode_as(_SpotAction, text, "the notice")
            except Corrupt:  # the document exists only when the machine is reclaimed
                return Notice("aws", "spot interruption")
            return Notice("aws", f"spot {action.action}")
        if self._has_rebalanced or self._get("/latest/meta-data/events/recommendations/rebalance") is None:
            return None
        self._has_rebalanced = True  # the document is never withdrawn, and one save for it is enough
        return Notice("aws", "rebalance recommendation", is_final=False)

    def _get(self, path: str) -> str | None:
        """Return the document at `path`, or None if it does not exist (404)."""
        response, text = self._authorized(path, (200, 401, 404))
        if response.status == 401:  # the token has expired, or another one was made for the machine
            self._token = None
            response, text = self._authorized(path, (200, 404))
        return None if response.status == 404 else text

    def _authorized(self, path: str, expected: Collection[int]) -> tuple[HTTPResponse, str]:
        if self._token is None or time.monotonic() > self._token_until_s:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S), "Content-Length": "0"}
            self._token = request(self._base, "/latest/api/token", headers, method="PUT")[1].strip()
            self._token_until_s = time.monotonic() + _TOKEN_S * 0.9
        return request(self._base, path, {"X-aws-ec2-metadata-token": self._token}, expected=expected)


class Gcp(Cloud):
    """A value of Google's metadata server. The first request returns it; later ones wait for a change.

    Source: Compute Engine documentation, "Preempted instances: detecting whether a VM was preempted" and
        "Live migration and host maintenance events". Live migration does not count.
    """

    pause_s = 0.0

    def __init__(self, name: str = "gcp", base: str = "", *, wait_s: int = 60) -> None:
        self.name, self._base, self._wait_s = name, base or _GCP_BASE, wait_s
        self._etag: str | None = None

    @override
    def poll(self) -> Notice | None:
        value, announced, detail = GCP_VALUES[self.name]
        path, timeout_s = f"/computeMetadata/v1/instance/{value}", 2.0
        if self._etag is not None:  # waiting at once would miss a value that has already changed
            path += f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={self._etag}"
            timeout_s += self._wait_s
        response, text = request(self._base, path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if response.headers.get("Metadata-Flavor") != "Google":
            raise Unreachable(f"{self._base}{path}: status {response.status}")
        # An etag of 0 matches no value: without a real one, the next request returns at once.
        self._etag = response.headers.get("ETag", "0")
        return Notice("gcp", detail) if text.strip() == announced else None


GCP_VALUES: dict[str, tuple[str, str, str]] = {
    "gcp": ("preempted", "TRUE", "preempted"),
    "gcp-maintenance": ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "host maintenance"),
}
"""Path, announcing value and detail of each value."""
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class _ScheduledEvents(Struct, frozen=True, rename="pascal"):
    """Document of the events of several machines."""

    events: Annotated[list[Any], Meta(max_length=10_000)]


class _EndingEvent(Struct, frozen=True, rename="pascal"):
    """Event that ends every process of its machines. A Freeze only suspends them for some seconds."""

    event_type: Literal["Preempt", "Terminate", "Reboot", "Redeploy"]
    resources: list[Any]


class Azure(Cloud):
    """Source of the scheduled events that end this machine.

    Source: Azure documentation, "Scheduled Events for Linux VMs".
    """

    name = "azure"
    pause_s = 5.0

    def __init__(self, base: str = "") -> None:
        self._base = base or _LINK_LOCAL
        self._machine: str | None = None
        self._is_enabled = False

    @override
    def poll(self) -> Notice | None:
        if self._machine is None:
            self._machine = self._get(_AZURE_NAME, 2.0).strip()
        # The first request enables the service for this machine, which may take two minutes.
        text = self._get(_AZURE_EVENTS, 2.0 if self._is_enabled else 130.0)
        try:
            found = decode_as(_ScheduledEvents, text, "the list of events").events
        except Corrupt as error:
            raise Unreachable(f"{self._base}{_AZURE_EVENTS}: not a list of events ({error})") from error
        self._is_enabled = True
        for one in found:
            with contextlib.suppress(Corrupt):  # an event of another type
                event = read_as(_EndingEvent, one, "an event")
                if self._machine in event.resources:
                    return Notice("azure", event.event_type)
        return None

    def _get(self, path: str, timeout_s: float) -> str:
        return request(self._base, path, {"Metadata": "true"}, timeout_s=timeout_s)[1]


_RAY_CONTEXT = "ray.train.v2._internal.execution.context"


class Ray(Cloud):
    """Source of Ray Train's preemption info, which asks for one save.

    Training continues until Ray ends it: Ray counts workers that exit by themselves as failures, and restarts
    the run on other nodes without counting one that is preempted.

    `ray.train.get_preemption_info` is collective and must be called by the training function, so the value
    is read where it reads it. Source: Ray Train user guide, "Handling failures and node preemption".
    """

    name = "ray"
    pause_s = 0.5

    def __init__(self, read: Callable[[], Any] | None = None) -> None:
        self._read = read or _read_ray_info
        self._nodes: frozenset[str] = frozenset()

    @override
    def poll(self) -> Notice | None:
        info = self._read()
        if info is None or (nodes := frozenset(map(str, info.preempted_node_to_ranks))) <= self._nodes:
            return None
        self._nodes |= nodes
        return Notice("ray", "a node is reclaimed", is_final=False)


def _read_ray_info() -> Any:
    context = ray_context()
    try:
        return None if context is None else context.preemption_context.preemption_info
    except AttributeError as error:
        raise Unreachable(f"this version of Ray Train has no preemption info: {error}") from error


def ray_context() -> Any:
    """Return Ray Train's context in a training function, else None. Does not import Ray."""
    return getattr(sys.modules.get(_RAY_CONTEXT), "_train_context", None)


_LEAST_LEAD_S, _MARGIN_S = 60.0, 30.0
"""Shortest time from the notice to the end, and what is added to twice the time of a step and a save."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 300.0
_SQUEUE_S = 60.0
_LEFT = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", re.ASCII)


class End(Cloud):
    """An end that comes closer. Its notice leaves time for twice a step and a durable save.

    At the end of a short time the notice comes not before half of the time that was left at first.
    """

    pause_s = _LEAST_PAUSE_S
    detail: str  # of its notice
    _most_lead_s: float | None = None

    @abstractmethod
    def left_s(self) -> float:
        """Return the time left; infinite without a limit."""

    @override
    def poll(self) -> Notice | None:
        left_s = self.left_s()
        if left_s == math.inf:
            self.pause_s = _MOST_PAUSE_S
            return None
        if self._most_lead_s is None:
            self._most_lead_s = left_s / 2
        lead_s = min(max(_LEAST_LEAD_S, 2 * self.save_s + _MARGIN_S), self._most_lead_s)
        if left_s <= lead_s:
            return Notice(self.name, f"{self.detail} in {format_duration(max(left_s, 0.0))}")
        # Half of the way: the end may move closer, and a save may take longer than before.
        self.pause_s = min(max((left_s - lead_s) / 2, _LEAST_PAUSE_S), _MOST_PAUSE_S)
        return None


class Deadline(End):
    """End at a time from now, the start of the training."""

    name, detail = "deadline", "time is over"

    def __init__(self, after_s: float) -> None:
        self._end_s = time.monotonic() + after_s

    @override
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


class SlurmLimit(End):
    """Time limit of this Slurm job, read from `squeue`: a changed one is followed.

    While Slurm does not answer, or where a container lacks squeue, the last answer counts, else
    SLURM_JOB_END_TIME.
    """

    name, detail = "slurm", "time limit"

    def __init__(self) -> None:
        self._end_s: float | None = None  # infinite without a limit; None if it is not known

    @override
    def left_s(self) -> float:
        text, words = "", ["squeue", "--noheader", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%L"]
        with contextlib.suppress(OSError):
            done = run_program(words, timeout_s=_SQUEUE_S)
            text = done.text if done.status == 0 else ""
        found = _LEFT.fullmatch(text)
        if found is not None:
            days, hours, minutes, seconds = (int(group or 0) for group in found.groups())
            self._end_s = time.monotonic() + ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        elif text == "UNLIMITED":
            self._end_s = math.inf
        elif self._end_s is None:
            end = os.environ.get("SLURM_JOB_END_TIME", "")
            if not end.isdecimal():
                raise Unreachable(f"squeue gives no time left for job {os.environ['SLURM_JOB_ID']}: {text!r}")
            self._end_s = time.monotonic() + int(end) - time.time()
        return self._end_s - time.monotonic()


def _is_in_slurm_job() -> bool:
    """Return True in a job of Slurm whose end can be found."""
    environment = os.environ
    return "SLURM_JOB_ID" in environment and (
        shutil.which("squeue") is not None or "SLURM_JOB_END_TIME" in environment
    )


_DMI_FOLDER = Path("/sys/class/dmi/id")  # of strings that name the machine's vendor
_CLOUDS_BY_DMI = {  # the third is the same on every machine of that cloud
    ("sys_vendor", "Amazon EC2"): "aws",
    ("product_name", "Google Compute Engine"): "gcp",
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77"): "azure",
}
NAMES = ("auto", "none", "aws", "gcp", "azure", "ray", "slurm", "deadline=DURATION", "file:PATH")
"""Names of sources. `aws=URL` polls another address than the cloud's own, for tests and proxies."""
_CLOUDS: dict[str, Callable[[str], list[Cloud]]] = {
    "aws": lambda base: [Aws(base)],
    "gcp": lambda base: [Gcp(name, base) for name in GCP_VALUES],
    "azure": lambda base: [Azure(base)],
    "ray": lambda _: [Ray()],
    "deadline": lambda after: [Deadline(parse_duration(after, "deadline="))],
    "slurm": lambda _: [SlurmLimit()],
}


class Sources(Struct, frozen=True):
    """Sources of notices other than signals."""

    clouds: tuple[Cloud, ...] = ()
    files: tuple[Path, ...] = ()


def parse_sources(value: str | Iterable[str] | None, *, dmi_folder: Path = _DMI_FOLDER) -> Sources:
    """Return the sources that a user names; see `Preemption`."""
    if value is None:
        value = os.environ.get(PREEMPTION, "auto")
    words = value.split(",") if isinstance(value, str) else list(value)
    clouds: list[Cloud] = []
    files: list[Path] = []
    for word in (word.strip() for word in words):
        name, _, base = word.partition("=")
        if word.startswith("file:"):
            files.append(Path(word.removeprefix("file:")).absolute())
        elif name == "auto":
            own = "ray" if ray_context() is not None else _own_cloud(dmi_folder)
            clouds += _CLOUDS[own]("") if own else []
            clouds += [SlurmLimit()] if _is_in_slurm_job() else []
        elif name == "slurm" and not _is_in_slurm_job():
            raise InvalidInput(
                "The source slurm of preemption notices needs a Slurm job: SLURM_JOB_ID, and squeue or "
                "SLURM_JOB_END_TIME. Found none. Leave it out, or use auto."
            )
        elif name in _CLOUDS:
            clouds += _CLOUDS[name](base)
        elif name not in ("none", ""):
            raise InvalidInput(
                f"Unknown source of preemption notices: {word!r}, in preemption= or in {PREEMPTION}. "
                f"Expected: {', '.join(NAMES)}, or several of them separated by commas."
            )
    return Sources(tuple(clouds), tuple(files))


def _own_cloud(dmi_folder: Path) -> str | None:
    """Return the name of the cloud that runs this machine, or None."""
    for (name, expected), cloud in _CLOUDS_BY_DMI.items():
        with contextlib.suppress(OSError):
            if (dmi_folder / name).read_text(errors="replace").strip() == expected:
                return cloud
    return None
