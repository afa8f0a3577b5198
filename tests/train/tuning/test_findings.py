"""Findings and verdicts follow from measurements."""

from __future__ import annotations

import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from holdfast.system.documents import decode_as
from holdfast.train.tuning import findings
from holdfast.train.tuning.findings import TrialResult
from holdfast.train.tuning.measurements import (
    MIN_GAIN,
    CompileMeasurements,
    CompileVerdict,
    GraphBreak,
    GraphMeasurements,
    HostSync,
    LoaderInfo,
    Recompile,
    RowLengths,
    SourceLine,
    StepMeasurements,
    StepTiming,
    SyncMeasurements,
    judge_compile,
    measure_throughput,
)
from holdfast.train.tuning.watchers import useful_lengths

LINE, OTHER = SourceLine("train.py", 7, "loss.item()"), SourceLine("train.py", 9)
LOADER = LoaderInfo(0, SourceLine("train.py", 3), SourceLine("data.py", 5), 0, is_iterable=False)
STEPS = StepMeasurements(
    device="cpu",
    steps=(StepTiming(0.1, 0.05, 0.0, 4),) * 5,
    call=SourceLine("train.py", 6),
    loader=LOADER,
    shapes=("(4, 128)",),
    lengths=None,
    compiled_at=None,
    has_random=False,
    num_blocks=0,
)


def sync(place: SourceLine = LINE, *, num_steps: int = 10, kind: str = ".item()") -> HostSync:
    return HostSync(kind, place, None, num_steps, num_steps, 0.01, in_forward=False)


def trial(num_workers: int, *, step_s: float = 0.1, failure: str = "") -> TrialResult:
    return TrialResult(num_workers, step_s, noise=0.03, failure=failure)


def verdict(variant: str, speed_up: float) -> CompileVerdict:
    return CompileVerdict(variant, speed_up, 0.03, 20.0, 100 if speed_up > 1.03 else None, None)


def test_measurements_survive_json() -> None:
    steps = replace(STEPS, lengths=RowLengths(((1, 2), (3,)), (4, 4)))
    assert decode_as(StepMeasurements, json.dumps(to_builtins(steps)), "steps") == steps
    syncs = SyncMeasurements("cpu", 10, (sync(), replace(sync(), inside=OTHER)))
    assert decode_as(SyncMeasurements, json.dumps(to_builtins(syncs)), "syncs") == syncs


def test_a_sync_in_every_step_is_a_finding_and_an_occasional_one_is_not() -> None:
    syncs = SyncMeasurements("cpu", 10, (sync(), sync(OTHER, num_steps=1), sync(OTHER, num_steps=2)))
    (one,) = findings.find_syncs(syncs, 0.1)
    assert (one.kind, one.place) == ("sync", LINE)
    assert "every step" in one.seen


def test_a_sync_that_breaks_the_graph_is_one_finding() -> None:
    syncs = findings.find_syncs(SyncMeasurements("cpu", 10, (sync(), sync(OTHER))), 0.1)
    breaks = findings.find_breaks(GraphMeasurements(2, (GraphBreak(LINE, "cannot"),), (), 10), syncs)
    assert [(one.kind, one.place) for one in breaks] == [("graph break", LINE)]
    assert ".item()" in breaks[0].seen
    assert [one.place for one in findings.exclude_lines(syncs, breaks)] == [OTHER]


@pytest.mark.parametrize(
    ("num_times", "hit_limit", "is_finding"), [(1, False, False), (3, False, True), (1, True, True)]
)
def test_one_or_two_recompiles_are_not_a_finding(num_times: int, hit_limit: bool, is_finding: bool) -> None:
    one = Recompile(LINE, "forward", num_times, ("size mismatch",), hit_limit, is_shape=True)
    assert bool(findings.find_recompiles(GraphMeasurements(1, (), (one,), 10), 5)) == is_finding


