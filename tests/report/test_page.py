"""The page holds every number as text, draws every chart, and fetches nothing."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from holdfast.format.run import Done
from holdfast.report import Story, tell
from holdfast.report.figures import figures_of
from holdfast.report.look import MAX_MARKS, MAX_ROWS, share
from report.browser import find_browser, load
from report.telling import START, Fate, Telling, simulate

vl_convert = pytest.importorskip("vl_convert")

IDS = ["timeline", "curve-1", "progress", "shares", "costs", "durations", "levels", "intervals"]


def eventful() -> Story:
    """Two failures, tiers, drains, trouble."""
    fates = [Fate(20, 0.5, 30.0, 2.0, 0), Fate(9, 0.2, 5.0, 1.0, 1), Fate(25, 0.0, 0.0, 0.0, 0)]
    told = simulate(fates, every=5, step_s=1.0, blocked_s=0.02).telling
    told.save(3, 100, 95.0, durable_after_s=0.5, tier="local")
    told.tell(3, 99.0, "drained", 100, seconds=3.0, num_bytes=1000)
    told.save(3, 105, 98.0, durable_after_s=None)
    told.told(1, 20.0, "<loss>", {step: 1.0 / step for step in range(1, 24)})
    told.told(3, 90.0, "<loss>", {step: 1.0 / step for step in range(12, 30)} | {30: math.nan})
    told.tell(3, 98.5, "failed", 105, detail="</script><script>alert(1)</script>")
    return tell(told.by_time(), told.claims)


def quiet() -> Story:
    """No failure."""
    told = Telling()
    told.claim(1, 0.0)
    for step in (10, 20, 30):
        told.save(1, step, float(step), blocked_s=0.01)
    return tell(told.by_time(), told.claims, finished=Done("run", 1, 30, START + 32))


def one_save() -> Story:
    """Hardly anything."""
    told = Telling()
    told.claim(1, 0.0)
    told.save(1, 10, 5.0)
    return tell(told.by_time(), told.claims)


def nothing() -> Story:
    """Not even that."""
    return tell([], {})


STORIES = pytest.mark.parametrize("make", [eventful, quiet, one_save, nothing])


class Outline(HTMLParser):
    """What a page consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every element of a kind."""
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page_of() -> Callable[[Story], str]:
    """Makes a page; bundling the library takes seconds, so it is done once."""
    from holdfast.report import page as module

    library = module._library()
    patch = pytest.MonkeyPatch()

    def make(story: Story) -> str:
        patch.setattr(module, "_library", lambda: library)
        try:
            return module.page(story, name="a <run>", made_unix_s=START)
        finally:
            patch.undo()

    return make


def test_every_figure_of_an_eventful_run_is_there() -> None:
    assert [one.id for one in figures_of(eventful())] == IDS


@STORIES
def test_every_chart_is_one_that_the_library_understands(make: Callable[[], Story]) -> None:
    for one in figures_of(make()):
        if one.spec is not None:
            assert vl_convert.vegalite_to_svg({**one.spec, "width": 600}).startswith("<svg"), one.id


def test_a_curve_is_one_line_over_all_attempts_beside_what_was_thrown_away() -> None:
    (curve,) = (one for one in figures_of(eventful()) if one.id == "curve-1")
    assert curve.title == "<loss>, step by step"
    steps = [int(row[0] or 0) for row in curve.rows]
    assert steps == sorted(set(steps)), "one value per step"
    assert curve.spec is not None
    layers = curve.spec["layer"]
    counted = [one for one in layers if one["data"]["values"][0].get("what") == "counts"]
    lost = [one for one in layers if {row.get("what") for row in one["data"]["values"]} == {"thrown away"}]
    assert [one["mark"]["type"] for one in (*counted, *lost)] == ["line", "line"]
    assert "detail" not in counted[0]["encoding"], "not divided by attempts"
    assert lost[0]["mark"]["opacity"] < 1


def test_of_a_long_training_some_steps_are_drawn_and_all_names_told() -> None:
    told = Telling()
    told.claim(1, 0.0)
    for number in range(12):
        told.told(1, 1.0, f"n{number}", dict.fromkeys(range(5 * MAX_MARKS), 10.0 ** (number - 6)))
    told.told(1, 2.0, "wide", {step: 10.0**-step for step in range(6)})
    figures = figures_of(tell(told.by_time(), told.claims))
    curves = [one for one in figures if one.id.startswith("curve-")]
    assert len(curves) == 8
    assert "one of every 5 is drawn" in curves[0].text
    assert "n8, n9, n10, n11, wide" in curves[-1].text
    assert len(curves[0].rows) == MAX_ROWS
    for one in curves:
        assert one.spec is not None
        assert vl_convert.vegalite_to_svg({**one.spec, "width": 600}).startswith("<svg")


@STORIES
def test_every_row_fills_its_columns(make: Callable[[], Story]) -> None:
    for one in figures_of(make()):
        assert {len(row) for row in one.rows} <= {len(one.columns)}, one.id


def test_a_chart_has_its_numbers_as_a_table_beside_it(page_of: Callable[[Story], str]) -> None:
    text = page_of(eventful())
    for one in figures_of(eventful()):
        section = text.partition(f'<section id="{one.id}">')[2].partition("</section>")[0]
        assert section.count("<tr>") == len(one.rows) + 1
        assert all(html.escape(str(cell)) in section for row in one.rows for cell in row if cell is not None)


def test_what_a_history_says_cannot_become_part_of_the_page(page_of: Callable[[Story], str]) -> None:
    text = page_of(eventful())
    assert "alert(1)" in text
    assert "<script>alert" not in text
    outline = Outline()
    outline.feed(text)
    assert len(outline.all("script")) == 3


def test_nothing_is_fetched_from_anywhere(page_of: Callable[[Story], str]) -> None:
    outline = Outline()
    outline.feed(page_of(eventful()))
    assert not [one for _, one in outline.elements if {"src", "href", "srcset"} & set(one)]
    policy = next(one["content"] for one in outline.all("meta") if one.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_it_can_be_read_without_seeing_the_charts(page_of: Callable[[Story], str]) -> None:
    outline = Outline()
    outline.feed(page_of(eventful()))
    charts = [one for one in outline.all("div") if one.get("class") == "chart"]
    assert len(charts) == len(IDS)
    assert all(one["role"] == "img" and one["aria-label"] for one in charts)
    assert outline.all("html")[0]["lang"] == "en"
    assert all(one["scope"] == "col" for one in outline.all("th"))


def test_colours_follow_the_reader_s_setting(page_of: Callable[[Story], str]) -> None:
    """Charts name colours that the style sheet has, for light and for dark."""
    text = page_of(eventful())
    style = text.partition("<style>")[2].partition("</style>")[0]
    light, dark = (style.split("prefers-color-scheme: dark")[i] for i in (0, 1))
    used = set(re.findall(r"var\((--[a-z]+)\)", text.partition('id="specs">')[2].partition("</script>")[0]))
    assert len(used) > 5
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def test_a_long_run_makes_no_endless_page() -> None:
    told = Telling()
    told.claim(1, 0.0)
    for step in range(1, 4001):
        told.save(1, step, float(step), blocked_s=0.01)
    by_id = {one.id: one for one in figures_of(tell(told.by_time(), told.claims))}
    durations = by_id["durations"]
    assert (len(durations.rows), durations.num_rows_left_out) == (MAX_ROWS, 4000 - MAX_ROWS)
    assert durations.spec is not None
    assert len(durations.spec["layer"][0]["data"]["values"]) <= 3 * MAX_MARKS
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
def test_shares_have_two_digits_that_count(value: float | None, said: str) -> None:
    assert share(value) == said


@STORIES
def test_a_browser_draws_every_chart_without_an_error(
    make: Callable[[], Story], page_of: Callable[[Story], str], tmp_path: Path
) -> None:
    browser = find_browser()
    if browser is None:
        pytest.skip("no Chromium on this machine")
    place = tmp_path / "report.html"
    place.write_text(page_of(make()))
    loaded = load(browser, place, tmp_path / "profile")
    charts = [one for one in figures_of(make()) if one.spec is not None]
    assert (loaded.told("drawn"), loaded.told("failed")) == (str(len(charts)), "0"), loaded.console
    assert loaded.text.count('class="marks"') == len(charts)
    assert loaded.console == ""
