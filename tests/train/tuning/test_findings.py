"""From facts to findings: what is worth saying, and what is left unsaid."""

from __future__ import annotations

import dataclasses
import json

import pytest

from holdfast.train.tuning import findings, sizes
from holdfast.train.tuning.facts import (
    Break,
    Graphs,
    Lengths,
    Loader,
    Place,
    Recompile,
    Step,
    Steps,
    Sync,
    Syncs,
    plain,
    revive,
)
from holdfast.train.tuning.findings import Trial
from holdfast.train.tuning.verdict import Verdict, pace

LINE, OTHER = Place("train.py", 7, "loss.item()"), Place("train.py", 9)
LOADER = Loader(0, Place("train.py", 3), Place("data.py", 5), 4, 0, is_iterable=False)
STEPS = Steps(
    device="cpu",
    steps=(Step(0.1, 0.05, 0.0, 4, 512),) * 5,
    call=Place("train.py", 6),
    optimizer="AdamW",
    learning_rate=1e-3,
    loader=LOADER,
    shapes=("(4, 128)",),
    lengths=None,
    compiled_at=None,
    has_random=False,
    num_blocks=0,
)


def sync(place: Place = LINE, *, num_steps: int = 10, kind: str = ".item()") -> Sync:
    return Sync(kind, place, None, num_steps, num_steps, 0.01, in_forward=False)


def trial(value: int, rate: float, *, step_s: float = 0.1, noise: float = 0.03, **more: object) -> Trial:
    return dataclasses.replace(Trial(value, step_s, rate, 0.0, noise, None), **more)  # type: ignore[arg-type]


def verdict(variant: str, speed_up: float) -> Verdict:
    return Verdict(variant, speed_up, 0.03, 20.0, 100 if speed_up > 1.03 else None, None)


def test_facts_survive_json() -> None:
    steps = dataclasses.replace(STEPS, lengths=Lengths(((1, 2), (3,)), (4, 4)))
    assert revive(Steps, json.loads(json.dumps(plain(steps)))) == steps
    syncs = Syncs("cpu", 10, (sync(), dataclasses.replace(sync(), inside=OTHER)))
    assert revive(Syncs, json.loads(json.dumps(plain(syncs)))) == syncs


def test_a_sync_in_every_step_is_told() -> None:
    (one,) = findings.find_syncs(Syncs("cpu", 10, (sync(),)), 0.1)
    assert (one.kind, one.place) == ("sync", LINE)
    assert "every step" in one.seen


def test_a_sync_now_and_then_is_not() -> None:
    assert findings.find_syncs(Syncs("cpu", 10, (sync(num_steps=1), sync(num_steps=2))), 0.1) == []


def test_a_sync_that_breaks_the_graph_is_told_once() -> None:
    syncs = findings.find_syncs(Syncs("cpu", 10, (sync(), sync(OTHER))), 0.1)
    breaks = findings.find_breaks(Graphs(2, (Break(LINE, "cannot"),), (), 10), syncs)
    assert [(one.kind, one.place) for one in breaks] == [("graph break", LINE)]
    assert ".item()" in breaks[0].seen
    assert [one.place for one in findings.without(syncs, breaks)] == [OTHER]


@pytest.mark.parametrize(
    ("num_times", "hit_limit", "is_told"), [(1, False, False), (3, False, True), (1, True, True)]
)
def test_a_recompile_or_two_are_how_the_compiler_learns(
    num_times: int, hit_limit: bool, is_told: bool
) -> None:
    one = Recompile(LINE, "forward", num_times, ("size mismatch",), hit_limit, is_shape=True)
    assert bool(findings.find_recompiles(Graphs(1, (), (one,), 10), 5)) == is_told


def test_waiting_is_told_with_the_number_of_workers_that_was_best() -> None:
    waiting = dataclasses.replace(STEPS, steps=(Step(0.1, 0.05, 0.06, 4, 512),) * 5)
    now = pace(waiting.steps, "cpu")
    trials = [trial(0, 40), trial(1, 70, step_s=0.06), trial(2, 90, step_s=0.04), trial(4, 0, failure="no")]
    (one,) = findings.find_input(waiting, now, trials)
    assert one.place == LOADER.place
    assert "`num_workers=2`" in one.change
    assert one.share == pytest.approx(0.6)