def test_waiting_is_a_finding_with_the_best_number_of_workers_or_on_the_dataset() -> None:
    assert findings.find_input(STEPS, measure_throughput(STEPS.steps, "cpu"), []) == []
    waiting = replace(STEPS, steps=(StepTiming(0.1, 0.05, 0.06, 4),) * 5)
    now = measure_throughput(waiting.steps, "cpu")
    trials = [trial(0), trial(1, step_s=0.06), trial(2, step_s=0.04), trial(4, failure="no")]
    (one,) = findings.find_input(waiting, now, trials)
    assert one.place == LOADER.place
    assert "`num_workers=2`" in one.change
    assert one.share == pytest.approx(0.6)
    (one,) = findings.find_input(waiting, now, [trial(0), trial(2, step_s=0.099)])
    assert one.place == LOADER.sample_code, "workers do not help"


def test_compiling_is_suggested_only_if_it_pays() -> None:
    assert findings.find_compile(STEPS, [verdict("whole", 1.01), verdict("blocks", 0.9)]) == []
    (one,) = findings.find_compile(STEPS, [verdict("whole", 0.8), verdict("random", 1.2)])
    assert "fallback_random" in one.change
    assert one.place == STEPS.call
    (one,) = findings.find_compile(replace(STEPS, in_place=False), [verdict("whole", 1.5)])
    assert "`model = torch.compile(model)`" in one.change


def test_compiling_that_slows_down_or_is_useless_twice_is_a_finding() -> None:
    compiling = replace(STEPS, compiled_at=LINE)
    (one,) = findings.find_compile(compiling, [verdict("own", 0.8)])
    assert one.place == LINE
    assert "Do not compile" in one.change
    assert findings.find_compile(compiling, [verdict("own", 1.3)]) == []
    (one,) = findings.find_compile(compiling, [verdict("own", 1.02), verdict("own", 0.99)])
    assert "20.0 s of warm-up" in one.costs
    assert "Do not compile" in one.change
    assert one.share is None
    for again in ([], [verdict("own", 1.05)], [verdict("own", 1.2)]):
        assert findings.find_compile(compiling, [verdict("own", 1.0), *again]) == []
    (one,) = findings.find_compile(compiling, [verdict("own", 1.0), verdict("own random", 1.4)])
    assert "fallback_random" in one.change


def test_static_padding_is_a_finding_and_tight_padding_is_not() -> None:
    rows = tuple(tuple(10 + (i * 7 + j * 13) % 50 for j in range(8)) for i in range(12))
    wide = replace(STEPS, lengths=RowLengths(rows, (512,) * 12))
    (one,) = findings.find_padding(wide, findings.compare_lengths(wide.lengths))
    assert one.place == LOADER.sample_code
    assert "93% of the model's positions are padding" in one.seen
    even = replace(STEPS, lengths=RowLengths(((50,) * 8,) * 12, (52,) * 12))
    assert findings.find_padding(even, findings.compare_lengths(even.lengths)) == []
    assert findings.compare_lengths(RowLengths(((64,) * 8,) * 12, (64,) * 12)) is None
    assert findings.compare_lengths(None) is None


def race(eager: list[float], compiled: list[float], *, warm_up_s: float = 10.0) -> CompileMeasurements:
    return CompileMeasurements(
        "whole", tuple(eager), tuple(compiled), warm_up_s, eager[0] if eager else 0.0, None, None
    )


def step(wall_s: float, *, wait_s: float = 0.0, is_odd: bool = False) -> StepTiming:
    return StepTiming(wall_s, wall_s / 2, wait_s, 8, is_odd)


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


@given(st.lists(st.integers(1, 20), min_size=4, max_size=12), st.integers(0, 3))
def test_padded_rows_are_measured_with_any_padding_token(lengths: list[int], padding: int) -> None:
    width = 32
    tokens = torch.full((len(lengths), width), padding)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.arange(length) % 7 + 10
    assert useful_lengths([tokens], None) == (tuple(lengths), width)


def test_a_mask_takes_precedence_and_other_tensors_have_no_lengths() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert useful_lengths([torch.ones(2, 3, dtype=torch.long)], mask) == ((2, 1), 3)
    assert useful_lengths([torch.arange(40).reshape(4, 10)], None) == ((10,) * 4, 10), "without padding"
    assert useful_lengths([torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)], None) is None
