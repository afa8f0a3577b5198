"""The page has every number as text, draws every chart, and fetches nothing."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from dash.driver import browsing, missing_browser
from holdfast.checkpoint.format.run import Done
from holdfast.watch.pace.windows import PaceReading, SlowPeriod
from holdfast.watch.report.figures import make_figures
from holdfast.watch.report.page import headline_numbers, make_page
from holdfast.watch.report.style import MAX_MARKS, MAX_ROWS, format_share, framed
from holdfast.watch.report.summary import CheckedNode, RunSummary, summarize
from report.browser import find_browser, load
from report.made_up_run import START, Fate, MadeUpRun, simulate

vl_convert = pytest.importorskip("vl_convert")

IDS = [
    *("timeline", "curve-1", "progress", "shares", "costs", "pace", "problems", "nodes"),
    *("durations", "intervals"),
]
TABLES = ["problems", "nodes"]
"""Figures without a chart."""


def eventful() -> RunSummary:
    """Return a summary with failures, tiers, drains and problems."""
    fates = [Fate(20, 0.5, 30.0, 2.0, 0), Fate(9, 0.2, 5.0, 1.0, 1), Fate(25, 0.0, 0.0, 0.0, 0)]
    made_up = simulate(fates, every=5, step_s=1.0, blocked_s=0.02).made_up
    made_up.save(3, 100, 95.0, durable_after_s=0.5, tier="local")
    made_up.add(3, 99.0, "drained", 100, seconds=3.0, num_bytes=1000)
    made_up.save(3, 105, 98.0, durable_after_s=None)
    made_up.add_metrics(1, 20.0, "<loss>", {step: 1.0 / step for step in range(1, 24)})
    made_up.add_metrics(3, 90.0, "<loss>", {step: 1.0 / step for step in range(12, 30)} | {30: math.nan})
    made_up.add(3, 98.5, "failed", 105, detail="</script><script>alert(1)</script>")
    paces = [PaceReading(1, START + 10 + at, {0: 0.4, 1: 0.9, 2: 0.41}) for at in range(8)]
    slow = SlowPeriod(1, "kelp-<2>", START + 10, 2.2, 0.5, 1.0, "its data loader", START + 18)
    found = summarize(made_up.by_time(), made_up.claims)
    checks = (
        CheckedNode(7, 1, 0, "good", START, 7, "", was_refused=False, cost_s=0.5),
        CheckedNode(7, 1, 1, "bad<1>", START, 7, "space /home: too little", was_refused=True, cost_s=3.0),
        CheckedNode(7, 2, 0, "good", START + 9, 7, "", was_refused=False, cost_s=0.25),
    )
    return replace(found, paces=tuple(paces), slow_periods=((1, slow),), node_checks=tuple(checks))


def quiet() -> RunSummary:
    """Return a summary without failures."""
    made_up = MadeUpRun().save_each(10, 20, 30, blocked_s=0.01)
    return summarize(made_up.by_time(), made_up.claims, finished=Done("run", 1, 30, START + 32))


def one_save() -> RunSummary:
    """Return a summary with a single save."""
    made_up = MadeUpRun().claim(1, 0.0).save(1, 10, 5.0)
    return summarize(made_up.by_time(), made_up.claims)


def nothing() -> RunSummary:
    """Return an empty summary."""
    return summarize([], {})


STORIES = pytest.mark.parametrize("make", [eventful, quiet, one_save, nothing])


class Outline(HTMLParser):
    """Elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(summary: RunSummary) -> str:
    return make_page(summary, name="a <run>", made_unix_s=START)


def test_an_eventful_run_has_every_figure() -> None:
    assert list(make_figures(eventful())) == IDS


def test_a_figure_of_the_run_stays_although_a_watch_has_its_name() -> None:
    """The watch "replicas" has events, and no figure of its own."""
    line = {
        "t": START,
        "event": "replicas-differ",
        "attempt": 1,
        "rank": 0,
        "step": 10,
        "detail": "w differs",
    }
    made_up = MadeUpRun().claim(1, 0.0).save(1, 10, 5.0)
    made_up.add(1, 6.0, "replicas-differ", 10, detail="w differs")
    found = replace(summarize(made_up.by_time(), made_up.claims), lines=(line,))
    assert "replicas" in make_figures(found)


def test_a_refused_node_and_a_failed_save_are_listed_with_their_cost() -> None:
    found = make_figures(eventful())
    assert found["nodes"].text.startswith("1 node failed, 1 refused; the job waited 3.2 s.")
    assert found["nodes"].rows[1][1:] == (7, 1, 1, "bad<1>", "refused", "3.0 s", "space /home: too little")
    (failed,) = (row for row in found["problems"].rows if row[4] == "failed")
    assert failed[6:9] == (105, 105, "all steps after 100")


