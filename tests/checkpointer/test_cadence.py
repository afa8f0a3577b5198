"""Which steps are saved and which saves are sent home, decided alike on all ranks; without any I/O."""

from __future__ import annotations

from holdfast.checkpoint.policy import single_policies
from holdfast.checkpoint.run.cadence import Cadence, Flags, HomeCadence


def make_home(every: int | str | None = None) -> HomeCadence:
    return HomeCadence(None if every is None else single_policies(every), now_s=0.0)


def make_cadence(every: int | str, *, rank: int = 0) -> Cadence:
    return Cadence(single_policies(every), make_home(), rank=rank, now_s=0.0)


def sent_home(home: HomeCadence, steps: range) -> list[int]:
    return [step for step in steps if home.decide(step, 0.0, must=False, alone=False)]


def test_a_single_rank_decides_at_once() -> None:
    cadence = make_cadence("10s")
    assert not cadence.decide(1, 9.0, cadence.add_clock(1, 9.0, Flags()), sent_step=1).is_due
    assert cadence.decide(2, 11.0, cadence.add_clock(2, 11.0, Flags()), sent_step=2).is_due
    cadence.save(2, 11.0)
    assert not cadence.decide(3, 20.0, cadence.add_clock(3, 20.0, Flags()), sent_step=3).is_due


def test_only_the_clock_of_rank_0_counts() -> None:
    late = [make_cadence("10s", rank=rank).add_clock(1, 11.0, Flags()) for rank in range(2)]
    assert [flags.is_due for flags in late] == [True, False]


def test_steps_need_no_flags() -> None:
    cadence = make_cadence(5, rank=1)
    due = [step for step in range(1, 11) if cadence.decide(step, 0.0, Flags(), sent_step=step).is_due]
    assert due == [5, 10]


def test_flags_sent_before_a_save_cause_no_second_one() -> None:
    """Rank 0 sends a flag at step 3, all ranks save step 4, and then the flag arrives."""
    cadence = make_cadence(4, rank=1)
    cadence.save(4, 0.0)
    late = Flags(is_due=True, is_torn=True)
    assert cadence.decide(5, 0.0, late, sent_step=3) == Flags()
    assert cadence.decide(6, 0.0, late, sent_step=5) == late


def test_a_preemption_is_due_whatever_was_saved() -> None:
    cadence = make_cadence(1000, rank=1)
    cadence.save(1, 0.0)
    assert cadence.decide(1, 0.0, Flags(is_preempted=True), sent_step=1).is_due


def test_a_rebalance_notice_makes_a_save_due_like_the_clock() -> None:
    cadence = make_cadence(1000)
    flags = cadence.add_clock(1, 0.0, Flags(is_due=True))
    assert cadence.decide(1, 0.0, flags, sent_step=1) == Flags(is_due=True)


def test_steps_are_measured_without_the_time_of_saves() -> None:
    cadence = make_cadence("auto")
    cadence.begin_step(0.0)
    cadence.end_step(1.0, in_flight=False)
    cadence.save(1, 5.0)  # the save took 4 s
    cadence.end_step(6.5, in_flight=True)
    cadence.meter.saved(blocked_s=0.25, durable_s=1.0)
    assert cadence.meter.save_cost_s == 0.75  # blocked, and half a second in the slower step


def test_without_a_policy_every_save_is_sent_home() -> None:
    assert sent_home(make_home(), range(1, 4)) == [1, 2, 3]


def test_steps_are_counted_alike_on_every_rank() -> None:
    assert sent_home(make_home(10), range(2, 31, 2)) == [10, 20, 30]


def test_a_save_that_must_go_home_is_sent() -> None:
    home = make_home(10)
    assert home.decide(3, 0.0, must=True, alone=False)
    assert not home.decide(4, 0.0, must=False, alone=False)


def test_the_clock_for_home_is_rank_0s_unless_it_is_alone() -> None:
    home = make_home("10s")
    assert home.is_due(5, 11.0, timed=True)
    assert not home.decide(5, 11.0, must=False, alone=False), "not all ranks have received it"
    home.receive(is_due=True, sent_step=5)
    assert home.decide(6, 11.0, must=False, alone=False)
    home.receive(is_due=True, sent_step=6)
    assert not home.decide(7, 11.0, must=False, alone=False), "it was sent before the last save went home"
    assert home.decide(8, 22.0, must=False, alone=True)
