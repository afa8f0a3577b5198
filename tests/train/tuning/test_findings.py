"""Findings from measurements, and measurements without a finding."""

from __future__ import annotations

import json

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from holdfast.system.documents import decode_as
from holdfast.train.tuning import findings
from holdfast.train.tuning.findings import TrialResult
from holdfast.train.tuning.measurements import (
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
    measure_throughput,
)

LINE, OTHER = SourceLine("train.py", 7, "loss.item()"), SourceLine("train.py", 9)
LOADER = LoaderInfo(0, SourceLine("train.py", 3), SourceLine("data.py", 5), 4, 0, is_iterable=False)
STEPS = StepMeasurements(
    device="cpu",
    steps=(StepTiming(0.1, 0.05, 0.0, 4),) * 5,
    call=SourceLine("train.py", 6),
    optimizer="AdamW",
    learning_rate=1e-3,
    loader=LOADER,
    shapes=("(4, 128)",),
    lengths=None,
    compiled_at=None,
    has_random=False,
    num_blocks=0,
)


def sync(place: SourceLine = LINE, *, num_steps: int = 10, kind: str = ".item()") -> HostSync:
    return HostSync(kind, place, None, num_steps, num_steps, 0.01, in_forward=False)


def trial(
    value: int, rate: float, *, step_s: float = 0.1, noise: float = 0.03, **more: object
) -> TrialResult:
    return replace(TrialResult(value, step_s, rate, 0.0, noise, None), **more)  # type: ignore[arg-type]


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
    trials = [trial(0, 40), trial(1, 70, step_s=0.06), trial(2, 90, step_s=0.04), trial(4, 0, failure="no")]
    (one,) = findings.find_input(waiting, now, trials)
    assert one.place == LOADER.place
    assert "`num_workers=2`" in one.change
    assert one.share == pytest.approx(0.6)
    (one,) = findings.find_input(waiting, now, [trial(0, 40), trial(2, 41, step_s=0.099)])
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


def test_the_smallest_batch_at_full_speed_is_suggested_unless_its_gain_is_noise() -> None:
    (one,) = findings.find_batch(STEPS, trial(4, 100), [trial(8, 192), trial(16, 196), trial(32, 197)])
    for text in ("`batch_size=8`", "0.002", "0.00141"):  # by the linear and the square root rule
        assert text in one.change
    assert findings.find_batch(STEPS, trial(4, 100), [trial(8, 108)]) == []
    assert findings.find_batch(STEPS, trial(4, 100, noise=0.2), [trial(8, 110)]) == []
    assert findings.find_batch(STEPS, trial(4, 100), [trial(8, 0, failure="out of memory")]) == []
    steps = replace(STEPS, steps=(StepTiming(0.1, 0.05, 0.0, 16),) * 5)
    (one,) = findings.find_batch(steps, trial(4, 100), [trial(8, 190)])
    assert "Accumulate 2 batches per step instead of 4" in one.change


def test_a_batch_that_exceeds_memory_is_not_tried() -> None:
    tried = [trial(4, 1, peak_bytes=100), trial(8, 1, peak_bytes=140)]
    assert findings.fits_next(tried, 16, 220)
    assert not findings.fits_next(tried, 16, 219)
    assert findings.fits_next([trial(4, 1)], 8, 1)  # without measurements


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