@STORIES
def test_rows_fill_their_columns_and_charts_are_valid_vega_lite(
    make: Callable[[], RunSummary],
) -> None:
    for id, one in make_figures(make()).items():
        assert {len(row) for row in one.rows} <= {len(one.columns)}, id
        if one.chart is not None:
            assert vl_convert.vegalite_to_svg({**framed(one.chart), "width": 600}).startswith("<svg"), id


def test_a_curve_is_one_line_over_all_attempts_with_discarded_values() -> None:
    curve = make_figures(eventful())["curve-1"]
    assert curve.title == "<loss>, step by step"
    steps = [int(row[0] or 0) for row in curve.rows]
    assert steps == sorted(set(steps)), "one value per step"
    assert curve.chart is not None
    layers = curve.chart["layer"]
    counted = [one for one in layers if one["data"]["values"][0].get("what") == "counts"]
    lost = [one for one in layers if {row.get("what") for row in one["data"]["values"]} == {"discarded"}]
    assert [one["mark"]["type"] for one in (*counted, *lost)] == ["line", "line"]
    assert "detail" not in counted[0]["encoding"], "not divided by attempts"
    assert lost[0]["mark"]["opacity"] < 1


def test_of_a_long_training_some_steps_are_drawn_and_all_metrics_listed() -> None:
    made_up = MadeUpRun().claim(1, 0.0)
    for number in range(12):
        values = dict.fromkeys(range(5 * MAX_MARKS), 10.0 ** (number - 6)) | {0: 0.0}
        made_up.add_metrics(1, 1.0, f"n{number}", values)
    made_up.add_metrics(1, 2.0, "wide", {step: 10.0**-step for step in range(6)})
    figures = make_figures(summarize(made_up.by_time(), made_up.claims))
    curves = [one for id, one in figures.items() if id.startswith("curve-")]
    assert len(curves) == 8
    assert "one of every 5 is drawn" in curves[0].text
    assert "n8, n9, n10, n11, wide" in curves[-1].text
    assert len(curves[0].rows) == MAX_ROWS
    for one in curves:
        assert one.chart is not None
        assert vl_convert.vegalite_to_svg({**framed(one.chart), "width": 600}).startswith("<svg")


def test_a_metric_with_one_value_is_a_number_above_the_charts_and_no_chart() -> None:
    made_up = MadeUpRun().claim(1, 0.0).add_metrics(1, 1.0, "loss", {1: 2.0, 2: 1.0})
    made_up.add_metrics(1, 2.0, "<accuracy>", {30: 0.91234567}).add_metrics(1, 2.0, "lr", {1: 1e-3, 2: 1e-3})
    made_up.add_metrics(1, 3.0, "bad", {30: math.nan})
    found = summarize(made_up.by_time(), made_up.claims)
    titles = [one.title for id, one in make_figures(found).items() if id.startswith("curve-")]
    assert titles == ["loss, step by step"]
    numbers = [(one.name, one.value, one.remark) for one in headline_numbers(found)[6:]]
    assert numbers == [
        ("<accuracy>", "0.912346", "at step 30"),
        ("lr", "0.001", "at all 2 recorded steps"),
        ("bad", "nan", "at step 30"),
    ]
    assert "<dt>&lt;accuracy&gt;</dt><dd>0.912346</dd>" in page_of(found)


def test_no_interval_is_advised_after_seconds_of_training() -> None:
    advised = {one.name: one for one in headline_numbers(eventful())}["Best interval"]
    assert advised.value == "unknown"
    assert "of training are too short to estimate it; actual: " in advised.remark
    fates = [Fate(900, 0.0, 30.0, 2.0, 0), Fate(90, 0.0, 0.0, 0.0, 0)]
    made_up = simulate(fates, every=50, step_s=1.0, blocked_s=0.02).made_up
    found = summarize(made_up.by_time(), made_up.claims)
    assert {one.name: one for one in headline_numbers(found)}["Best interval"].value != "unknown"


def test_every_chart_has_a_table_of_its_numbers() -> None:
    text = page_of(eventful())
    for id, one in make_figures(eventful()).items():
        section = text.partition(f'<section id="{id}">')[2].partition("</section>")[0]
        assert section.count("<tr>") == len(one.rows) + 1
        assert all(html.escape(str(cell)) in section for row in one.rows for cell in row if cell is not None)


