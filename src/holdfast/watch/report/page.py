"""Report as a self-contained HTML page: headline, text, charts with their library, and tables."""

from __future__ import annotations

import html
import json
import re
from functools import cache

from msgspec import Struct

from holdfast.checkpoint.watch import WatchFigure
from holdfast.errors import Unsupported
from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.curves import Curve
from holdfast.watch.report.figures import make_figures
from holdfast.watch.report.summary import RunSummary

MAX_NUMBERS = 18  # numbers above the figures
_MIN_UP_S = 600.0  # training without which no interval is advised


class HeadlineNumber(Struct, frozen=True):
    """A number with its name and a remark."""

    name: str
    value: str
    remark: str = ""

    def as_html(self) -> str:
        """Return an entry of a list."""
        name, value, remark = map(html.escape, (self.name, self.value, self.remark))
        more = f'<dd class="remark">{remark}</dd>' if remark else ""
        return f"<div><dt>{name}</dt><dd>{value}</dd>{more}</div>"


def headline(summary: RunSummary) -> str:
    """Return the state of the run as a sentence."""
    if summary.last_unix_s is None:
        return "This run has no events yet."
    last = style.format_time(summary.last_unix_s)
    if summary.finished is not None:
        done = style.format_time(summary.finished.finished_unix_s)
        return f"Finished: step {summary.finished.step}, by attempt {summary.finished.attempt}, {done} UTC."
    newest = max(summary.attempts, key=lambda attempt: (attempt.last_seen_unix_s, attempt.number))
    text = f"Not marked as finished. Last event: {last} UTC"
    if newest.last_seen_unix_s > summary.last_unix_s:
        return f"{text}. Attempt {newest.number} started later and has no events yet."
    return f"{text}, attempt {newest.number}."


def headline_numbers(summary: RunSummary) -> list[HeadlineNumber]:
    """Return the most important numbers in reading order, then the metrics that have one value."""
    times, advice = summary.times, summary.advice
    durable = [save for save in summary.saves if save.durable]
    lost_steps = sum(one.steps_lost for one in summary.interruptions)
    num_failed = len(summary.saves) - len(durable)
    newest = max(durable, key=lambda save: save.checkpoint_id, default=None)
    step, held = newest.step if newest else None, ""
    if (home := summary.home_contents) is not None:
        step, held = home.newest_step, "home holds no checkpoint"
        if home.num_checkpoints:
            size = style.format_size(home.num_bytes)
            held = f"home holds {plural(home.num_checkpoints, 'checkpoint')}, {size}"
    wanted = f"of {style.format_seconds(times.wanted_s)} since the first start"
    in_save = f"of training time spent in save(); {style.format_seconds(advice.cost_s)} per save"
    lost = style.format_seconds(times.lost_s) if summary.interruptions else "nothing"
    again = f"{plural(len(summary.interruptions), 'interruption')}; {lost_steps} steps known to be repeated"
    saved = f"{len(durable)} durable" + (f", {num_failed} not" if num_failed else "")
    saved += f"; {style.format_size(newest.num_bytes)} each" if newest else ""
    saved += "" if advice.durable_s is None else f", {style.format_seconds(advice.durable_s)} until durable"
    return [
        HeadlineNumber("Newest checkpoint", "none" if step is None else f"step {step}", held),
        HeadlineNumber("Training that counts", style.format_share(times.goodput), wanted),
        HeadlineNumber("Saving overhead", style.format_share(summary.overhead_share), in_save),
        HeadlineNumber("Lost to interruptions", lost, again),
        HeadlineNumber("Saves", str(len(summary.saves)), saved),
        HeadlineNumber("Best interval", *_best(summary)),
        *(_only_value(curve) for curve in summary.curves if curve.has_one_value),
    ][:MAX_NUMBERS]


def tear_check(summary: RunSummary) -> str:
    """Return a sentence about the detection of torn copies, as last recorded."""
    methods = [attempt.tear_check for attempt in summary.attempts if attempt.tear_check]
    return f"Torn copies are detected by {methods[-1]}." if methods else ""


