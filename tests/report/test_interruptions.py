"""Costs of interruptions: by hand, and against simulated runs; overlapping spans are counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.run import Done
from holdfast.watch.report.interruptions import Spans, seconds_of
from holdfast.watch.report.open_metrics import format_metrics
from holdfast.watch.report.page import headline_numbers
from holdfast.watch.report.summary import RunSummary, summarize
from report.made_up_run import START, Fate, MadeUpRun, simulate


def summary_of(made_up: MadeUpRun, *, finished: Done | None = None) -> RunSummary:
    """Return the summary of a made-up run."""
    return summarize(made_up.by_time(), made_up.claims, finished=finished)


@pytest.fixture
def killed() -> MadeUpRun:
    """Saves at 10 s, 20 s and 30 s; killed at about 36 s; another attempt at 100 s resumes at 104 s."""
    made_up = MadeUpRun().save_each(10, 20, 30, blocked_s=0.5)
    made_up.claim(2, 100.0)
    made_up.add(2, 104.0, "restored", 30, seconds=4.0)
    made_up.save(2, 40, 114.0, blocked_s=0.5)
    return made_up


def test_the_cost_of_a_kill(killed: MadeUpRun) -> None:
    (one,) = summary_of(killed).interruptions
    assert (one.kind, one.before, one.after, one.is_failure) == ("stopped", 1, 2, True)
    assert (one.last_step, one.restored_step, one.steps_lost) == (30, 30, 0)
    assert (one.redo_s, one.down_s, one.restore_s) == pytest.approx((0.0, 69.5, 4.0))
    assert one.max_steps_lost == 9  # it would have saved after 10 more


def test_the_last_step_that_the_keeper_recorded_makes_the_lost_steps_exact(killed: MadeUpRun) -> None:
    killed.add(1, 36.0, "killed", 36)
    (one,) = summary_of(killed).interruptions
    assert (one.kind, one.last_step, one.steps_lost, one.max_steps_lost) == ("stopped", 36, 6, 6)
    assert (one.redo_s, one.down_s) == pytest.approx((5.5, 64.0))


def test_a_first_save_that_makes_the_claim_is_within_its_attempt() -> None:
    made_up = MadeUpRun().save(1, 1, 10.0, blocked_s=0.3)
    made_up.claim(1, 10.2)
    made_up.save(1, 2, 12.0, blocked_s=0.1)
    summary = summary_of(made_up)
    assert summary.times.total_s == pytest.approx(2.1)
    assert summary.times.blocked_s == pytest.approx(0.4)
    assert summary.overhead_share == pytest.approx(0.4 / 2.1)


def test_training_resumes_once_the_last_rank_has_restored(killed: MadeUpRun) -> None:
    killed.add(2, 106.0, "restored", 30, seconds=6.0, rank=1)
    (one,) = summary_of(killed).interruptions
    assert one.restore_s == pytest.approx(6.0)


def test_the_advice_after_a_kill(killed: MadeUpRun) -> None:
    advice = summary_of(killed).advice
    assert (advice.num_failures, advice.mtbf_s) == (1, pytest.approx(41.0))
    assert (advice.cost_s, advice.interval_s, advice.step_s) == pytest.approx((0.5, 10.0, 0.95))
    assert advice.own is not None
    assert advice.own.young_s == pytest.approx((2 * 0.5 * 41) ** 0.5)
    assert advice.useful_s == pytest.approx(advice.own.daly_s)


def test_training_beyond_an_older_restored_step_is_repeated(killed: MadeUpRun) -> None:
    killed.events = [event for event in killed.events if event.attempt == 1]
    killed.add(2, 104.0, "restored", 10, detail="skipped step 30 of attempt 1: rotten")
    (one,) = summary_of(killed).interruptions
    assert (one.steps_lost, one.kind) == (20, "stopped")
    assert (one.redo_s, one.down_s, one.restore_s) == pytest.approx((20.0, 69.5, 4.0))


def test_the_restored_copy_counts_even_if_a_newer_one_of_the_step_exists(killed: MadeUpRun) -> None:
    """Attempt 2 saved step 30 again; that copy is damaged, so attempt 3 falls back on attempt 1's."""
    killed.events = [event for event in killed.events if event.attempt == 1]
    killed.add(2, 104.0, "restored", 10)
    killed.save(2, 30, 130.0)
    killed.claim(3, 140.0)
    killed.add(3, 142.0, "restored", 30, detail="skipped step 30 of attempt 2: rotten")
    _, second = summary_of(killed).interruptions
    assert second.cost_s == pytest.approx(142.0 - 104.0)


