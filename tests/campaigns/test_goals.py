"""Goals and their table: verdicts, machines, and one figure for the training lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)

import columns  # noqa: E402  # pyright: ignore[reportMissingImports]
import machine as hardware  # noqa: E402  # pyright: ignore[reportMissingImports]
import table  # noqa: E402  # pyright: ignore[reportMissingImports]
from comparison import Comparison, counted  # noqa: E402  # pyright: ignore[reportMissingImports]
from goals import Found, Goal, Measurements, Verdict, judge  # noqa: E402  # pyright: ignore[reportMissingImports]
from results import Spread  # noqa: E402  # pyright: ignore[reportMissingImports]
from run import plan  # noqa: E402  # pyright: ignore[reportMissingImports]

sys.path.remove(BENCHMARKS)  # its files would hide folders of tests with the same name

LOST = "training lost per save, 1.5 GB"


def machine(cpu: str = "Some", day: str = "2026-11-26") -> dict[str, Any]:
    facts = {"cpu": cpu, "cores": 2, "memory_bytes": 24 << 30, "disk": "/dev/vda", "filesystem": "ext4"}
    return facts | {"kernel": "6.18", "packages": {"torch": "2.13"}, "date": f"{day}T00:00:00+00:00"}


def comparison(lost_s: float, *, others: float = 0.0) -> dict[str, float]:
    found = Comparison(lost_s, 2 * lost_s, 0.0, 0.004, 2, 0.6, 0.1, others)
    return {name: getattr(found, name) for name in Comparison.__slots__}


def saving(*lost_s: float, others: float = 0.0) -> dict[str, Any]:
    own: dict[str, Any] = {"round": 0, "state": "gpt2-124m", "contestant": "holdfast", "title": "holdfast"}
    own["values"] = {"blocked_s": 0.0015, "state_bytes": 1.5e9}
    own["comparisons"] = [comparison(one, others=others) for one in lost_s]
    return {"kind": "saving", "machine": machine(), "rounds": 1, "runs": [own]}


def verdict_of(document: dict[str, Any], what: str) -> Verdict:
    return next(one for one in judge(Measurements({"saving": [document]})) if one.goal.what == what)


@pytest.mark.parametrize(("lost_s", "passed"), [(0.05, True), (0.2, False)])
def test_the_training_lost_is_judged_in_copies(lost_s: float, passed: bool) -> None:
    verdict = verdict_of(saving(*(lost_s + number / 1000 for number in range(12))), LOST)
    assert verdict.found is not None
    assert verdict.found.spread.median == pytest.approx(10 * lost_s, rel=0.2)
    assert verdict.passed is passed


def test_an_interval_that_contains_the_goal_decides_nothing() -> None:
    verdict = verdict_of(saving(*(0.05 + number / 100 for number in range(12))), LOST)
    assert verdict.passed is None
    assert columns.verdict(verdict)[-1].startswith("undecided")


def test_the_same_figure_is_in_the_column_the_goal_and_the_sentence() -> None:
    document = saving(*(0.2 + number / 100 for number in range(13)))
    renders = table.render_saving, table.render_goals, table.render_training_lost
    texts = [render([document]) for render in renders]
    assert "2.6 [2.4..2.9] copies (0.26 [0.24..0.29] s)" in texts[0]
    assert "2.6 [2.35..2.85] copies" in texts[1]
    assert "2.6 [2.4..2.9] copies" in texts[2]
    assert "all cores by 0.26 [0.24..0.29] s" in texts[2]


def test_the_cost_of_a_raw_write_is_beside_that_of_a_save() -> None:
    document = saving(*(0.2 + number / 100 for number in range(13)))
    assert "raw write" not in table.render_training_lost([document])
    document["runs"].append(document["runs"][0] | {"contestant": "limits"})
    sentence = table.render_training_lost([document])
    assert sentence.endswith("slows the same training by 0.26 [0.24..0.29] s (of 13 writes).")


def test_a_cold_load_is_beside_the_raw_reads_of_its_own_run() -> None:
    document = saving(0.2)
    document["runs"][0]["values"] |= {"load_cold_s": 2.0, "near_read_s": 1.5}
    assert "2.00 [2.00..2.00] s, 0.75 of raw reads" in table.render_saving([document])


def test_each_layout_has_its_own_goal_of_a_commit() -> None:
    rows = [
        {"kind": kind, "world_size": 1024, "values": {"commit_s": [seconds] * 3}}
        for kind, seconds in (("fsdp", 0.2), ("pipeline", 0.7))
    ]
    found = judge(Measurements({"scale": [{"machine": machine(), "rows": rows}]}))
    passed = {one.goal.what: one.passed for one in found if one.found}
    assert passed == {"commit of 1024 ranks, fsdp": True, "commit of 1024 ranks, pipeline": False}


def test_results_of_another_machine_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "RESULTS", tmp_path)
    first = hardware.results_path("tiers", machine())
    first.write_text(json.dumps({"machine": machine()}))
    other = machine() | {"kernel": "6.19"}
    assert hardware.results_path("tiers", machine()) == first
    assert hardware.results_path("tiers", other) == tmp_path / "tiers_some-2c-24g_2026-11-26_2.json"


def test_a_disturbed_measurement_says_so() -> None:
    document = saving(*(0.2 + number / 100 for number in range(12)), others=0.8)
    assert "other programs used 0.8 processors" in table.render_goals([document])
    assert "other programs used 0.8 processors" in table.render_training_lost([document])


def test_disturbed_comparisons_are_left_out_if_enough_others_exist() -> None:
    quiet = [Comparison(**comparison(0.1)) for _ in range(6)]
    busy = [Comparison(**comparison(5.0, others=1.0)) for _ in range(6)]
    assert counted([*quiet, *busy]) == quiet
    assert counted([*quiet[:5], *busy]) == [*quiet[:5], *busy]
    assert counted(quiet[:2]) == quiet[:2]


def test_a_goal_without_results_has_the_command_that_measures_it() -> None:
    cells = columns.verdict(Verdict(Goal("reads", 0.9, "x", "benchmarks/remote.py", at_least=True), None))
    assert cells == ("reads", "at least 0.9 x", "-", "-", "not measured: `benchmarks/remote.py`")


@pytest.mark.parametrize(("at_least", "passed"), [(True, True), (False, False)])
def test_a_goal_without_an_interval_is_judged_by_its_median(at_least: bool, passed: bool) -> None:
    goal = Goal("reads", 0.9, "x", "benchmarks/remote.py", at_least=at_least)
    assert Verdict(goal, Found(Spread(0.95, 0.5, 2.0))).passed is passed


def test_a_goal_that_the_newest_machine_lacks_is_taken_from_another_which_is_named() -> None:
    tiers = {"kind": "tiers", "machine": machine("OLD", "2026-11-01"), "tiers": [{"memory_of_memcpy": 0.3}]}
    text = table.render_goals([saving(0.2), tiers])
    assert "not measured: `benchmarks/remote.py`" in text
    assert "0.3 x | 2026-11-01, OLD | missed" in text
    assert text.count("| goal |") == 1


def test_the_best_of_the_others_stands_beside_a_goal() -> None:
    document = saving(0.2)
    ours = document["runs"][0]
    for name, seconds in (("dcp", 0.5), ("torch-save", 0.03)):
        values = ours.get("values", {}) | {"blocked_s": seconds}
        document["runs"].append(ours | {"contestant": name, "title": name.upper(), "values": values})
    assert "at most 2 ms | 30 ms, TORCH-SAVE | 3.5 to 7 ms |" in table.render_goals([document])


def test_the_short_form_measures_the_goals_first_and_each_peer_once_before_the_second_round() -> None:
    order = plan(["a", "b"], ["dcp", "holdfast", "torch-save"], 2, has_all_rounds=False)
    assert [number for number, *_ in order] == [0] * 8 + [1] * 6
    assert [(state, name) for _, state, name in order[6:8]] == [("a", "dcp"), ("b", "dcp")]
    own = {(number, state) for number, state, name in order if name == "holdfast"}
    assert own == {(0, "a"), (0, "b"), (1, "a"), (1, "b")}
    assert len(order) == len(set(order))


def test_the_long_form_measures_all_in_every_round_beginning_with_another_one() -> None:
    order = plan(["a"], ["dcp", "holdfast"], 3, has_all_rounds=True)
    assert [order[3 * number][2] for number in range(3)] == ["limits", "holdfast", "dcp"]
    assert len(set(order)) == 9


def test_a_machine_where_no_goal_was_measured_has_no_table() -> None:
    trainers = {"kind": "trainers", "machine": machine("NEW", "2026-12-01"), "runs": []}
    assert "NEW" not in table.render_goals([trainers, saving(0.2)])
