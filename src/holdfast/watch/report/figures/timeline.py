"""Training over time: what each moment was, the progress of the steps, and the time that was lost."""

from __future__ import annotations

from holdfast.checkpoint.watch import WatchFigure
from holdfast.system.units import plural
from holdfast.watch.report import style
from holdfast.watch.report.interruptions import Interruption, Span
from holdfast.watch.report.saves import HOME, SaveRecord
from holdfast.watch.report.style import Row, Spec
from holdfast.watch.report.summary import RunSummary, kept_spans

_MAX_LABELS = 12  # of attempts; more would overlap
_MAX_BARS = 40
_LANES = (
    *("training", "repeated", "down", "restoring", "save()"),
    *("to memory", "to local", "to home", "draining", "problems"),
)


def timeline(summary: RunSummary) -> WatchFigure | None:
    """Return the figure of all events; None without any."""
    if summary.started_unix_s is None:
        return None
    saves, note = style.thin_out(summary.saves, "saves")
    losses, (drains, _) = summary.losses, style.thin_out(summary.drains)
    spans = kept_spans(summary), losses.redone, losses.down, losses.restoring
    bars = [_bar(lane, one, lane) for lane, some in zip(_LANES, spans, strict=False) for one in some]
    bars += _saving(saves)
    bars += [
        _bar("draining", (one.unix_s - one.seconds, one.unix_s), f"step {one.step}, {size}")
        for one, size in ((one, style.format_size(one.num_bytes)) for one in drains)
    ]
    problems = [
        {"lane": "problems", "from": style.to_ms(event.unix_s), "what": f"{event.kind}: {event.detail[:200]}"}
        for event in summary.problems[-1000:]
    ]
    starts = [
        {"from": style.to_ms(one.started_unix_s), "what": f"attempt {one.number}", "label": str(one.number)}
        for one in summary.attempts
    ]
    used = {one["lane"] for one in (*bars, *problems)}
    lanes, time = [lane for lane in _LANES if lane in used], style.time_axis("from", summary, grid=False)
    chart = {
        "height": 26 * len(lanes),
        "starts": starts,
        "labelled": len(starts) <= _MAX_LABELS,
        "bars": bars,
        "problems": problems,
        "lanes": lanes,
        "time": time,
        # With an x2, Vega-Lite would treat the same domain as a different one.
        "bar_time": {**time, "scale": {"type": "utc", "nice": False}},
    }
    return style.make_figure("timeline", _rows(summary), note=note, chart=chart)


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


def _bar(lane: str, span: Span, what: str) -> Spec:
    began, end = map(style.to_ms, span)
    took = style.format_seconds(span[1] - span[0])
    return {"lane": lane, "from": began, "to": end, "what": what, "took": took}


def _rows(summary: RunSummary) -> list[Row]:
    """Return the rows by time: time, attempt, event, step, duration and detail."""
    rows: list[Row] = []
    for attempt in summary.attempts:
        where = "from scratch" if attempt.restored_step is None else f"from step {attempt.restored_step}"
        what = f"started {where}" if attempt.has_trained else "started, without further events"
        detail = attempt.remark or (f"on {attempt.host}" if attempt.host else None)
        start = attempt.started_unix_s, attempt.number
        rows.append((*start, what, attempt.restored_step, attempt.restore_s or None, detail))
    for gap in summary.losses.gaps:
        detail = gap.end or f"{style.format_seconds(gap.cost_s)} lost"
        end = gap.last_seen_unix_s, gap.before
        rows.append((*end, f"last event ({gap.kind})", gap.last_step, None, detail))
    for event in (*summary.problems, *summary.drains):
        took_s = event.seconds or None
        rows.append((event.unix_s, event.attempt, event.kind, event.step, took_s, event.detail))
    for save in summary.saves:
        took_s = next((copy.durable_s for copy in save.copies if copy.tier == HOME), None)
        what = "saved" if save.durable else f"save {save.outcome}"
        rows.append((save.started_unix_s, save.attempt, what, save.step, took_s, save.detail))
    return sorted(rows, key=lambda row: row[0])