def test_the_detection_of_torn_copies_is_a_sentence_below_the_figures() -> None:
    """As a number at the top of the page it pushed the first chart off the screen."""
    made_up = MadeUpRun().claim(1, 0.0)
    made_up.add(1, 1.0, "tear-check", 0, detail="the kernel's record of written pages")
    made_up.save(1, 10, 5.0)
    page = html.unescape(page_of(summarize(made_up.by_time(), made_up.claims)))
    numbers, _, rest = page.partition("</dl>")
    assert "kernel's record" not in numbers
    assert "Torn copies are detected by the kernel's record of written pages." in rest


def test_text_of_a_history_is_escaped() -> None:
    text = page_of(eventful())
    assert "alert(1)" in text
    assert "<script>alert" not in text
    outline = Outline()
    outline.feed(text)
    assert len(outline.all("script")) == 3


def test_the_page_fetches_nothing() -> None:
    outline = Outline()
    outline.feed(page_of(eventful()))
    assert not [one for _, one in outline.elements if {"src", "href", "srcset"} & set(one)]
    policy = next(one["content"] for one in outline.all("meta") if one.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_page_is_accessible_without_the_charts() -> None:
    outline = Outline()
    outline.feed(page_of(eventful()))
    charts = [one for one in outline.all("div") if one.get("class") == "chart"]
    assert len(charts) == len(IDS) - len(TABLES)
    assert all(one["role"] == "img" and one["aria-label"] for one in charts)
    assert outline.all("html")[0]["lang"] == "en"
    assert all(one["scope"] == "col" for one in outline.all("th"))


def test_colours_follow_the_reader_s_setting() -> None:
    """Charts use colours that the style sheet defines for light and dark mode."""
    text = page_of(eventful())
    style = text.partition("<style>")[2].partition("</style>")[0]
    light, dark = (style.split("prefers-color-scheme: dark")[i] for i in (0, 1))
    used = set(re.findall(r"var\((--[a-z]+)\)", text.partition('id="specs">')[2].partition("</script>")[0]))
    assert len(used) > 5
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_the_page_of_a_long_run_is_limited() -> None:
    made_up = MadeUpRun().claim(1, 0.0)
    for step in range(1, 4001):
        made_up.save(1, step, float(step), blocked_s=0.01)
    durations = make_figures(summarize(made_up.by_time(), made_up.claims))["durations"]
    assert (len(durations.rows), durations.num_rows_left_out) == (MAX_ROWS, 4000 - MAX_ROWS)
    assert durations.chart is not None
    assert len(durations.chart["layer"][0]["data"]["values"]) <= 3 * MAX_MARKS
    assert "every 3" in durations.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "-"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.5, "50 %"),
        (0.0123, "1.2 %"),
        (0.00012, "0.012 %"),
        (1e-9, "under 0.001 %"),
    ],
)
def test_shares_have_two_significant_digits(value: float | None, said: str) -> None:
    assert format_share(value) == said


@STORIES
def test_a_browser_draws_every_chart_without_an_error(make: Callable[[], RunSummary], tmp_path: Path) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium on this machine")
    place = tmp_path / "report.html"
    place.write_text(page_of(make()))
    loaded = load(browser, place, tmp_path / "profile")
    charts = [one for one in make_figures(make()).values() if one.chart is not None]
    assert (loaded.data("drawn"), loaded.data("failed")) == (str(len(charts)), "0"), loaded.console
    assert loaded.text.count('class="marks"') == len(charts)
    assert loaded.console == ""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "not skipped")
@pytest.mark.parametrize("width", [390, 1280])
def test_explanations_are_shorter_than_their_charts(width: int, tmp_path: Path) -> None:
    """On a phone they are closed, and on a screen as wide as the chart above."""
    place = tmp_path / "report.html"
    place.write_text(page_of(eventful()))
    with browsing(tmp_path / "profile") as page:
        page.size(width, 900)
        page.open(place.as_uri())
        page.wait("return document.body.dataset.drawn")
        sizes = page.run(
            "return [...document.querySelectorAll('section')].filter((one) => one.querySelector('.chart'))"
            ".map((one) => ['.chart', '.about'].map((of) => one.querySelector(of).getBoundingClientRect())"
            ".map((box) => [box.width, box.height]))"
        )
        assert page.run("return document.documentElement.scrollWidth") <= width
        for (chart_width, chart_height), (text_width, text_height) in sizes:
            assert text_height < chart_height
            assert text_width == chart_width
        is_open = page.run("return [...document.querySelectorAll('.about')].map((one) => one.open)")
        assert set(is_open) == {width == 1280}
