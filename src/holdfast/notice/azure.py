"""Notices of Azure: the scheduled events of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from holdfast.documents import decode_object
from holdfast.errors import Corrupt
from holdfast.notice.cloud import Cloud
from holdfast.notice.metadata import Unreachable, ask
from holdfast.notice.word import Word, read_time

BASE = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_MAX_EVENTS = 10_000
_ENDS = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Events that end every process; a Freeze lets them sleep for some seconds."""


class Azure(Cloud):
    """Asks for scheduled events, and takes those that name this machine and end it.

    Source: Azure documentation, "Scheduled Events for Linux VMs".
    """

    name = "azure"
    pause_s = 5.0

    def __init__(self, base: str = BASE) -> None:
        self._base = base
        self._machine: str | None = None
        self._incarnation: object = None

    @override
    def ask(self) -> Word | None:
        if self._machine is None:
            self._machine = self._get(_NAME, timeout_s=2.0).strip()
        # The first question turns the service on for this machine, which may take it two minutes.
        timeout_s = 2.0 if self._incarnation is not None else 130.0
        try:
            told = decode_object(self._get(_EVENTS, timeout_s=timeout_s), "the list of events")
            events = told.array("Events", max_items=_MAX_EVENTS)
        except Corrupt as error:
            raise Unreachable(f"{self._base}{_EVENTS}: not a list of events ({error})") from error
        self._incarnation = told.members.get("DocumentIncarnation", 0)
        return _first_end(events, self._machine)

    def _get(self, path: str, *, timeout_s: float) -> str:
        answer = ask(self._base, path, headers={"Metadata": "true"}, timeout_s=timeout_s)
        if answer.status != 200:
            raise Unreachable(f"{self._base}{path}: status {answer.status}")
        return answer.text


def _first_end(events: Iterable[Any], machine: str) -> Word | None:
    """The first event that ends `machine`."""
    for event in events:
        if not isinstance(event, dict):
            continue
        kind, machines = event.get("EventType"), event.get("Resources")
        if isinstance(kind, str) and kind in _ENDS and isinstance(machines, list) and machine in machines:
            until = event.get("NotBefore")
            return Word("azure", kind, read_time(until) if isinstance(until, str) else None)
    return None
