"""Options of the Checkpointer as values: short forms, checks when they are made, and their effects."""

from __future__ import annotations

import datetime
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.run.options import parse_home
from holdfast.errors import InvalidInput
from stage.training import make_checkpointer


def test_the_first_field_alone_is_the_whole_value() -> None:
    assert parse_home("s3://bucket/run") == holdfast.Home("s3://bucket/run")


@pytest.mark.parametrize(
    ("kind", "values", "field"),
    [
        (holdfast.Home, {"url": "x", "every": 0}, "every"),
        (holdfast.Home, {"url": "x", "bandwidth": "fast"}, r"Home\(bandwidth=\)"),
        (holdfast.Local, {"path": "x", "keep": 0}, r"Local\(keep=\)"),
        (holdfast.Local, {"path": "x", "keep": True}, r"Local\(keep=\)"),
        (holdfast.Memory, {"limit": "much"}, r"Memory\(limit=\)"),
        (holdfast.Memory, {"keep_for": "long"}, r"Memory\(keep_for=\)"),
        (holdfast.Memory, {"when_full": "panic"}, r"Memory\(when_full=\)"),
        (holdfast.Reads, {"patience": "no"}, r"Reads\(patience=\)"),
        (holdfast.Reads, {"threads": 0}, r"Reads\(threads=\)"),
        (holdfast.CompileCache, {"limit": -1}, r"CompileCache\(limit=\)"),
        (holdfast.Limits, {"failed_saves": "ignore"}, r"Limits\(failed_saves=\)"),
        (holdfast.Limits, {"patience": "-1s"}, r"Limits\(patience=\)"),
        (holdfast.Limits, {"commit_timeout": -1}, r"Limits\(commit_timeout=\)"),
        (holdfast.Limits, {"rank_timeout": float("nan")}, r"Limits\(rank_timeout=\)"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_when_it_is_made(
    kind: Any, values: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        kind(**values)


def test_durations_are_seconds_text_or_a_timedelta() -> None:
    for value in (90, 90.0, "90s", "1.5m", datetime.timedelta(seconds=90)):
        assert holdfast.Limits(patience=value).patience_s == 90
        assert holdfast.Memory(keep_for=value).keep_for_s == 90
        assert holdfast.Reads(patience=value).patience_s == 90
        assert holdfast.Limits(commit_timeout=value).commit_timeout_s == 90
    assert holdfast.Memory(keep_for=0).keep_for_s == 0
    assert holdfast.Reads(patience=0).patience_s == 0


def test_the_environment_gives_the_default_of_keep_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_KEEP_IN_MEMORY", "5m")
    assert holdfast.Memory().keep_for_s == 300
    assert holdfast.Memory(keep_for="1m").keep_for_s == 60
    monkeypatch.setenv("HOLDFAST_KEEP_IN_MEMORY", " ")  # as if unset
    assert holdfast.Memory().keep_for_s == 120
    monkeypatch.setenv("HOLDFAST_KEEP_IN_MEMORY", "forever")
    with pytest.raises(InvalidInput, match="HOLDFAST_KEEP_IN_MEMORY"):
        _ = holdfast.Memory().keep_for_s


def test_the_constructor_keeps_to_thirteen_options() -> None:
    """More belong into one of the values; see docs/design/022-options-by-concern.md."""
    assert len(inspect.signature(holdfast.Checkpointer).parameters) == 13


def test_a_timeout_is_seconds_or_text(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "home", {"x": torch.ones(1)}) as ckpt:
        assert ckpt.save(1).result(timeout="10m") == 1
        ckpt.save(2).wait_durable(datetime.timedelta(minutes=10))
        ckpt.wait("10m")
        for wrong in ("soon", -1, True):
            with pytest.raises(InvalidInput, match=r"timeout|wait"):
                ckpt.wait(wrong)  # pyright: ignore[reportArgumentType]
        ckpt.close(timeout=600)
