"""Timeline of the run: training, time lost, saves; and the progress of its steps."""

from __future__ import annotations

from typing import Any

from holdfast.watch.report import style
from holdfast.watch.report.events import HOME
from holdfast.watch.report.interruptions import AttemptSpan, Span
from holdfast.watch.report.saves import SaveRecord
from holdfast.watch.report.style import Figure, Spec
from holdfast.watch.report.summary import RunSummary, kept_spans

_DURABLE, _LOST = "durable save", "failed save"


def progress(summary: RunSummary) -> Figure | None:
    """Return the figure, or None without training."""
    attempts = [attempt for attempt in summary.attempts if attempt.has_trained]
    if not attempts:
        return None
    saves, _ = style.thin_out(summary.saves)
    line: list[Spec] = []
    for attempt in attempts:
        own = [(save.started_unix_s, save.step) for save in saves if save.attempt == attempt.number]
        ends = [
            (attempt.training_unix_s, attempt.restored_step or 0),
            (attempt.last_seen_unix_s, attempt.last_step),
        ]
        line += [
            {"t": style.to_ms(t), "step": step, "attempt": attempt.number}
            for t, step in sorted([*own, *ends])
        ]
    points = [
        {
            "t": style.to_ms(save.started_unix_s),
            "step": save.step,
            "what": _DURABLE if save.durable else _LOST,
            "detail": f"step {save.step}, attempt {save.attempt}: {save.outcome}",
        }
        for save in saves
    ]
    known = {_DURABLE: (style.KEPT, "circle"), _LOST: (style.BAD, "cross")}
    looks = {what: look for what, look in known.items() if any(one["what"] == what for one in points)}
    chart = {
        "line": line,
        "points": points,
        "time": style.time_axis("t", summary),
        "fill": style.color_by("what", {what: look[0] for what, look in looks.items()}),
        "shape": style.color_by("what", {what: look[1] for what, look in looks.items()}),
    }
    return style.make_figure("progress", [_row(attempt) for attempt in summary.attempts], chart=chart)


def _row(attempt: AttemptSpan) -> tuple[object, ...]:
    start = attempt.number, attempt.started_unix_s, attempt.num_ranks, attempt.restored_step
    took_s = None if attempt.restored_step is None else attempt.restore_s
    return (*start, took_s, attempt.last_seen_unix_s, attempt.last_step)


_MAX_LABELS = 12  # of attempts; more would overlap
_LANES = {
    "training": style.KEPT,
    "repeated": style.REDO,
    "down": style.DOWN,
    "restoring": style.RESTORE,
    "save()": style.BLOCKED,
    "to memory": style.ON_THE_WAY,
    "to local": style.ON_THE_WAY,
    "to home": style.ON_THE_WAY,
    "draining": style.ON_THE_WAY,
    "problems": style.BAD,
}


def timeline(summary: RunSummary) -> Figure | None:
    """Return the figure, or None without events."""
    if summary.started_unix_s is None:
        return None
    saves, every = style.thin_out(summary.saves)
    bars = _training(summary) + _saving(saves) + _drains(summary)
    problems = [
        {"lane": "problems", "from": style.to_ms(event.unix_s), "what": f"{event.kind}: {event.detail[:200]}"}
        for event in summary.problems[-1000:]
    ]
    used = {bar["lane"] for bar in bars} | {one["lane"] for one in problems}
    lanes = {lane: look for lane, look in _LANES.items() if lane in used}
    note = "" if every == 1 else f" Of the saves, one of every {every} is drawn."
    chart = _chart(summary, lanes, bars, problems)
    return style.make_figure("timeline", _rows(summary), note=note, chart=chart)


def _chart(summary: RunSummary, lanes: dict[str, str], bars: list[Spec], problems: list[Spec]) -> Spec:
    starts = [
        {"from": style.to_ms(one.started_unix_s), "what": f"attempt {one.number}", "label": str(one.number)}
        for one in summary.attempts
    ]
    time = style.time_axis("from", summary, grid=False)
    lines = {lane: style.line_of(look) for lane, look in lanes.items()}
    return {
        "height": 26 * len(lanes),
        "starts": starts,
        "labelled": len(starts) <= _MAX_LABELS,
        "bars": bars,
        "problems": problems,
        "time": time,
        # With an x2, Vega-Lite would treat the same domain as a different one.
        "bar_time": {**time, "scale": {"type": "utc", "nice": False}},
        "row": {
            "field": "lane",
            "type": "nominal",
            "scale": {"domain": list(lanes)},
            "sort": list(lanes),
            "axis": {"title": None, "grid": True, "bandPosition": 0.5, "labelFontSize": 13, "ticks": False},
        },
        "fill": style.color_by("lane", lanes, legend=False),
        "stroke": style.color_by("lane", lines, legend=False),
    }


def _training(summary: RunSummary) -> list[Spec]:
    losses = summary.losses
    lanes = {
        "training": kept_spans(summary),
        "repeated": losses.redone,
        "down": losses.down,
        "restoring": losses.restoring,
    }
    return [_bar(lane, span, lane) for lane, spans in lanes.items() for span in spans]


def _saving(saves: list[SaveRecord]) -> list[Spec]:
    bars: list[Spec] = []
    for save in saves:
        what = f"step {save.step}, attempt {save.attempt}, {style.format_size(save.num_bytes)}"
        if (end := save.returned_unix_s) is not None:
            bars.append(_bar("save()", (end - (save.blocked_s or 0.0), end), what))
        bars += [
            _bar(f"to {copy.tier}", (save.started_unix_s, copy.durable_unix_s), what)
            for copy in save.copies
            if copy.durable_unix_s is not None and not copy.was_drained and f"to {copy.tier}" in _LANES
        ]
    return bars


def _drains(summary: RunSummary) -> list[Spec]:
    drains, _ = style.thin_out(summary.drains)
    return [
        _bar("draining", (one.unix_s - one.seconds, one.unix_s), f"step {one.step}, {size}")
        for one, size in ((one, style.format_size(one.num_bytes)) for one in drains)
    ]


def _bar(lane: str, span: Span, what: str) -> Spec:
    return {
        "lane": lane,
        "from": style.to_ms(span[0]),
        "to": style.to_ms(span[1]),
        "what": what,
        "took": style.format_seconds(span[1] - span[0]),
    }


def _rows(summary: RunSummary) -> list[tuple[object, ...]]:
    """Return the rows by time: time, attempt, event, step, duration and detail."""
    rows: list[tuple[Any, ...]] = []
    for attempt in summary.attempts:
        where = "from scratch" if attempt.restored_step is None else f"from step {attempt.restored_step}"
        what = f"started {where}" if attempt.has_trained else "started, without further events"
        detail = attempt.remark or (f"on {attempt.host}" if attempt.host else None)
        start = attempt.started_unix_s, attempt.number
        rows.append((*start, what, attempt.restored_step, attempt.restore_s or None, detail))
    for one in summary.losses.gaps:
        detail = one.end or f"{style.format_seconds(one.cost_s)} lost"
        end = one.last_seen_unix_s, one.before
        rows.append((*end, f"last event ({one.kind})", one.last_step, None, detail))
    for event in (*summary.problems, *summary.drains):
        took_s = event.seconds or None
        rows.append((event.unix_s, event.attempt, event.kind, event.step, took_s, event.detail))
    for save in summary.saves:
        took_s = next((copy.durable_s for copy in save.copies if copy.tier == HOME), None)
        what = "saved" if save.durable else f"save {save.outcome}"
        rows.append((save.started_unix_s, save.attempt, what, save.step, took_s, save.detail))
    return sorted(rows, key=lambda row: row[0])