def test_starts_without_training_count_as_failures_and_as_time_down(killed: MadeUpRun) -> None:
    del killed.claims[2]
    killed.events = [event for event in killed.events if event.attempt == 1]
    for number, at_s in ((2, 50.0), (3, 60.0), (4, 100.0)):
        killed.claim(number, at_s)
    killed.add(4, 104.0, "restored", 30)
    summary = summary_of(killed)
    (one,) = summary.interruptions
    assert (one.num_failed_starts, one.down_s) == (2, pytest.approx(69.5))
    assert summary.advice.num_failures == 3


def test_without_a_failure_the_best_interval_is_unknown() -> None:
    made_up = MadeUpRun().save_each(10, 20, 30, blocked_s=0.5)
    advice = summary_of(made_up).advice
    assert (advice.own, advice.mtbf_s, advice.useful_s, advice.lost_share) == (None, None, None, None)
    assert advice.mtbf_bounds_s == (pytest.approx(30.5 / 2.9957, rel=1e-3), None)
    assert [one.mtbf_s for one in advice.assumed] == [3600, 4 * 3600, 86400, 7 * 86400]


def test_the_extension_of_a_finished_run_is_not_a_failure(killed: MadeUpRun) -> None:
    summary = summary_of(killed, finished=Done("run", 1, 30, START + 31))
    (one,) = summary.losses.gaps
    assert (one.kind, one.is_failure) == ("finished", False)
    assert summary.interruptions == ()
    assert summary.times.idle_s == pytest.approx(69.5)
    assert summary.times.lost_s == pytest.approx(4.0)
    assert summary.advice.mtbf_s is None


@pytest.mark.parametrize(
    ("end", "kind", "is_failure"),
    [
        ("preempted (SIGTERM)", "preempted", False),
        ("went back to step 10", "went back", False),
        ("finished", "finished", False),
        ("closed", "closed", False),
        ("RuntimeError: NaN", "stopped", True),
    ],
)
def test_the_recorded_end_of_an_attempt_determines_its_kind(
    killed: MadeUpRun, end: str, kind: str, is_failure: bool
) -> None:
    killed.add(1, 40.0, "ended", 38, detail=end)
    summary = summary_of(killed)
    (one,) = summary.losses.gaps
    assert (one.kind, one.is_failure, one.end) == (kind, is_failure, end)
    assert summary.interruptions == (() if kind in ("finished", "closed") else (one,))
    assert (one.last_step, one.steps_lost, one.max_steps_lost) == (38, 8, 8)
    assert one.redo_s == pytest.approx(9.5)


def test_a_restarted_container_did_not_go_back(killed: MadeUpRun) -> None:
    """Every process in a container may have the id 1, and the host's name stays."""
    for number, at_s in ((1, 0.0), (2, 100.0)):
        killed.claim(number, at_s, pid=1)
    (one,) = summary_of(killed).interruptions
    assert one.kind == "stopped"


def test_an_import_is_not_an_attempt() -> None:
    made_up = MadeUpRun().claim(1, 0.0)
    made_up.add(1, 1.0, "committed", 7, num_bytes=10, detail="imported from model.pt")
    made_up.claim(2, 500.0)
    made_up.add(2, 501.0, "restored", 7)
    made_up.save(2, 8, 510.0)
    summary = summary_of(made_up)
    assert summary.interruptions == ()
    assert summary.times.total_s == pytest.approx(10.0)


fates = st.builds(
    Fate,
    num_steps=st.integers(0, 20),
    into_step_s=st.floats(0, 0.99),
    outage_s=st.floats(0, 100),
    restore_s=st.floats(0, 10),
    num_damaged=st.integers(0, 3),
)


