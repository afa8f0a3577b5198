"""Live numbers of a run, read by the official parsers of Prometheus."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.checkpoint.format.run import Done
from holdfast.watch.pace.windows import SlowPeriod
from holdfast.watch.report.open_metrics import format_metrics
from holdfast.watch.report.summary import HomeContents, RunSummary, summarize
from report.made_up_run import START, MadeUpRun

HOME = 'runs/"a\\b"\nc'


def interrupted() -> RunSummary:
    """Return the summary of a run that lost five steps, with a slow rank now."""
    made_up = MadeUpRun().save_each(10, 20, 30, blocked_s=0.01)
    made_up.add_metrics(1, 35.0, "loss", {35: 1.0})
    made_up.claim(2, 40.0)
    made_up.add(2, 42.0, "restored", 30, seconds=1.0)
    made_up.save(2, 40, 52.0, durable_after_s=None)
    made_up.add(2, 53.0, "unhealthy", 40, detail="loss")
    slow = SlowPeriod(3, "node-7", START + 42, 2.5, 0.4, 1.0, "its data loader")
    old = replace(slow, rank=1, until_unix_s=START + 20.0)
    found = summarize(made_up.by_time(), made_up.claims, home_contents=HomeContents(1000, 3, 30))
    return replace(found, slow_periods=((1, old), (2, slow)))


def samples(text: str) -> dict[str, list[Any]]:
    """Return the samples by name, as the parser for OpenMetrics reads them."""
    parser = pytest.importorskip(
        "prometheus_client.openmetrics.parser", reason="prometheus_client is not installed"
    )
    found: dict[str, list[Any]] = {}
    for family in parser.text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append(one)
    return found


def value(found: dict[str, list[Any]], name: str, **labels: str) -> float:
    (one,) = (one for one in found[name] if labels.items() <= one.labels.items())
    return one.value


def test_the_official_parser_reads_every_number() -> None:
    summary = interrupted()
    found = samples(format_metrics(summary, HOME))
    assert value(found, "holdfast_step") == 40
    assert value(found, "holdfast_checkpoint_step") == 30
    assert value(found, "holdfast_attempts_total") == 2
    assert value(found, "holdfast_saves", outcome="durable") == 3
    assert value(found, "holdfast_restores_total") == 1
    assert value(found, "holdfast_steps_lost_total") == 5
    assert value(found, "holdfast_unhealthy_checkpoints_total") == 1
    assert value(found, "holdfast_slow_periods_total") == 2
    assert value(found, "holdfast_slow_rank_factor", rank="3", host="node-7") == 2.5
    assert len(found["holdfast_slow_rank_factor"]) == 1, "the other one is over"
    assert value(found, "holdfast_slow_rank_cost_ratio") == 0.4
    assert value(found, "holdfast_goodput_ratio") == pytest.approx(summary.times.goodput)
    assert value(found, "holdfast_finished") == 0
    parts = sum(one.value for one in found["holdfast_time_seconds"])
    assert parts == pytest.approx(summary.times.total_s)
    assert {one.labels["home"] for rows in found.values() for one in rows} == {HOME}


def test_the_textfile_collector_s_format_reads_it_too() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    text = format_metrics(interrupted(), "runs/gpt")
    names = {one.name for family in parser.text_string_to_metric_families(text) for one in family.samples}
    assert {"holdfast_step", "holdfast_steps_lost_total", "holdfast_goodput_ratio"} <= names


def test_a_run_without_events_has_only_what_is_known() -> None:
    found = samples(format_metrics(summarize([], {}), "runs/new"))
    assert value(found, "holdfast_attempts_total") == 0
    assert "holdfast_step" not in found
    assert "holdfast_goodput_ratio" not in found
    assert not any(math.isnan(one.value) for rows in found.values() for one in rows)


def test_a_finished_run_is_marked() -> None:
    made_up = MadeUpRun().claim(1, 0.0).save(1, 10, 5.0)
    done = Done("run", 1, 10, START + 7)
    found = samples(format_metrics(summarize(made_up.by_time(), made_up.claims, finished=done), "x"))
    assert value(found, "holdfast_finished") == 1