def _only_value(curve: Curve) -> HeadlineNumber:
    first, *others = curve.points
    remark = f"at all {len(others) + 1} recorded steps" if others else f"at step {first.step}"
    return HeadlineNumber(curve.name, f"{first.value:.6g}", remark)


def _best(summary: RunSummary) -> tuple[str, str]:
    advice = summary.advice
    was = f"actual: {style.format_seconds(advice.interval_s)}" if advice.interval_s else "at most one save"
    if advice.own is None or advice.useful_s is None:
        return "unknown", f"no failure yet; {was}"
    if advice.up_s < _MIN_UP_S:
        trained = style.format_seconds(advice.up_s)
        return "unknown", f"{trained} of training are too short to estimate it; {was}"
    in_steps = f"{plural(max(1, round(advice.useful_s / advice.step_s)), 'step')}; " if advice.step_s else ""
    how = "by Daly's formula" if advice.useful_s == advice.own.daly_s else "the time until a save is durable"
    failures = plural(advice.num_failures, "failure")
    return style.format_seconds(advice.useful_s), f"{in_steps}{how}, from {failures}; {was}"


_NOT_THERE = (
    "The report page needs a chart library: pip install 'torch-holdfast[report]'. "
    "`holdfast report HOME --json` does not need it."
)
_LONG = 60  # characters; more are broken into lines


def make_page(summary: RunSummary, *, name: str, made_unix_s: float) -> str:
    """Return the page as HTML."""
    figures = make_figures(summary)
    specs = {id: style.framed(one.chart) for id, one in figures.items() if one.chart is not None}
    torn = plural(summary.num_torn, "incomplete line")
    parts = {
        "title": html.escape(f"{name}: report"),
        "name": html.escape(name),
        "sentence": html.escape(headline(summary)),
        "made": html.escape(f"Made {style.format_time(made_unix_s)} UTC from the run's history."),
        "torn": f"<p>Skipped {torn} of the history, torn by a crash.</p>" if summary.num_torn else "",
        "tear-check": html.escape(tear_check(summary)),
        "numbers": "\n".join(one.as_html() for one in headline_numbers(summary)),
        "figures": "\n".join(_section(*one) for one in figures.items()),
        "style": style.read_asset("page.css"),
        "library": chart_library().replace("</script", "<\\/script").replace("<!--", "\\x3c!--"),
        "draw": style.read_asset("page.js"),
        # A script element ends at the first "</script", even inside a string.
        "specs": json.dumps(specs, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c"),
    }
    text = style.read_asset("page.html")
    for part in parts:
        assert text.count(f"<!--{part}-->") == 1, part
    # One pass, so that inserted text is never searched.
    return re.sub(r"<!--(.*?)-->", lambda found: parts[found[1]], text)


def _section(id: str, figure: WatchFigure) -> str:
    title = html.escape(figure.title)
    text = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in figure.text.split("\n\n"))
    drawing = ""
    if figure.chart is not None:
        text = f'<details class="about" open><summary>About this chart</summary><div>{text}</div></details>'
        label = html.escape(f"{figure.title}. The numbers are in the table below.", quote=True)
        drawing = f'<div class="chart" id="chart-{id}" role="img" aria-label="{label}"></div>'
    return (
        f'<section id="{id}"><h2>{title}</h2>{drawing}{text}'
        f"<details><summary>{title}: the numbers</summary>{_table(figure)}</details></section>"
    )


def _table(figure: WatchFigure) -> str:
    rows = figure.rows[-style.MAX_ROWS :]
    num_left_out = figure.num_rows_left_out + len(figure.rows) - len(rows)
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in figure.columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    left_out = f"<p>The {num_left_out} rows before these are left out; `holdfast history` has them.</p>"
    label = html.escape(figure.title, quote=True)
    return (
        (left_out if num_left_out else "")
        + f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        + f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: str | int | None) -> str:
    text = "" if value is None else html.escape(str(value))
    return f'<td class="long">{text}</td>' if len(text) > _LONG else f"<td>{text}</td>"


@cache
def chart_library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script, which defines `vegaEmbed`."""
    try:
        import vl_convert  # needed for pages only
    except ImportError as error:
        raise Unsupported(_NOT_THERE) from error
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")  # takes a second
