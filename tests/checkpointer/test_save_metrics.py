"""A save has the metrics of its step, or the newest since the save before, whenever they were recorded."""

from __future__ import annotations

import math

import pytest

from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.run.metrics import SaveMetrics
from holdfast.checkpoint.run.step_sync import Scores


def test_a_save_gets_the_newest_values_since_the_save_before() -> None:
    saves = SaveMetrics()
    saves.add(8, {"loss": 3.0, "lr": 0.1})
    saves.add(9, {"loss": 2.0})
    saves.begin_save(10)
    saves.begin_save(20)
    assert saves.send(10).values == {"loss": 2.0, "lr": 0.1}
    # The save before may have failed: it was not sent.
    assert saves.send(20).values == {"loss": 2.0, "lr": 0.1}
    saves.begin_save(30)
    assert saves.send(30).values == {}


def test_a_value_of_a_later_step_does_not_count() -> None:
    saves = SaveMetrics()
    saves.begin_save(10)
    saves.add(11, {"loss": 1.0})
    saves.add(10, {"loss": 5.0})
    assert saves.send(10).values == {"loss": 5.0}


def test_a_late_value_is_reported_with_the_step_of_its_save() -> None:
    saves = SaveMetrics()
    saves.begin_save(10)
    saves.send(10)
    saves.begin_save(20)
    assert saves.add(20, {"loss": 2.0}) is None  # it was not sent yet
    saves.send(20)
    assert saves.add(10, {"loss": 1.0}) == 10
    assert saves.add(10, {"loss": 1.0}) is None
    assert saves.add(19, {"loss": 9.0}) is None  # the value of the step itself counts
    assert saves.add(21, {"loss": 9.0}) is None
    assert saves.value(10, "loss") == (10, 1.0)
    assert saves.value(20, "loss") == (20, 2.0)
    assert saves.value(20, "lr") is None


def test_a_value_is_replaced_by_a_later_one_of_the_same_step() -> None:
    saves = SaveMetrics()
    saves.add(10, {"loss": 2.0})
    saves.add(10, {"loss": 1.0})
    saves.begin_save(10)
    assert saves.send(10).values == {"loss": 1.0}


@pytest.mark.parametrize("value", [1.5, -1.5, 0.0, -0.0, 1.7e308, -1.7e308, 5e-324])
def test_every_rank_receives_the_value_of_rank_0(value: float) -> None:
    ranks = [Scores(Keep(last=1, best=1, metric="loss")) for _ in range(2)]
    lowest = min(ranks[0].encode(value), ranks[1].encode(None))
    assert [rank.receive(10, lowest) for rank in ranks] == [[10], [10]]
    assert [rank.receive(10, lowest) for rank in ranks] == [None, None]  # nothing has changed
    assert [rank.best for rank in ranks] == [[10], [10]]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_not_among_the_best(value: float | None) -> None:
    scores = Scores(Keep(last=1, best=1, metric="loss"))
    assert scores.receive(10, scores.encode(value)) is None


def test_the_best_steps_are_returned_when_they_change() -> None:
    scores = Scores(Keep(last=1, best=2, metric="acc", mode="max"))
    values = {10: 1.0, 20: 3.0, 30: 2.0, 40: 0.5, 50: 4.0}
    found = [scores.receive(step, scores.encode(value)) for step, value in values.items()]
    assert found == [[10], [20, 10], [20, 30], None, [50, 20]]
