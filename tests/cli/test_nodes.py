"""`holdfast nodes`: the list within 80 columns, as JSON, and clearing a node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli.conftest import Command
from holdfast.jobs.machines import MachineEvent, add_events


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a state folder with a node that stands out, and one with a long name."""
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    why = "product cores: a product of matrices of integers is wrong: core 3 (float64), core 4 (float64)"
    now_s = time.time()
    other = MachineEvent(now_s, "a-node-with-a-long-name-as-clouds-give-them-to-their-machines", "job", 1)
    wrong = {"is_lost": True, "is_wrong": True, "failed": ("product",), "why": why}
    add_events(tmp_path, [replace(other, machine="gpu-17", **wrong), other])
    return tmp_path


def test_the_list_fits_80_columns(holdfast: Command) -> None:
    shown = holdfast("nodes").printed().out
    assert max(map(len, shown.splitlines())) <= 80
    heading, first, *_ = shown.splitlines()
    assert heading.split()[:2] == ["NODE", "ATTEMPTS"]
    assert first.split()[:3] == ["gpu-17", "1", "1"]
    assert " yes" in first
    assert "core 3 (float64)" in " ".join(shown.split())


def test_json_has_the_standings(holdfast: Command) -> None:
    first, other = holdfast("nodes", "--json").printed().json
    assert (first["name"], first["failed_checks"]) == ("gpu-17", {"product": 1})
    assert first["stands_out"]
    assert (other["attempts"], other["lost"], other["stands_out"]) == (1, 0, False)


def test_a_node_is_cleared_and_others_are_refused(holdfast: Command) -> None:
    shown = holdfast("nodes", "--clear", "gpu-18", "--clear", "gpu-17").refused("node named 'gpu-18'")
    assert shown.out == "cleared: gpu-17\n", "the one that exists"
    assert "gpu-17" not in holdfast("nodes").out
    again = holdfast("nodes", "--clear", "gpu-17")
    assert again.status != 0
    assert "Nothing is remembered about a node named 'gpu-17'" in again.err