@given(st.lists(fates, min_size=1, max_size=8), st.integers(1, 6), st.floats(0.1, 10), st.floats(0, 0.5))
def test_lost_time_is_all_time_that_did_not_lead_to_the_final_state(
    drawn: list[Fate], every: int, step_s: float, blocked_s: float
) -> None:
    """Compare the summary, from events alone, with the simulation's own record."""
    run = simulate(drawn, every=every, step_s=step_s, blocked_s=blocked_s)
    summary = summary_of(run.made_up)
    times = summary.times
    parts = times.kept_s + times.blocked_s + times.redo_s + times.down_s + times.restore_s + times.idle_s
    assert parts == pytest.approx(times.total_s, abs=1e-3)
    trained = [attempt for attempt in summary.attempts if attempt.has_trained]
    if not trained or trained[-1].number != len(drawn):
        return  # the last attempt left no trace of training, so the end that it led to is not seen
    assert times.total_s == pytest.approx(run.total_s, abs=1e-3)
    assert times.kept_s + times.blocked_s == pytest.approx(run.useful_s, abs=1e-3)
    assert times.lost_s == pytest.approx(run.total_s - run.useful_s, abs=1e-3)
    assert sum(one.cost_s for one in summary.losses.gaps) == pytest.approx(times.lost_s, abs=1e-3)


@given(st.lists(fates, min_size=2, max_size=8), st.integers(1, 6))
def test_steps_lost_are_between_the_bounds(drawn: list[Fate], every: int) -> None:
    run = simulate(drawn, every=every, step_s=1.0, blocked_s=0.1)
    summary = summary_of(run.made_up)
    for one in summary.interruptions:
        if one.after - one.before > 1:
            continue  # what attempts in between have done is not known
        truth = run.steps_lost[one.before - 1]
        assert one.steps_lost <= truth
        assert one.max_steps_lost is None or truth <= one.max_steps_lost


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["restored", "saved", "staged", "persisted", "committed", "drained", "retained", "failed"]
        ),
        st.integers(1, 4),
        st.floats(0, 1000),
        st.integers(0, 5),
        st.floats(0, 50),
    ),
    max_size=30,
)


@given(events, st.dictionaries(st.integers(1, 4), st.floats(0, 1000)))
def test_any_history_has_a_summary(
    recorded: list[tuple[str, int, float, int, float]], claimed: dict[int, float]
) -> None:
    """With differing clocks, lost lines and unordered attempts, no value is negative."""
    made_up = MadeUpRun()
    for number, at_s in claimed.items():
        made_up.claim(number, at_s)
    for kind, attempt, at_s, step, seconds in recorded:
        made_up.add(attempt, at_s, kind, step, seconds=seconds, num_bytes=10)
    summary = summary_of(made_up)
    times = summary.times
    assert min(times.total_s, times.kept_s, times.blocked_s, times.lost_s, times.idle_s) >= 0
    assert all(one.cost_s >= 0 and one.steps_lost >= 0 for one in summary.interruptions)
    assert summary.as_json()["times"]["lost_s"] == times.lost_s


def test_a_start_of_a_finished_run_is_no_interruption_in_any_count(killed: MadeUpRun) -> None:
    killed.add(2, 120.0, "ended", 40, detail="finished")
    killed.claim(3, 130.0)
    killed.add(3, 131.0, "restored", 40)
    killed.add(3, 131.5, "ended", 40, detail="finished")
    summary = summary_of(killed, finished=Done("run", 2, 40, START + 120))
    assert [one.kind for one in summary.interruptions] == ["stopped"]
    (tile,) = (one for one in headline_numbers(summary) if one.name == "Lost to interruptions")
    assert tile.remark.startswith("1 interruption;")
    assert summary.advice.num_failures == 1
    assert [one["kind"] for one in summary.as_json()["interruptions"]] == ["stopped"]
    text = format_metrics(summary, "home")
    assert [line for line in text.splitlines() if line.startswith("holdfast_interruptions_total")] == [
        'holdfast_interruptions_total{home="home",kind="stopped"} 1'
    ]


whole_spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


@given(whole_spans)
def test_spans_match_a_set_of_seconds(
    spans: list[tuple[int, int]],
) -> None:
    ticked: set[int] = set()
    held = Spans()
    for begin, end in spans:
        seconds = set(range(begin, end))
        new = held.add(begin, end)
        assert {s for left, right in new for s in range(int(left), int(right))} == seconds - ticked
        assert seconds_of(new) == len(seconds - ticked)
        ticked |= seconds
        assert seconds_of(held.stretches) == len(ticked)
        assert seconds_of(spans) == sum(any(b <= s < e for b, e in spans) for s in range(31))
    assert all(held.contains(second + 0.5) == (second in ticked) for second in range(31))


@given(whole_spans)
def test_stretches_stay_in_order_and_do_not_touch(spans: list[tuple[int, int]]) -> None:
    held = Spans()
    for span in spans:
        held.add(*span)
    edges = [edge for stretch in held.stretches for edge in stretch]
    assert edges == sorted(set(edges))