def test_where_workers_do_not_help_the_data_itself_is_the_place() -> None:
    waiting = dataclasses.replace(STEPS, steps=(Step(0.1, 0.05, 0.06, 4, 512),) * 5)
    (one,) = findings.find_input(
        waiting, pace(waiting.steps, "cpu"), [trial(0, 40), trial(2, 41, step_s=0.099)]
    )
    assert one.place == LOADER.making


def test_little_waiting_is_not_told() -> None:
    assert findings.find_input(STEPS, pace(STEPS.steps, "cpu"), []) == []


def test_compiling_is_advised_only_where_it_pays() -> None:
    assert findings.find_compile(STEPS, [verdict("whole", 1.01), verdict("blocks", 0.9)]) == []
    (one,) = findings.find_compile(STEPS, [verdict("whole", 0.8), verdict("random", 1.2)])
    assert "fallback_random" in one.change
    assert one.place == STEPS.call


def test_compiling_that_costs_is_advised_against() -> None:
    compiling = dataclasses.replace(STEPS, compiled_at=LINE)
    (one,) = findings.find_compile(compiling, [verdict("own", 0.8)])
    assert one.place == LINE
    assert "Do not compile" in one.change
    assert findings.find_compile(compiling, [verdict("own", 1.3)]) == []


def test_compiling_for_nothing_is_told_if_a_second_run_says_the_same() -> None:
    compiling = dataclasses.replace(STEPS, compiled_at=LINE)
    (one,) = findings.find_compile(compiling, [verdict("own", 1.02), verdict("own", 0.99)])
    assert "20.0 s to begin" in one.costs
    assert "Do not compile" in one.change
    assert one.share is None
    for again in ([], [verdict("own", 1.05)], [verdict("own", 1.2)]):
        assert findings.find_compile(compiling, [verdict("own", 1.0), *again]) == []
    (one,) = findings.find_compile(compiling, [verdict("own", 1.0), verdict("own random", 1.4)])
    assert "fallback_random" in one.change


def test_a_model_that_cannot_be_compiled_in_place_is_advised_otherwise() -> None:
    steps = dataclasses.replace(STEPS, in_place=False)
    (one,) = findings.find_compile(steps, [verdict("whole", 1.5)])
    assert "`model = torch.compile(model)`" in one.change


def test_the_smallest_batch_that_is_as_fast_as_any_is_advised() -> None:
    (one,) = sizes.find_batch(STEPS, trial(4, 100), [trial(8, 192), trial(16, 196), trial(32, 197)])
    assert "`batch_size=8`" in one.change
    assert "0.002" in one.change  # linear
    assert "0.00141" in one.change  # square root


def test_a_batch_that_gains_no_more_than_noise_is_not_told() -> None:
    assert sizes.find_batch(STEPS, trial(4, 100), [trial(8, 108)]) == []
    assert sizes.find_batch(STEPS, trial(4, 100, noise=0.2), [trial(8, 110)]) == []
    assert sizes.find_batch(STEPS, trial(4, 100), [trial(8, 0, failure="out of memory")]) == []


def test_a_loop_that_accumulates_keeps_its_batch() -> None:
    steps = dataclasses.replace(STEPS, steps=(Step(0.1, 0.05, 0.0, 16, 512),) * 5)
    (one,) = sizes.find_batch(steps, trial(4, 100), [trial(8, 190)])
    assert "Accumulate 2 batches a step, not 4" in one.change


def test_a_batch_beyond_memory_is_not_tried() -> None:
    tried = [trial(4, 1, peak_bytes=100), trial(8, 1, peak_bytes=140)]
    assert sizes.fits_next(tried, 16, 220)
    assert not sizes.fits_next(tried, 16, 219)
    assert sizes.fits_next([trial(4, 1)], 8, 1)  # nothing is known


def test_static_padding_is_told_and_tight_padding_is_not() -> None:
    rows = tuple(tuple(10 + (i * 7 + j * 13) % 50 for j in range(8)) for i in range(12))
    wide = dataclasses.replace(STEPS, lengths=Lengths(rows, (512,) * 12))
    (one,) = sizes.find_padding(wide, sizes.compare(wide.lengths))
    assert one.place == LOADER.making
    assert "93% of what the model computes is padding" in one.seen
    even = dataclasses.replace(STEPS, lengths=Lengths(((50,) * 8,) * 12, (52,) * 12))
    assert sizes.find_padding(even, sizes.compare(even.lengths)) == []


def test_rows_of_one_length_are_no_padding() -> None:
    assert sizes.compare(Lengths(((64,) * 8,) * 12, (64,) * 12)) is None
    assert sizes.compare(None) is None
