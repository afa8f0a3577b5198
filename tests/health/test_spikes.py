"""Spikes: found in a published log, and not seen in healthy noisy curves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.watch import CopiedSave
from holdfast.watch.spike import MIN_VALUES, NUM_HIGH, WINDOW, Spike, SpikeDetector, kind_of

# Iterations 31214 to 31222 of BLOOM's training, as its chronicles print them: its first spike of the loss.
BLOOM_FIRST = 31214
BLOOM_LOSS = (2.198845, 2.220424, 2.595213, 2.241558, 2.345279, 5.098124, 3.492029, 3.213059, 2.804948)
BLOOM_NORM = (0.242, 0.947, 2.390, 15.886, 145.119, 960.351, 353.201, 379.330, 650.246)
BLOOM_AFTER = (2.215699, 2.235667)  # 31250, 31251: it recovered by itself


def feed(detector: SpikeDetector, values: Iterable[float], first: int = 0) -> list[bool | None]:
    """Feed values, and return the judgement after each."""
    found: list[bool | None] = []
    for step, value in enumerate(values, first):
        detector.add(step, value)
        found.append(detector.is_spiking)
    return found


def noise(seed: int, number: int, center: float, share: float) -> list[float]:
    generator = random.Random(seed)
    return [center * math.exp(generator.gauss(0, share)) for _ in range(number)]


@pytest.mark.parametrize("seed", range(10))
def test_the_spike_of_bloom_is_found_within_its_printed_lines(seed: int) -> None:
    """The log prints the spike without what was before; that is drawn with the spread of its other lines."""
    loss, norm = SpikeDetector("loss"), SpikeDetector("grad_norm", "norm")
    assert not any(feed(loss, noise(seed, 100, 2.21, 0.007), BLOOM_FIRST - 100))
    assert not any(feed(norm, noise(seed + 1, 100, 0.22, 0.1), BLOOM_FIRST - 100))
    by_loss = feed(loss, BLOOM_LOSS, BLOOM_FIRST)
    assert by_loss.index(True) == 6  # one step after the worst
    assert feed(norm, BLOOM_NORM, BLOOM_FIRST).index(True) == 3  # before the loss rises
    assert loss.first_high is not None
    assert loss.first_high.step == BLOOM_FIRST + 2
    assert "loss is 5.098 at step 31219" in loss.trend().detail
    assert feed(loss, [*BLOOM_AFTER, *noise(seed, 3, 2.22, 0.007)], 31250)[-1] is False  # it is over
    assert loss.first_high is None


SHAPES: dict[str, Callable[[int], float]] = {
    "decay": lambda step: 2 + 9 * math.exp(-step / 200),
    "warm-up": lambda step: 3 + 8 * math.exp(-step / 30) + 0.4 * min(1.0, step / 100),
    "steps down": lambda step: 2.5 - 0.5 * (step > 600) - 0.3 * (step > 900) + 4 * math.exp(-step / 80),
    "fast": lambda step: 1e-4 + 11 * math.exp(-step / 20),
    "power": lambda step: 1.7 + 12 * (step + 1) ** -0.4,
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_healthy_noisy_curves_give_no_alarm(shape: Callable[[int], float]) -> None:
    for seed in range(3):
        generator = random.Random(seed)
        heavy = [0.02 * generator.gauss(0, 1) / max(0.3, abs(generator.gauss(0, 1))) for _ in range(1000)]
        assert True not in feed(SpikeDetector("loss"), (shape(t) * (1 + heavy[t]) for t in range(1000)))
        log_normal = [math.exp(generator.gauss(0, 0.25)) for _ in range(1000)]
        assert True not in feed(SpikeDetector("loss"), (shape(t) * log_normal[t] for t in range(1000)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_many_healthy_curves_give_no_alarm(shape: Callable[[int], float]) -> None:
    for seed in range(200):
        generator = random.Random(1000 + seed)
        spread = generator.choice([0.001, 0.01, 0.05, 0.2, 0.3])
        values = (shape(t) * math.exp(generator.gauss(0, spread)) for t in range(3000))
        assert True not in feed(SpikeDetector("loss"), values), seed


def test_values_that_stay_high_are_one_spike_and_then_the_new_normal() -> None:
    found = feed(SpikeDetector("loss"), [*noise(1, 200, 2.0, 0.02), *noise(2, 400, 6.0, 0.02)])
    assert found[: 200 + NUM_HIGH - 1].count(True) == 0
    assert found[200 + NUM_HIGH - 1 : 200 + WINDOW - 1] == [True] * (WINDOW - NUM_HIGH)
    assert found[-1] is False


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_even_at_the_start(value: float) -> None:
    detector = SpikeDetector("loss")
    assert feed(detector, [3.0, 2.9, *[value] * NUM_HIGH])[-1] is True
    assert detector.first_high is not None
    assert detector.first_high.step == 2


@given(st.lists(st.floats(-1e6, 1e6), max_size=MIN_VALUES - 1))
def test_few_values_are_unknown(values: list[float]) -> None:
    assert set(feed(SpikeDetector("loss"), values)) <= {None}


@settings(max_examples=15)
@given(
    st.lists(st.floats(0.5, 1.5), min_size=40, max_size=200), st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20])
)
def test_the_unit_of_a_loss_does_not_matter(values: list[float], unit: float) -> None:
    values = [*values, 9.0, 9.0, 9.0]
    assert feed(SpikeDetector("loss"), values) == feed(SpikeDetector("loss"), [unit * one for one in values])


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(MIN_VALUES, 400), st.floats(3.0, 1e6))
def test_three_high_values_are_always_a_spike(seed: int, number: int, factor: float) -> None:
    detector = SpikeDetector("loss")
    feed(detector, noise(seed, number, 2.0, 0.05))
    assert feed(detector, [2.0 * factor] * NUM_HIGH, number)[-1] is True


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "loss") for name in ("loss", "train/loss", "train_loss")),
        *((name, "norm") for name in ("grad_norm", "train/grad-norm")),
        *((name, None) for name in ("val_loss", "eval/loss", "lr", "weight_norm", "loss_scale")),
    ],
)
def test_metrics_are_known_by_their_names(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_a_watch_judges_all_metrics_together() -> None:
    noted: list[int] = []
    run: Any = SimpleNamespace(rank=0, note=lambda _event, *, step, detail: noted.append(step))
    watch, save = Spike("rollback", back=7), CopiedSave(63, (), has_room=True)
    watch.begin(run)
    assert watch.saving(save) == Section(1, {}, Mark.NONE, ("no loss was recorded",))
    for step, value in enumerate(noise(3, 60, 2.0, 0.02)):
        watch.recorded(step, {"loss": value, "grad_norm": 10 * value, "lr": 1.0})
    section = watch.saving(save)
    assert section is not None
    assert (section.mark, watch.step(60)) == (Mark.FOR, None)
    for step in range(60, 63):
        watch.recorded(step, {"loss": 2.0, "grad_norm": 900.0})
    section = watch.saving(save)
    assert section is not None
    assert section.mark is Mark.AGAINST
    assert section.reasons[0].startswith("grad_norm is 900 at step 60")
    for _ in range(2):  # the same spike is noted once
        vote = watch.step(63)
        assert vote is not None
        assert (vote.since, vote.upto, noted) == (60, 52, [60])
