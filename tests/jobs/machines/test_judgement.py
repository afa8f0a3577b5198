"""Machines that stand out: found when they lose attempts, and never few attempts or one job alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.jobs.machines import MAX_CHANCE, MIN_LOST, MachineEvent, NodeStanding, judge, stratified_tail
from holdfast.jobs.slurm.commands import choose_excluded


def event(
    machine: str, job: str, attempt: int = 1, *, is_lost: bool = False, is_wrong: bool = False
) -> MachineEvent:
    """Return an event."""
    why = "was lost" * is_lost
    return MachineEvent(1e9 + attempt, machine, job, attempt, is_lost=is_lost, is_wrong=is_wrong, why=why)


def run_jobs(seed: int, chances: dict[str, float], *, num_jobs: int, num_nodes: int) -> list[MachineEvent]:
    """Return the events of jobs that are restarted on other machines until an attempt is not lost."""
    draw = random.Random(seed)
    found: list[MachineEvent] = []
    for number in range(num_jobs):
        for attempt in range(1, 20):
            machines = draw.sample(sorted(chances), num_nodes)
            lost = {name for name in machines if draw.random() < chances[name]}
            found += [event(name, f"job-{number}", attempt, is_lost=name in lost) for name in machines]
            if not lost:
                break
    return found


def named(standings: list[NodeStanding]) -> list[str]:
    return [one.name for one in standings if one.stands_out]


@pytest.mark.parametrize(("num_nodes", "num_jobs"), [(1, 400), (4, 120)])
def test_a_machine_that_loses_most_attempts_stands_out(num_nodes: int, num_jobs: int) -> None:
    chances = {f"n{number}": 0.02 for number in range(20)} | {"n7": 0.7}
    runs = [run_jobs(seed, chances, num_jobs=num_jobs, num_nodes=num_nodes) for seed in range(10)]
    accused = [named(judge(events)) for events in runs]
    assert all("n7" in names for names in accused)
    assert sum(len(names) - 1 for names in accused) == 0


@pytest.mark.parametrize(("num_nodes", "chance"), [(1, 0.05), (1, 0.3), (4, 0.05), (4, 0.2)])
def test_equal_machines_are_hardly_ever_accused(num_nodes: int, chance: float) -> None:
    """In 100 records the rule allows one accusation on average; many machines share the chance."""
    chances = {f"n{number}": chance for number in range(20)}
    runs = [run_jobs(seed, chances, num_jobs=30, num_nodes=num_nodes) for seed in range(100)]
    assert sum(bool(named(judge(events))) for events in runs) <= 3


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.booleans()), max_size=40))
@settings(max_examples=200)
def test_few_losses_accuse_nobody(rows: list[tuple[str, str, bool]]) -> None:
    events = [event(name, job, number, is_lost=lost) for number, (name, job, lost) in enumerate(rows)]
    for one in judge(events):
        assert one.attempts == sum(name == one.name for name, _, _ in rows)
        assert one.lost == sum(name == one.name and lost for name, _, lost in rows)
        assert 0.0 <= one.chance <= 1.0
        assert not (one.stands_out and (one.lost < MIN_LOST or one.chance > MAX_CHANCE))


GREEDY = [event("n1", "greedy", attempt, is_lost=True) for attempt in range(1, 30)]
OTHERS = [event(f"n{number}", f"job-{number}") for number in range(2, 30)]
LONG = [
    event(f"n{rank}", "long", attempt, is_lost=rank == 3) for attempt in range(1, 7) for rank in range(16)
]
ALONE = [event("here", f"job-{number}", is_lost=True) for number in range(50)]


@pytest.mark.parametrize(
    ("events", "accused"),
    [
        pytest.param(GREEDY + OTHERS, [], id="one job that kills its machine each time does not accuse it"),
        pytest.param(LONG, ["n3"], id="one long job of many nodes finds its bad one"),
        pytest.param(ALONE, [], id="a machine alone has nothing to be compared with"),
    ],
)
def test_losses_are_compared(events: list[MachineEvent], accused: list[str]) -> None:
    assert named(judge(events)) == accused


def test_a_wrong_result_needs_no_comparison() -> None:
    (one,) = judge([event("here", "job", is_wrong=True)])
    assert one.stands_out
    assert one.wrong_results == 1


few = st.integers(0, 6)
pairs = st.tuples(few, few).map(lambda pair: (max(pair), min(pair)))


@given(st.lists(st.tuples(pairs, pairs).map(lambda row: (*row[0], *row[1])), max_size=4))
def test_the_probability_is_that_of_drawing_the_losses(strata: list[tuple[int, int, int, int]]) -> None:
    """Compared with drawing: each stratum's losses are given to random attempts of it."""
    draw = random.Random(1)
    seen = sum(lost for _, lost, _, _ in strata)
    num_draws = 400
    hits = 0
    for _ in range(num_draws):
        drawn = 0
        for runs, lost, other_runs, other_lost in strata:
            whole = range(runs + other_runs)
            drawn += sum(one < runs for one in draw.sample(whole, lost + other_lost))
        hits += drawn >= seen
    assert abs(stratified_tail(strata) - hits / num_draws) < 0.13


@given(st.integers(0, 12), st.integers(1, 12), st.integers(0, 12))
def test_the_job_can_always_run_without_the_excluded_nodes(num_bad: int, num_nodes: int, num_good: int):
    bad = [f"bad-{number}" for number in range(num_bad)]
    usable = bad + [f"good-{number}" for number in range(num_good)]
    standings = judge([event(name, "job", is_wrong=True) for name in bad])
    chosen = choose_excluded(standings, usable, num_nodes=num_nodes)
    assert set(chosen) <= set(bad)
    assert not chosen or len(usable) - len(chosen) >= num_nodes
    assert len(chosen) <= max(1, len(usable) // 10)
    assert choose_excluded(standings, usable[num_bad:], num_nodes=num_nodes) == ()
