"""Fixtures of jobs: a local engine with its own state folder, whose processes end with the test; a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fault_proxy import FaultProxy
from jobs.bucket import Bucket
from jobs.harness import JobHarness, started_harness
from jobs.notifications.receiver import Receiver
from servers import Server


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[JobHarness]:
    """Return a harness with its own folder."""
    with started_harness(tmp_path) as found:
        yield found


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Return a running server that receives webhooks."""
    found = Receiver()
    with found.running():
        yield found


@pytest.fixture
def bucket(s3: Server, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return an empty place in a bucket of a server that the user trusts."""
    monkeypatch.setenv("HOLDFAST_TRUST_ENDPOINTS", f"{s3.endpoint_url},{proxy.url}")
    return Bucket(s3, proxy)