def progress(summary: RunSummary) -> WatchFigure | None:
    """Return the figure of the steps over time; None without training."""
    attempts = [attempt for attempt in summary.attempts if attempt.has_trained]
    if not attempts:
        return None
    saves, _ = style.thin_out(summary.saves)
    line: list[Spec] = []
    for attempt in attempts:
        own = [(save.started_unix_s, save.step) for save in saves if save.attempt == attempt.number]
        began = attempt.training_unix_s, attempt.restored_step or 0
        places = sorted([*own, began, (attempt.last_seen_unix_s, attempt.last_step)])
        line += [{"t": style.to_ms(t), "step": step, "attempt": attempt.number} for t, step in places]
    points = [
        {
            "t": style.to_ms(save.started_unix_s),
            "step": save.step,
            "what": "durable save" if save.durable else "failed save",
            "detail": f"step {save.step}, attempt {save.attempt}: {save.outcome}",
        }
        for save in saves
    ]
    rows = [
        (
            *(one.number, one.started_unix_s, one.num_ranks, one.restored_step),
            None if one.restored_step is None else one.restore_s,
            *(one.last_seen_unix_s, one.last_step),
        )
        for one in summary.attempts
    ]
    chart = {"line": line, "points": points, "time": style.time_axis("t", summary)}
    return style.make_figure("progress", rows, chart=chart)


def shares(summary: RunSummary) -> WatchFigure | None:
    """Return the figure of the time by kind; None if no time has passed."""
    times = summary.times
    whole_s = times.wanted_s
    if whole_s <= 0:
        return None
    lost = {"repeated": times.redo_s, "down": times.down_s, "restoring": times.restore_s}
    kinds = {"kept": times.kept_s, "save()": times.blocked_s, **lost}
    bars = [
        {"kind": kind, "s": s, "label": f"{style.format_seconds(s)}, {style.format_share(s / whole_s)}"}
        for kind, s in kinds.items()
    ]
    longest, rows = max(kinds.values()), [(kind, s, s / whole_s) for kind, s in kinds.items()]
    axis = {"domain": [0, longest * 1.01], "ticks": style.span_ticks(longest)}
    chart = {"height": 30 * len(bars), "bars": bars, "kinds": list(kinds), **axis}
    return style.make_figure("shares", rows, chart=chart)


def costs(summary: RunSummary) -> WatchFigure | None:
    """Return the figure of the time that each interruption cost; None without any."""
    found = summary.interruptions
    if not found:
        return None
    drawn = sorted(found, key=lambda gap: gap.cost_s)[-_MAX_BARS:]
    drawn.sort(key=lambda gap: gap.after)
    note = ""
    if len(drawn) < len(found):
        note = f" Of {len(found)} interruptions, the {_MAX_BARS} most expensive are drawn."
    longest, sums = max(one.cost_s for one in drawn), [_part(one, one.cost_s) for one in drawn]
    parts: list[Spec] = []
    for gap in drawn:
        costs_s = {"repeated": gap.redo_s, "down": gap.down_s, "restoring": gap.restore_s}
        parts += [_part(gap, s, part=part, order=order) for order, (part, s) in enumerate(costs_s.items())]
    axis = {"labels": [one["which"] for one in sums], "domain": [0, longest or 1]}
    axis["ticks"] = style.span_ticks(longest)
    chart = {"height": 28 * len(drawn) + 4, "parts": parts, "sums": sums, **axis}
    return style.make_figure("costs", list(map(_cost_row, found)), note=note, chart=chart)


def _part(gap: Interruption, s: float, **more: object) -> Spec:
    return {"which": _between(gap), "s": s, "took": style.format_seconds(s), **more}


def _between(gap: Interruption) -> str:
    return f"{gap.before} to {gap.after}"


def _cost_row(gap: Interruption) -> Row:
    most, lost = gap.max_steps_lost, str(gap.steps_lost)
    if most != gap.steps_lost:
        lost += f" to {most}" if most else " or more"
    remarks = [gap.end or "", gap.remark]
    if gap.num_failed_starts:
        remarks.append(f"{plural(gap.num_failed_starts, 'start')} in between without further events")
    steps, times = (gap.last_step, gap.restored_step, lost), (gap.redo_s, gap.down_s, gap.restore_s)
    remark = "; ".join(filter(None, remarks)) or None
    return gap.last_seen_unix_s, _between(gap), gap.kind, *steps, *times, gap.cost_s, remark
