"""The record of machines: limited, damaged and cleared; and the events of attempts."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.errors import NotFound
from holdfast.jobs import clear_node, machines, nodes
from holdfast.jobs.machines import MachineEvent, add_events, attempt_events, read_events
from holdfast.jobs.node.checks.result import Check, NodeChecks
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.state_machine import JobState

LOST = Outcome(Phase.RUN)
STOPPED = Outcome(Phase.RUN, killed_by=9, is_stopped=True)
FAILED = Outcome(Phase.RUN, code=1)
DONE = Outcome(Phase.RUN, code=0)
NOW = time.time()


def event(machine: str, number: int = 1, *, is_wrong: bool = False) -> MachineEvent:
    """Return an event of now."""
    return MachineEvent(NOW, machine, "job", number, is_wrong=is_wrong)


def test_events_are_read_back(tmp_path: Path) -> None:
    events = [event("n1"), replace(event("n2", 2), is_lost=True, failed=("disk",), why="x\n\x1b")]
    add_events(tmp_path, events)
    assert read_events(tmp_path) == events
    assert (tmp_path / "nodes.jsonl").stat().st_mode & 0o077 == 0


def test_a_missing_record_is_empty(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    (tmp_path / "nodes.jsonl").mkdir()
    assert read_events(tmp_path) == []


@given(st.data())
def test_damage_costs_only_its_own_lines(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = tmp_path_factory.mktemp("state")
    add_events(folder, [event(f"n{number}", number) for number in range(8)])
    path = folder / "nodes.jsonl"
    text = bytearray(path.read_bytes().rstrip(b"\0"))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    path.write_bytes(text)
    found = {one.machine for one in read_events(folder)}
    assert len(found & {f"n{number}" for number in range(8)}) >= 6
    add_events(folder, [event("later")])
    assert read_events(folder)[-1].machine == "later"


def test_old_events_are_forgotten(tmp_path: Path) -> None:
    old = replace(event("n1"), unix_s=NOW - machines.REMEMBERED_S - 1)
    add_events(tmp_path, [old, event("n2")])
    assert [one.machine for one in read_events(tmp_path)] == ["n2"]


def test_the_record_has_a_limit(tmp_path: Path) -> None:
    why = "x" * 10_000  # shortened
    for number in range(4):
        add_events(tmp_path, [replace(event(f"n{number}"), why=why)] * 2000)
    assert (tmp_path / "nodes.jsonl").stat().st_size < machines.MAX_BYTES + (1 << 20)
    found = read_events(tmp_path)
    assert len(found) >= machines.KEPT_EVENTS
    assert found[-1].machine == "n3"


def _write_some(folder: Path, name: str) -> None:
    for number in range(100):
        add_events(folder, [event(name, number)])


def test_several_controllers_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_some, args=(tmp_path, f"n{number}")) for number in range(3)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert len(read_events(tmp_path)) == 300


def test_a_cleared_node_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path))
    add_events(tmp_path, [event("n1", is_wrong=True), event("n2")])
    assert [(one.name, one.stands_out) for one in nodes()] == [("n1", True), ("n2", False)]
    clear_node("n1")
    assert [one.name for one in nodes()] == ["n2"]
    add_events(tmp_path, [event("n1")])
    assert [one.stands_out for one in nodes()] == [False, False]
    with pytest.raises(NotFound, match="no-such"):
        clear_node("no-such")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        add_events(tmp_path, [event("n1")])


def events_of(outcomes: dict[int, Outcome], *machines: str, **more: Any) -> dict[str, MachineEvent]:
    """Return the events of an attempt by machine, by default of n0 and n1."""
    ended = JobState(attempt=2, outcomes=outcomes, is_noticed=more.pop("is_noticed", False))
    found = attempt_events(machines or ("n0", "n1"), ended, more.pop("checks", {}), job="j", **more)
    assert len(found) == len({one.machine for one in found})
    return {one.machine: one for one in found}


def test_only_the_lost_node_has_lost_an_attempt() -> None:
    found = events_of({0: STOPPED})
    assert (found["n0"].is_lost, found["n1"].is_lost) == (False, True)
    assert found["n1"].why == "was lost"
    assert not any(one.is_lost for one in events_of({0: FAILED, 1: STOPPED}).values()), "an error of the job"
    assert not any(one.is_lost for one in events_of({0: DONE, 1: DONE}).values())


def test_a_preempted_attempt_is_nobodys_fault() -> None:
    assert not any(one.is_lost for one in events_of({0: STOPPED}, is_noticed=True).values())


def test_all_nodes_at_once_are_lost_with_the_one_that_failed() -> None:
    assert not any(one.is_lost for one in events_of({}).values())
    found = events_of({}, gone=frozenset({"n0"}))
    assert (found["n0"].is_lost, found["n1"].is_lost) == (True, False)


def test_an_unfit_node_has_lost_the_attempt_and_its_checks_are_counted() -> None:
    unfit = Outcome(Phase.SETUP, code=1, unfit="product cores: wrong")
    checks = NodeChecks("n1", NOW, 0.1, 0.1, (Check("product", "cores", "wrong", True, True), Check("disk")))
    found = events_of({0: STOPPED, 1: unfit}, checks={1: checks})
    facts = [(one.machine, one.is_lost, one.is_wrong, one.failed) for one in found.values()]
    assert facts == [("n0", False, False, ()), ("n1", True, True, ("product",))]


def test_nodes_on_one_machine_count_once() -> None:
    (found,) = events_of({0: STOPPED}, "here", "here").values()
    assert found.is_lost
