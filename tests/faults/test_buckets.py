"""Runs whose home is a bucket: kills while it is written, outages, lost objects; on a real S3 server."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from fault_proxy import FaultProxy
from faults.playground import ENDLESS, TOTAL, Playground, kill_host_at_random
from holdfast.checkpoint.format import names
from holdfast.checkpoint.store import Store, open_store
from servers import Server

WAYS = ("diskless", "tiered")
EACH_WAY = ("tiered", pytest.param("diskless", marks=pytest.mark.slow))


@dataclass
class Bucket:
    """A bucket behind a proxy, and what a trainer is told to use it."""

    url: str  # through the proxy, with little patience for errors and much for slow answers
    view: str  # of this test, past the proxy
    proxy: FaultProxy
    env: dict[str, Any]  # of the keys
    place: Playground

    def options(self, way: str = "diskless") -> list[str]:
        """The options of a run that goes straight to the bucket, or through a local folder."""
        return ["--bucket", self.url, *(["--local", str(self.place.local)] if way == "tiered" else [])]

    @property
    def store(self) -> Store:
        return open_store(self.view)


@pytest.fixture
def bucket(
    playground: Playground, server: Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Bucket]:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with FaultProxy("127.0.0.1", server.port) as proxy:
        prefix = "".join(c if c.isalnum() else "-" for c in request.node.name)
        url = server.home(prefix, port=proxy.port, timeout="2s", request_timeout="60s")
        yield Bucket(url, server.home(prefix), proxy, dict(server.env), playground)
        playground.wait_for_keepers()


@pytest.mark.parametrize("way", EACH_WAY)
def test_another_host_resumes_from_the_bucket_after_a_lost_host(
    playground: Playground, bucket: Bucket, uninterrupted: str, way: str
):
    """Trainer and keeper killed, the local folder gone: another host finishes, from what the bucket has."""
    child = playground.start("--step-s", "0.02", *ENDLESS, *bucket.options(way), **bucket.env)
    playground.wait_for(lambda: playground.complete(bucket.view) or not child.ended.empty(), "a checkpoint")
    playground.kill_keepers()
    child.kill()
    child.wait()
    playground.kill_keepers()
    playground.wait_for_keepers()
    shutil.rmtree(playground.local, ignore_errors=True)
    assert playground.check_all_complete_verify(bucket.view) > 0
    second = playground.finish(*bucket.options(way), **bucket.env)
    assert "restored step" in second.said() or playground.num_steps() >= TOTAL
    assert playground.final() == uninterrupted
    assert playground.complete(bucket.view)[0][1] == TOTAL
    assert playground.check_all_complete_verify(bucket.view) > 0


@pytest.mark.parametrize("way", EACH_WAY)
def test_training_continues_while_the_bucket_does_not_answer(
    playground: Playground, bucket: Bucket, way: str
):
    """503 to everything, for longer than a request is tried: steps are made, saves skipped or kept nearby."""
    pauses = ("--pause-at", "10", "--pause-at", "260")
    child = playground.start(*pauses, "--memory", "1MB", *bucket.options(way), total=600, **bucket.env)
    playground.wait_for(lambda: playground.complete(bucket.view) or not child.ended.empty(), "a checkpoint")
    bucket.proxy.inject("503", times=None)
    playground.let_go(10)
    playground.wait_for_steps(260)  # without a local folder, the memory is full long before
    if way == "tiered":
        playground.wait_for(lambda: playground.has_event("drain-failed", playground.local), "a failed drain")
    bucket.proxy.clear()
    playground.let_go(260)
    assert child.wait() == 0, child.said()
    assert playground.complete(bucket.view)[0] == (1, 600)
    assert playground.check_all_complete_verify(bucket.view) > 0
    assert "SaveWarning" in child.said()


@pytest.mark.slow
def test_a_bucket_that_stays_unavailable_is_an_error_in_the_end(playground: Playground, bucket: Bucket):
    """After the user's own limit the next save raises."""
    options = ("--step-s", "0.01", "--patience", "0.5s", *bucket.options())
    child = playground.start(*options, total=100_000, **bucket.env)
    playground.wait_for(lambda: playground.complete(bucket.view) or not child.ended.empty(), "a checkpoint")
    bucket.proxy.inject("503", times=None)
    assert child.wait() == 1, child.said()
    bucket.proxy.clear()
    assert "RetryLater" in child.said()
    assert playground.check_all_complete_verify(bucket.view) > 0


@pytest.mark.parametrize(
    "kind", ["manifest", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("part", "data"))]
)
def test_a_bucket_that_loses_an_object_of_the_newest_falls_back(
    playground: Playground, bucket: Bucket, uninterrupted: str, kind: str
):
    """The older checkpoint is found, and the run still ends right."""
    child = playground.start("--step-s", "0.01", *ENDLESS, *bucket.options(), **bucket.env)
    playground.wait_for(
        lambda: len(playground.complete(bucket.view)) > 1 or not child.ended.empty(), "two checkpoints"
    )
    child.kill()
    child.wait()
    playground.wait_for_keepers()
    attempt, step = playground.complete(bucket.view)[0]
    lost = {
        "manifest": names.manifest(step, attempt),
        "part": names.part(step, attempt, 0),
        "data": names.data(step, attempt, 0),
    }[kind]
    bucket.store.delete(lost)
    second = playground.finish(*bucket.options(), **bucket.env)
    assert "restored step" in second.said()
    assert playground.final() == uninterrupted
    assert playground.check_all_complete_verify(bucket.view, damaged=(attempt, step)) > 0


def test_lost_answers_and_broken_connections_are_retried_silently(
    playground: Playground, bucket: Bucket, uninterrupted: str
):
    """Every few requests fail in some way, commits among them; nothing is lost and no warning is shown."""
    for nth, fault in enumerate(("reset-after", "503", "reset-before", "truncate", "500"), start=3):
        for again in range(6):
            bucket.proxy.inject(fault, nth=nth * 5 + again * 37)
    playground.finish(*bucket.options(), **bucket.env)
    assert playground.final() == uninterrupted
    assert playground.complete(bucket.view)[0] == (1, TOTAL)
    assert playground.check_all_complete_verify(bucket.view) > 0


@pytest.mark.parametrize(
    ("seed", "num_kills"),
    [
        pytest.param(1, 3, marks=pytest.mark.essential),
        *(pytest.param(seed, 5, marks=pytest.mark.slow) for seed in range(100, 120)),
    ],
)
def test_random_kills(playground: Playground, bucket: Bucket, uninterrupted: str, seed: int, num_kills: int):
    """Kill at random moments of uploads."""
    draw = random.Random(seed)
    options = bucket.options(draw.choice(WAYS))
    for _ in range(num_kills):
        kill_host_at_random(playground, draw, *options, place=bucket.view, **bucket.env)
    playground.finish(*options, **bucket.env)
    assert playground.final() == uninterrupted
    assert playground.check_all_complete_verify(bucket.view) > 0
