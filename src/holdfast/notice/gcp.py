"""Notices of Google Cloud: preemption and host maintenance, by requests that wait until a value changes."""

from __future__ import annotations

import time
from abc import abstractmethod

from typing_extensions import override

from holdfast.notice.cloud import Cloud
from holdfast.notice.metadata import Unreachable, ask
from holdfast.notice.word import Word

BASE = "http://metadata.google.internal"
_WAIT_S = 60
_HEADERS = {"Metadata-Flavor": "Google"}


class _Value(Cloud):
    """One value of the metadata server: asked for at once first, then by waiting for its change."""

    pause_s = 0.0
    path: str

    def __init__(self, base: str = BASE, *, wait_s: int = _WAIT_S) -> None:
        self._base = base
        self._wait_s = wait_s
        self._etag: str | None = None

    @override
    def ask(self) -> Word | None:
        path = f"/computeMetadata/v1/instance/{self.path}"
        timeout_s = 2.0
        if self._etag is not None:  # else a value that has changed before we looked would never be told
            path += f"?wait_for_change=true&timeout_sec={self._wait_s}&last_etag={self._etag}"
            timeout_s += self._wait_s
        answer = ask(self._base, path, headers=_HEADERS, timeout_s=timeout_s)
        if answer.status != 200 or answer.headers.get("metadata-flavor") != "Google":
            raise Unreachable(f"{self._base}{path}: status {answer.status}")
        # Without an etag nothing could wait: 0 matches no value, so the next answer comes at once.
        self._etag = answer.headers.get("etag", "0")
        return self._read(answer.text.strip())

    @abstractmethod
    def _read(self, text: str) -> Word | None:
        """What the value means."""


class GcpPreemption(_Value):
    """Preemption of a spot machine: 30 s before the end, or as long as the machine was given.

    Source: Compute Engine documentation, "Preempted instances: detecting whether a VM was preempted".
    """

    name = "gcp"
    path = "preempted"

    def _read(self, text: str) -> Word | None:
        # The lead is 30 s unless another was chosen, which the value does not tell.
        return Word("gcp", "preempted", time.time() + 30) if text == "TRUE" else None


class GcpMaintenance(_Value):
    """Host maintenance that ends the machine; one that moves it while it runs is no notice.

    Source: Compute Engine documentation, "Live migration and host maintenance events".
    """

    name = "gcp-maintenance"
    path = "maintenance-event"

    def _read(self, text: str) -> Word | None:
        return Word("gcp", "host maintenance") if text == "TERMINATE_ON_HOST_MAINTENANCE" else None
