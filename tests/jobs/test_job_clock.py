"""The clock of a job: it counts seconds whatever happens to the machine's clock, also across controllers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from typing_extensions import override

from holdfast.jobs.controller import Controller
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.outcome import Outcome, Phase
from holdfast.jobs.records import JobRequest, JobSpec, Submission
from holdfast.jobs.state_machine import (
    AttemptDue,
    AttemptExited,
    CancelRequested,
    JobEvent,
    JobState,
    NodeExited,
    NoticeReceived,
    RestartPolicy,
)
from holdfast.jobs.status import JobStatus
from holdfast.jobs.timers import ClockReading, JobClock, Timers, read_machine_clock

START = ClockReading(unix_s=1_000_000.0, boot_s=500.0, boot_id="first")
YEAR_S = 365 * 86400.0


class MachineClock:
    """Clock of a machine that a test moves and sets."""

    def __init__(self) -> None:
        self.now = START

    def read(self) -> ClockReading:
        """Return the time."""
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        unix_s, boot_s = self.now.unix_s + seconds, self.now.boot_s + seconds
        self.now = replace(self.now, unix_s=unix_s, boot_s=boot_s)

    def jump(self, seconds: float) -> None:
        """Set the clock, as an administrator or a time server does."""
        self.now = replace(self.now, unix_s=self.now.unix_s + seconds)

    def restart(self, seconds: float, boot_id: str = "second") -> None:
        """Restart the machine, which takes some time by its clock."""
        self.now = ClockReading(self.now.unix_s + seconds, 1.0, boot_id)


def test_the_clock_begins_with_the_machine_s_and_ignores_its_jumps() -> None:
    machine = MachineClock()
    clock = JobClock(read=machine.read)
    assert clock.unix_s() == START.unix_s
    machine.jump(YEAR_S)
    machine.pass_time(5.0)
    assert clock.unix_s() == pytest.approx(START.unix_s + 5.0)
    assert clock.machine_unix_s(START.unix_s + 7.0) == pytest.approx(machine.now.unix_s + 2.0)


@given(st.lists(st.tuples(st.floats(-YEAR_S, YEAR_S), st.floats(0.0, 1e4)), max_size=5))
def test_controllers_of_one_boot_share_one_clock(turns: list[tuple[float, float]]) -> None:
    machine = MachineClock()
    clock = JobClock(read=machine.read)
    passed_s = 0.0
    for jump_s, wait_s in turns:
        last = clock.read()
        machine.jump(jump_s)
        machine.pass_time(wait_s)
        passed_s += wait_s
        clock = JobClock(last, machine.read)  # the controller was replaced
        assert clock.unix_s() == pytest.approx(START.unix_s + passed_s)


@pytest.mark.parametrize(("off_s", "expected_s"), [(600.0, 600.0), (-YEAR_S, 0.0)])
def test_after_a_restart_of_the_machine_the_clock_does_not_go_back(off_s: float, expected_s: float) -> None:
    machine = MachineClock()
    last = JobClock(read=machine.read).read()
    machine.restart(off_s)
    clock = JobClock(last, machine.read)
    assert clock.unix_s() == pytest.approx(START.unix_s + expected_s)
    machine.pass_time(3.0)
    assert clock.unix_s() == pytest.approx(START.unix_s + expected_s + 3.0)


def test_the_machine_s_clock_has_this_boot() -> None:
    first, second = read_machine_clock(), read_machine_clock()
    assert first.boot_id == second.boot_id != ""
    assert 0.0 < first.boot_s <= second.boot_s


class LoneController(Controller):
    """Controller whose one node a test ends, on a machine with a clock that the test sets."""

    def __init__(self, folder: Path, machine: MachineClock, before: LoneController | None = None) -> None:
        self.machine = machine
        state, timers = (before.state, before._timers) if before else (JobState(), None)
        clock = JobClock(before.recorded if before else None, machine.read)
        spec = JobSpec(num_nodes=1, num_gpus=0, has_setup=False, user="me")
        job = Submission(1, "lone", "lone", "local", spec, RestartPolicy(), 0.0)
        super().__init__(JobFolder(folder), job, state, timers=timers, clock=clock)
        if before is None:
            self._apply(AttemptDue())
        self.recorded = self._clock.read()
        self.is_killed = False
        self.notice_until_s: float | None = None
        self.exited: JobEvent | None = None

    def turn(self, *events: JobEvent) -> JobStatus:
        """Apply events, and then do all that is due."""
        for event in events:
            self._apply(event)
        self._act()
        while self._check():
            self._act()
        return self.state.status

    @override
    def _is_leaving(self) -> bool:
        return False

    @override
    def _save(self, state: JobState, timers: Timers, **_: object) -> None:
        self.recorded = self._clock.read()

    @override
    def _requests(self) -> Iterable[JobRequest]:
        return ()

    @override
    def _node_machines(self) -> tuple[str, ...]:
        return ()

    @override
    def _prepare_attempt(self) -> None:
        self.is_killed = False

    @override
    def _begin(self) -> None: ...

    _start_nodes = _receive_signals = _wait = _abandon = _begin

    @override
    def _notify_nodes(self, source: str, deadline_unix_s: float) -> JobEvent | None:
        self.notice_until_s = deadline_unix_s
        return None

    @override
    def _kill_nodes(self, since_unix_s: float, *, with_keepers: bool) -> None:
        self.is_killed = True

    @override
    def _node_events(self) -> Iterator[JobEvent]:
        yield from ()


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_notice_has_its_time_whatever_the_clock_does(tmp_path: Path, jump_s: float, is_replaced: bool):
    machine = MachineClock()
    controller = LoneController(tmp_path, machine)
    controller.turn(NoticeReceived(30.0))
    machine.jump(jump_s)
    machine.pass_time(20.0)
    if is_replaced:
        controller = LoneController(tmp_path, machine, controller)
    controller.turn()
    assert not controller.is_killed
    if is_replaced:  # told again, as the job reads the machine's clock
        assert controller.notice_until_s == pytest.approx(machine.now.unix_s + 10.0)
    machine.pass_time(11.0)
    controller.turn()
    assert controller.is_killed


@pytest.mark.parametrize("jump_s", [YEAR_S, -YEAR_S])
def test_the_backoff_between_attempts_is_as_long_whatever_the_clock_does(tmp_path: Path, jump_s: float):
    machine = MachineClock()
    controller = LoneController(tmp_path, machine)
    exits = (NodeExited(1, 0, Outcome(Phase.RUN, code=75)), AttemptExited(1, None))
    assert controller.turn(*exits) is JobStatus.RECOVERING
    machine.jump(jump_s)
    controller = LoneController(tmp_path, machine, controller)
    controller.turn()
    assert controller.state.attempt == 1
    machine.pass_time(2.0)
    controller.turn()
    assert controller.state.attempt == 2
    assert controller.turn(CancelRequested()) is JobStatus.CANCELLING


def test_a_backoff_that_a_restart_of_the_machine_has_cut_off_ends(tmp_path: Path) -> None:
    machine = MachineClock()
    controller = LoneController(tmp_path, machine)
    controller.turn(NodeExited(1, 0, Outcome(Phase.RUN, code=75)), AttemptExited(1, None))
    machine.restart(-YEAR_S)
    controller = LoneController(tmp_path, machine, controller)
    machine.pass_time(2.0)
    controller.turn()
    assert controller.state.attempt == 2
