"""Preemption notices of clouds: AWS, Google Cloud, Azure, and of Ray Train."""

from __future__ import annotations

import sys
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_object
from holdfast.watch.preemption.notice import Cloud, Notice, Unreachable, parse_time

if TYPE_CHECKING:
    from http.client import HTTPResponse

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

    Args:
        base: `http://host[:port]`.
        timeout_s: limit for connecting, and for each wait for bytes.
        expected: statuses of a response that can be used; for any other one it raises Unreachable.
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
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            return _parse_action(action)
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


def _parse_action(text: str) -> Notice:
    try:
        document = decode_object(text, "the notice")
        time_text = document.text("time", max_chars=64) if "time" in document else ""
        return Notice("aws", f"spot {document.text('action', max_chars=64)}", parse_time(time_text))
    except Corrupt:
        return Notice("aws", "spot interruption")  # the document exists only when the machine is reclaimed


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
        path, timeout_s = f"/computeMetadata/v1/instance/{GCP_VALUES[self.name][0]}", 2.0
        if self._etag is not None:  # waiting at once would miss a value that has already changed
            path += f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={self._etag}"
            timeout_s += self._wait_s
        response, text = request(self._base, path, {"Metadata-Flavor": "Google"}, timeout_s=timeout_s)
        if response.headers.get("Metadata-Flavor") != "Google":
            raise Unreachable(f"{self._base}{path}: status {response.status}")
        # An etag of 0 matches no value: without a real one, the next request returns at once.
        self._etag = response.headers.get("ETag", "0")
        return self.parse(text.strip())

    def parse(self, text: str) -> Notice | None:
        """Return the notice that a value announces, or None."""
        _, announced, detail, lead_s = GCP_VALUES[self.name]
        end_unix_s = None if lead_s is None else time.time() + lead_s
        return Notice("gcp", detail, end_unix_s) if text == announced else None


GCP_VALUES: dict[str, tuple[str, str, str, float | None]] = {
    "gcp": ("preempted", "TRUE", "preempted", 30.0),
    "gcp-maintenance": ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "host maintenance", None),
}
"""Path, announcing value, detail and usual lead of each value. A spot machine may have another lead than the
default of 30 s, which the value does not contain."""
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_MAX_EVENTS = 10_000
_AZURE_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Types of events that end every process. A Freeze only suspends them for some seconds."""


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
            events = decode_object(text, "the list of events").array("Events", max_items=_MAX_EVENTS)
        except Corrupt as error:
            raise Unreachable(f"{self._base}{_AZURE_EVENTS}: not a list of events ({error})") from error
        self._is_enabled = True
        notices = (_parse_event(event, self._machine) for event in events if isinstance(event, dict))
        return next((notice for notice in notices if notice is not None), None)

    def _get(self, path: str, timeout_s: float) -> str:
        return request(self._base, path, {"Metadata": "true"}, timeout_s=timeout_s)[1]


def _parse_event(event: Mapping[str, Any], machine: str) -> Notice | None:
    """Return the notice of a scheduled event that ends the machine, else None."""
    kind, machines = event.get("EventType"), event.get("Resources")
    if kind not in _AZURE_ENDS or not isinstance(machines, list) or machine not in machines:
        return None
    not_before = event.get("NotBefore")
    return Notice("azure", str(kind), parse_time(not_before) if isinstance(not_before, str) else None)


_RAY_CONTEXT = "ray.train.v2._internal.execution.context"


class Ray(Cloud):
    """Source of Ray Train's preemption info, which asks for one save.

    Training continues until Ray ends it: Ray counts workers that exit by themselves as failures, and restarts
    the run on other nodes without counting one that is preempted.

    `ray.train.get_preemption_info` is collective and must be called by the training function, so the value
    is read where it reads it. Source: Ray Train user guide, "Handling failures and node preemption".

    Args:
        read: returns the `PreemptionInfo` of this worker, or None.
    """

    name = "ray"
    pause_s = 0.5

    def __init__(self, read: Callable[[], Any] | None = None) -> None:
        self._read = _read_ray_info if read is None else read
        self._nodes: frozenset[str] = frozenset()

    @override
    def poll(self) -> Notice | None:
        info = self._read()
        if info is None or (nodes := frozenset(map(str, info.preempted_node_to_ranks))) <= self._nodes:
            return None
        self._nodes |= nodes
        deadline_s = info.deadline_ms / 1000 if info.deadline_ms else None
        return Notice("ray", "a node is reclaimed", deadline_s, is_final=False)


def _read_ray_info() -> Any:
    context = ray_context()
    try:
        return None if context is None else context.preemption_context.preemption_info
    except AttributeError as error:
        raise Unreachable(f"this version of Ray Train has no preemption info: {error}") from error


def ray_context() -> Any:
    """Return Ray Train's context in a training function, else None. Does not import Ray."""
    return getattr(sys.modules.get(_RAY_CONTEXT), "_train_context", None)
