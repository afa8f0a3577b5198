"""Notices of Ray Train: one save for each node that is reclaimed."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.watch.preemption.notice import Notice, Unreachable
from holdfast.watch.preemption.sources import Ray, parse_sources, ray_context


def info(*nodes: str, deadline_ms: int | None = None) -> Any:
    return SimpleNamespace(preempted_node_to_ranks={node: [0] for node in nodes}, deadline_ms=deadline_ms)


def worker(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    """Make this process one that runs a training function of Ray's."""
    name = "ray.train.v2._internal.execution.context"
    module: Any = types.ModuleType(name)
    module._train_context = context
    monkeypatch.setitem(sys.modules, name, module)


def test_each_node_asks_for_one_save() -> None:
    found = iter([None, info("a", deadline_ms=5500), info("a"), info("a", "b"), info("a", "b")])
    source = Ray(lambda: next(found))
    assert source.poll() is None
    assert source.poll() == Notice("ray", "a node is reclaimed", 5.5, is_final=False)
    assert source.poll() is None
    assert source.poll() == Notice("ray", "a node is reclaimed", is_final=False)
    assert source.poll() is None


def test_a_worker_of_ray_polls_ray_and_no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_context() is None
    assert parse_sources("ray").clouds[0].poll() is None
    worker(monkeypatch, SimpleNamespace(preemption_context=SimpleNamespace(preemption_info=info("a"))))
    (source,) = parse_sources("auto").clouds
    assert source.name == "ray"
    notice = source.poll()
    assert notice is not None
    assert not notice.is_final


def test_a_version_of_ray_without_notices_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    worker(monkeypatch, SimpleNamespace())
    with pytest.raises(Unreachable, match="no preemption info"):
        Ray().poll()
