"""Verdicts on measured steps; differences within the noise do not count."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.train.tuning.measurements import (
    MIN_GAIN,
    CompileMeasurements,
    StepTiming,
    judge_compile,
    measure_throughput,
)


def race(eager: list[float], compiled: list[float], *, warm_up_s: float = 10.0) -> CompileMeasurements:
    return CompileMeasurements(
        "whole", tuple(eager), tuple(compiled), warm_up_s, eager[0] if eager else 0.0, None, None
    )


def step(wall_s: float, *, wait_s: float = 0.0, is_odd: bool = False) -> StepTiming:
    return StepTiming(wall_s, wall_s / 2, wait_s, 8, None, is_odd)


@pytest.mark.parametrize(
    ("eager", "compiled", "pays", "costs", "break_even_steps"),
    [
        ([0.2] * 8, [0.1] * 8, True, False, 100),
        ([0.1] * 8, [0.13] * 8, False, True, None),
        ([1.02] * 20, [1.0] * 20, False, False, None),
        ([0.1], [], False, False, None),
    ],
    ids=["a clear gain", "a clear loss", "a gain below three percent", "too few steps"],
)
def test_compiling_pays_after_a_number_of_steps_or_costs_or_neither(
    eager: list[float], compiled: list[float], pays: bool, costs: bool, break_even_steps: int | None
) -> None:
    verdict = judge_compile(race(eager, compiled, warm_up_s=10.0))
    assert (verdict.pays, verdict.costs, verdict.break_even_steps) == (pays, costs, break_even_steps)
    assert verdict.speed_up == (pytest.approx(eager[0] / compiled[0]) if compiled else 0.0)
    assert bool(verdict.failure) == (not compiled)


def test_a_gain_within_the_spread_does_not_pay() -> None:
    generator = random.Random(0)
    eager = [1.05 * generator.uniform(0.7, 1.3) for _ in range(8)]
    compiled = [generator.uniform(0.7, 1.3) for _ in range(8)]
    assert not judge_compile(race(eager, compiled)).pays


@given(
    st.lists(st.floats(0.01, 10), min_size=2, max_size=20),
    st.lists(st.floats(0.01, 10), min_size=2, max_size=20),
)
def test_a_verdict_never_both_pays_and_costs(eager: list[float], compiled: list[float]) -> None:
    verdict = judge_compile(race(eager, compiled))
    assert not (verdict.pays and verdict.costs)
    assert verdict.noise >= MIN_GAIN
    assert (verdict.break_even_steps is not None) == verdict.pays


def test_steps_that_start_an_epoch_count_only_if_they_are_the_majority() -> None:
    few = [step(0.1), step(0.1), step(5.0, is_odd=True), step(0.1)]
    assert measure_throughput(few, "cpu").items_per_s == pytest.approx(80)
    many = [step(0.1), step(0.3, is_odd=True), step(0.3, is_odd=True)]
    assert measure_throughput(many, "cpu").step_s == pytest.approx(0.3)


def test_work_is_cpu_time_on_a_cpu_and_wall_time_elsewhere() -> None:
    steps = [step(0.2, wait_s=0.05)] * 4
    assert measure_throughput(steps, "cpu").work_s == pytest.approx(0.1)
    assert measure_throughput(steps, "cuda").work_s == pytest.approx(0.2)
    assert measure_throughput(steps, "cpu").wait_share == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("eager", "compiled", "ratio"),
    [(100, 50, 0.5), (100, 130, 1.3), (100, 0, None), (1000, 3, None), (3, 1000, None), (None, 50, None)],
)
def test_the_memory_ratio_needs_allocations_of_both_kinds_of_steps(
    eager: int | None, compiled: int | None, ratio: float | None
) -> None:
    took = replace(race([0.2] * 8, [0.1] * 8), eager_bytes=eager, compiled_bytes=compiled)
    assert judge_compile(took).memory_ratio == ratio
