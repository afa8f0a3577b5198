"""Preemption notices of Google Cloud: preemption and host maintenance, from its metadata server."""

from __future__ import annotations

import time
from abc import abstractmethod

from typing_extensions import override

from holdfast.watch.preemption.cloud import Cloud
from holdfast.watch.preemption.metadata import Unreachable, request
from holdfast.watch.preemption.notice import Notice

BASE = "http://metadata.google.internal"
_WAIT_S = 60
_HEADERS = {"Metadata-Flavor": "Google"}


class _Value(Cloud):
    """A value of the metadata server. The first request returns it; later ones wait for a change."""

    pause_s = 0.0
    path: str

    def __init__(self, base: str = BASE, *, wait_s: int = _WAIT_S) -> None:
        self._base = base
        self._wait_s = wait_s
        self._etag: str | None = None

    @override
    def poll(self) -> Notice | None:
        path = f"/computeMetadata/v1/instance/{self.path}"
        timeout_s = 2.0
        if self._etag is not None:  # waiting at once would miss a value that has already changed
            path += f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={self._etag}"
            timeout_s += self._wait_s
        response = request(self._base, path, headers=_HEADERS, timeout_s=timeout_s)
        if response.status != 200 or response.headers.get("metadata-flavor") != "Google":
            raise Unreachable(f"{self._base}{path}: status {response.status}")
        # An etag of 0 matches no value: without a real one, the next request returns at once.
        self._etag = response.headers.get("etag", "0")
        return self._parse(response.text.strip())

    @abstractmethod
    def _parse(self, text: str) -> Notice | None:
        """Return the notice that a value announces, or None."""


class GcpPreemption(_Value):
    """Preemption of a spot machine, announced 30 s before its end unless configured otherwise.

    Source: Compute Engine documentation, "Preempted instances: detecting whether a VM was preempted".
    """

    name = "gcp"
    path = "preempted"

    @override
    def _parse(self, text: str) -> Notice | None:
        # A lead other than the default of 30 s can be configured, but the value does not contain it.
        return Notice("gcp", "preempted", time.time() + 30) if text == "TRUE" else None


class GcpMaintenance(_Value):
    """Host maintenance that ends the machine. Live migration does not count.

    Source: Compute Engine documentation, "Live migration and host maintenance events".
    """

    name = "gcp-maintenance"
    path = "maintenance-event"

    @override
    def _parse(self, text: str) -> Notice | None:
        return Notice("gcp", "host maintenance") if text == "TERMINATE_ON_HOST_MAINTENANCE" else None
