"""Preemption notices of Azure: the scheduled events of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_object
from holdfast.watch.preemption.cloud import Cloud
from holdfast.watch.preemption.metadata import Unreachable, request
from holdfast.watch.preemption.notice import Notice, parse_time

BASE = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_MAX_EVENTS = 10_000
_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Types of events that end every process. A Freeze only suspends them for some seconds."""


class Azure(Cloud):
    """Source of the scheduled events that end this machine.

    Source: Azure documentation, "Scheduled Events for Linux VMs".
    """

    name = "azure"
    pause_s = 5.0

    def __init__(self, base: str = BASE) -> None:
        self._base = base
        self._machine: str | None = None
        self._incarnation: object = None

    @override
    def poll(self) -> Notice | None:
        if self._machine is None:
            self._machine = self._get(_NAME, timeout_s=2.0).strip()
        # The first request enables the service for this machine, which may take two minutes.
        timeout_s = 2.0 if self._incarnation is not None else 130.0
        try:
            document = decode_object(self._get(_EVENTS, timeout_s=timeout_s), "the list of events")
            events = document.array("Events", max_items=_MAX_EVENTS)
        except Corrupt as error:
            raise Unreachable(f"{self._base}{_EVENTS}: not a list of events ({error})") from error
        self._incarnation = document.members.get("DocumentIncarnation", 0)
        return _first_end(events, self._machine)

    def _get(self, path: str, *, timeout_s: float) -> str:
        response = request(self._base, path, headers={"Metadata": "true"}, timeout_s=timeout_s)
        if response.status != 200:
            raise Unreachable(f"{self._base}{path}: status {response.status}")
        return response.text


def _first_end(events: Iterable[Any], machine: str) -> Notice | None:
    """Return the first event that ends `machine`, as a notice."""
    for event in events:
        if not isinstance(event, dict):
            continue
        kind, machines = event.get("EventType"), event.get("Resources")
        if isinstance(kind, str) and kind in _ENDS and isinstance(machines, list) and machine in machines:
            not_before = event.get("NotBefore")
            return Notice("azure", kind, parse_time(not_before) if isinstance(not_before, str) else None)
    return None
