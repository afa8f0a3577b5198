"""Figures of the page, in their order: each has an explanation and its numbers, most have a chart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import holdfast
from holdfast.checkpoint.policy import BestInterval, lost_share
from holdfast.checkpoint.watch import WatchFigure
from holdfast.system.units import plural
from holdfast.watch.hang.incidents import describe_groups, describe_odd, group_ranks
from holdfast.watch.report import style
from holdfast.watch.report.curves import Curve, Point
from holdfast.watch.report.interruptions import Interruption, Span
from holdfast.watch.report.saves import HOME, TIERS, SaveRecord
from holdfast.watch.report.style import Row, Spec
from holdfast.watch.report.summary import IntervalAdvice, RunSummary, kept_spans

_POINTS = 80


def durations(summary: RunSummary) -> WatchFigure:
    """Return the figure of the duration of each save."""
    saves, note = style.thin_out(summary.saves, "saves")
    values = [
        {"t": style.to_ms(one.started_unix_s), "s": s, "what": what, "step": one.step, "took": took}
        for one in saves
        for what, s in (
            ("save() blocked the loop", one.blocked_s),
            ("staged after", one.staged_s),
            *((f"durable in {copy.tier} after", copy.durable_s) for copy in one.copies if copy.tier in TIERS),
        )
        if s and (took := style.format_seconds(s))
    ]
    chart = None
    if values:
        shortest, longest = min(one["s"] for one in values), max(one["s"] for one in values)
        low, high = 10.0 ** math.floor(math.log10(shortest)), 10.0 ** math.ceil(math.log10(longest))
        chart = {
            "points": values,
            "time": style.time_axis("t", summary),
            "domain": [low, high if high > low else low * 10],
            "ticks": style.span_log_ticks(low, high),
        }
    return style.make_figure("durations", list(_duration_rows(summary.saves)), note=note, chart=chart)


def _duration_rows(saves: Iterable[SaveRecord]) -> Iterator[Row]:
    for save in saves:
        facts = save.started_unix_s, save.attempt, save.step, save.num_bytes, save.blocked_s, save.staged_s
        for copy in save.copies:
            speed = f"{style.format_size(copy.bytes_per_s)}/s" if copy.bytes_per_s else None
            written, durable = style.format_seconds(copy.write_s), style.format_seconds(copy.durable_s)
            outcome = save.outcome if copy.durable_unix_s is None else "durable"
            yield (*facts, copy.tier, written, speed, durable, outcome)
        if not save.copies:
            yield (*facts, None, None, None, None, save.outcome)


def intervals(summary: RunSummary) -> WatchFigure | None:
    """Return the figure of the cost of saving and failing at every interval; None without a cost."""
    advice = summary.advice
    if advice.cost_s is None:
        return None
    bests = [advice.own] if advice.own else list(advice.assumed)
    lead, chart = f"{_verdict(advice)}\n\n", _interval_chart(advice, bests) if bests else None
    return style.make_figure("intervals", _interval_rows(advice), lead=lead, chart=chart)


def _verdict(advice: IntervalAdvice) -> str:
    lower_s, upper_s = advice.mtbf_bounds_s
    own_s = ""
    if advice.interval_s:
        own_s = f"It saved every {style.format_seconds(advice.interval_s)} on average. "
    if advice.own is None:
        up = f" in {style.format_seconds(advice.up_s)} of training"
        has_bound = advice.up_s > 0
        bound = f" With 95 % confidence it is more than {style.format_seconds(lower_s)}." * has_bound
        return (
            f"{own_s}There was no failure{up}, so the mean time between failures is unknown, and with it the "
            f"best interval.{bound} The chart shows the best interval for several assumed values."
        )
    own, mtbf = advice.own, style.format_seconds(advice.mtbf_s)
    bounds = ""
    if upper_s is not None:
        bounds = f" (90 % confidence: {style.format_seconds(lower_s)} to {style.format_seconds(upper_s)})"
    verdict = (
        f"{own_s}Daly's best interval is {style.format_seconds(own.daly_s)}, Young's "
        f"{style.format_seconds(own.young_s)}, for a mean time between failures of {mtbf}{bounds}, from "
        f"{plural(advice.num_failures, 'failure')} in {style.format_seconds(advice.up_s)} of training."
    )
    if advice.lost_share is not None and math.isfinite(advice.lost_share):
        verdict += (
            f" Expected loss to saving and failing: {style.format_share(advice.lost_share)} of training at "
            f"the run's interval, {style.format_share(own.lost_share)} at the best one. Restarts come on top."
        )
    if advice.durable_s is not None and own.daly_s < advice.durable_s:
        verdict += (
            f" A save takes {style.format_seconds(advice.durable_s)} to be durable in the nearest tier, so "
            "shorter intervals are useless: save as soon as the last save is durable."
        )
    return verdict


def _interval_chart(advice: IntervalAdvice, bests: list[BestInterval]) -> Spec | None:
    names = [f"failures every {style.format_seconds(best.mtbf_s)}" for best in bests]
    middle = [best.daly_s for best in bests] + ([advice.interval_s] if advice.interval_s else [])
    low, high = max(1e-4, min(middle) / 12), max(middle) * 12
    values: list[Spec] = []
    for name, best in zip(names, bests, strict=True):
        for i in range(_POINTS):
            at = low * (high / low) ** (i / (_POINTS - 1))
            lost = lost_share(at, advice.cost_s or 0.0, best.mtbf_s)
            if 0 < lost < 100:  # beyond that, training hardly progresses
                values.append({"at": at, "lost": lost, "which": name})
    if not values:
        return None
    least, most = min(one["lost"] for one in values) / 2.5, max(one["lost"] for one in values) * 1.2
    own_s = advice.interval_s
    is_right = own_s is not None and own_s > math.sqrt(low * high)  # the label is on the side with room
    side = {"align": "right", "dx": -4} if is_right else {"align": "left", "dx": 4}
    return {
        "curves": values,
        "x_domain": [low, high],
        "x_ticks": style.span_log_ticks(low, high),
        "y_domain": [least, most],
        "y_ticks": style.log_ticks(least, most),
        "own": [{"at": own_s, "name": f"actual: {style.format_seconds(own_s)}"}] if own_s else [],
        "own_label": {"type": "text", **side, "dy": 6, "y": 0, "fill": "var(--ink)"},
        "bests": [
            {"at": best.daly_s, "lost": best.lost_share, "name": f"best: {style.format_seconds(best.daly_s)}"}
            for best in bests
        ],
    }


def _interval_rows(advice: IntervalAdvice) -> list[Row]:
    bests = [("this run's", advice.own)] if advice.own else []
    bests += [("assumed", one) for one in advice.assumed]
    return [
        (
            f"{whose}: {style.format_seconds(one.mtbf_s)}",
            *(one.young_s, one.daly_s),
            f"{max(1, round(one.daly_s / advice.step_s))}" if advice.step_s else None,
            one.lost_share,
        )
        for whose, one in bests
    ]


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
    rows = sorted(_timeline_rows(summary), key=itemgetter(0))
    return style.make_figure("timeline", rows, note=note, chart=chart)


def _saving(saves: list[SaveRecord]) -> Iterator[Spec]:
    for save in saves:
        what = f"step {save.step}, attempt {save.attempt}, {style.format_size(save.num_bytes)}"
        if (end := save.returned_unix_s) is not None:
            yield _bar("save()", (end - (save.blocked_s or 0.0), end), what)
        for copy in save.copies:
            if copy.durable_unix_s is not None and not copy.was_drained and f"to {copy.tier}" in _LANES:
                yield _bar(f"to {copy.tier}", (save.started_unix_s, copy.durable_unix_s), what)


def _bar(lane: str, span: Span, what: str) -> Spec:
    began, end = map(style.to_ms, span)
    took = style.format_seconds(span[1] - span[0])
    return {"lane": lane, "from": began, "to": end, "what": what, "took": took}


def _timeline_rows(summary: RunSummary) -> Iterator[Row]:
    """Yield the rows: time, attempt, event, step, duration and detail."""
    for attempt in summary.attempts:
        where = "from scratch" if attempt.restored_step is None else f"from step {attempt.restored_step}"
        what = f"started {where}" if attempt.has_trained else "started, without further events"
        detail = attempt.remark or (f"on {attempt.host}" if attempt.host else None)
        start = attempt.started_unix_s, attempt.number
        yield (*start, what, attempt.restored_step, attempt.restore_s or None, detail)
    for gap in summary.losses.gaps:
        detail = gap.end or f"{style.format_seconds(gap.cost_s)} lost"
        end = gap.last_seen_unix_s, gap.before
        yield (*end, f"last event ({gap.kind})", gap.last_step, None, detail)
    for event in (*summary.problems, *summary.drains):
        took_s = event.seconds or None
        yield event.unix_s, event.attempt, event.kind, event.step, took_s, event.detail
    for save in summary.saves:
        took_s = next((copy.durable_s for copy in save.copies if copy.tier == HOME), None)
        what = "saved" if save.durable else f"save {save.outcome}"
        yield save.started_unix_s, save.attempt, what, save.step, took_s, save.detail


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


_MAX_RANKS = 64  # in the chart of the pace


def rollbacks(found: RunSummary) -> WatchFigure:
    """Return the figure of the rollbacks."""
    rows: list[Row] = []
    for one in found.rollbacks:
        left_out = [f"samples {start} to {stop - 1} of {key}" for key, (start, stop) in one.skipped.items()]
        left_out += [f"{key} stayed at its position" for key in one.kept]
        steps, cost_s = (one.first_step, one.last_step, one.base_step), found.cost_after(one.attempt)
        rows.append(
            (one.noted_unix_s, one.attempt, *steps, one.in_a_row, cost_s, "; ".join(left_out), one.reason)
        )
    lost = sum(one.last_step - one.base_step for one in found.rollbacks)
    lead = f"{plural(len(rows), 'rollback')}, which lost {plural(lost, 'step')}. "
    return style.make_figure("rollbacks", rows, lead=lead)


def hangs(found: RunSummary) -> WatchFigure:
    """Return the figure of the hangs."""
    rows: list[Row] = []
    for hang in found.hangs:
        end, cost_s = "progress", hang.over_s
        if cost_s is None:
            end, cost_s = "the end of the attempt", found.cost_after(hang.attempt)
        step, stalled_s = min(one.step for one in hang.ranks), max(one.stalled_s for one in hang.ranks)
        place = describe_odd(hang.ranks)
        rows.append((hang.unix_s, hang.attempt, step, len(hang.ranks), stalled_s, end, cost_s, place))
    newest = "\n\n".join(
        line for hang in found.hangs[-1:] for line in describe_groups(group_ranks(hang.ranks))
    )
    lead, note = f"{plural(len(rows), 'hang')}. ", f"\n\nThe newest one:\n\n{newest}"
    return style.make_figure("hangs", rows, lead=lead, note=note)


_SAVE_KINDS = ("failed", "dropped", "skipped", "fenced", "unhealthy")
"""Kinds of events after which a step has no checkpoint that is whole and healthy."""


def problems(found: RunSummary) -> WatchFigure:
    """Return the figure of the problems, each row for neighbours of one kind."""
    rows: list[Row] = []
    for key, some in groupby(found.problems, lambda event: (event.attempt, event.rank, event.kind)):
        events = list(some)
        first, last, cost = events[0], events[-1], None
        if first.kind in _SAVE_KINDS and first.step is not None and last.step is not None:
            before, after = good_steps_around(found, first.attempt, first.step, last.step)
            cost = (
                f"all steps after {before}" if after is None else f"{plural(after - before, 'step')} at risk"
            )
        times = first.unix_s, last.unix_s
        rows.append((*times, *key, len(events), first.step, last.step, cost, last.detail))
    return style.make_figure("problems", rows, lead=f"{plural(len(found.problems), 'problem')}. ")


def good_steps_around(found: RunSummary, attempt: int, first: int, last: int) -> tuple[int, int | None]:
    """Return the steps of the good checkpoints before some steps, else the first one, and after them."""
    sick = {one.step for one in found.unhealthy if one.attempt == attempt}
    good = [
        one.step for one in found.saves if one.attempt == attempt and one.durable and one.step not in sick
    ]
    began = next((one.restored_step or 0 for one in found.attempts if one.number == attempt), 0)
    before = max((step for step in good if step < first), default=began)
    return before, min((step for step in good if step > last), default=None)


def replicas(found: RunSummary) -> WatchFigure:
    """Return the figure of the differences between the copies of ranks."""
    rows: list[Row] = []
    for event in found.differences:
        cost = None
        if event.step is not None:
            before, _ = good_steps_around(found, event.attempt, event.step, event.step)
            cost = f"{plural(event.step - before, 'step')} in doubt"
        rows.append((event.unix_s, event.attempt, event.step, cost, event.detail))
    return style.make_figure("replicas", rows, lead=f"{plural(len(rows), 'difference')}. ")


def nodes(found: RunSummary) -> WatchFigure:
    """Return the figure of the checks of nodes."""
    rows: list[Row] = []
    longest = dict[tuple[int, int], float]()  # wait of each attempt, whose nodes are checked at the same time
    for one in found.node_checks:
        result = "refused" if one.was_refused else "failed" if one.failures else f"{one.num_checks} passed"
        node = one.unix_s, one.job, one.attempt, one.node, one.machine
        rows.append((*node, result, one.cost_s, one.failures or None))
        longest[node[1:3]] = max(longest.get(node[1:3], 0.0), one.cost_s)
    num_failed = sum(bool(one.failures) for one in found.node_checks)
    num_refused = sum(one.was_refused for one in found.node_checks)
    failed = f"{plural(num_failed, 'node')} failed" if num_failed else "All passed"
    refused = f", {num_refused} refused" if num_refused else ""
    lead = f"{failed}{refused}; the job waited {style.format_seconds(sum(longest.values()))}. "
    return style.make_figure("nodes", rows, lead=lead)


def pace(summary: RunSummary) -> WatchFigure | None:
    """Return the figure, or None if ranks were not compared."""
    if not summary.paces:
        return None
    slow = {one.rank for _, one in summary.slow_periods}
    named = " No rank was slow for long."
    if summary.slow_periods:
        _, newest = summary.slow_periods[-1]
        named = (
            f" Slow ranks were named: {len(summary.slow_periods)}. The newest is rank {newest.rank} on "
            f"{newest.host}, which cost all ranks {style.format_share(newest.cost_share)} of their time."
        )
    rows = [
        (
            *(one.since_unix_s, one.until_unix_s, attempt, one.rank, one.host, f"{one.factor:.2f}"),
            *(one.cost_share, one.cost_s, one.cause),
        )
        for attempt, one in summary.slow_periods
    ]
    chart = {"shares": _pace_points(summary, slow), "time": style.time_axis("t", summary)}
    return style.make_figure("pace", rows, note=named, chart=chart)


def _pace_points(summary: RunSummary, slow: set[int]) -> list[Spec]:
    """Return the points of the chart: of the slow ranks, and of some others."""
    ranks = sorted({rank for one in summary.paces for rank in one.shares})
    drawn = set(sorted(ranks, key=lambda rank: rank not in slow)[:_MAX_RANKS])
    most = max(1, style.MAX_MARKS // max(1, len(drawn)))
    size = -(-len(summary.paces) // most) or 1  # neighbours that are drawn as one point
    values: list[Spec] = []
    for first in range(0, len(summary.paces), size):
        windows = summary.paces[first : first + size]
        for rank in sorted(drawn):
            shares = [one.shares[rank] for one in windows if rank in one.shares]
            if shares:
                share, kind = statistics.fmean(shares), "slow rank" if rank in slow else "other ranks"
                point = {"share": round(share, 4), "rank": rank, "kind": kind}
                values.append({"t": style.to_ms(windows[0].unix_s), **point})
    return values


MAX_CURVES = 8  # metrics that are drawn. `holdfast history --metrics` prints all
_MAX_DOTS = 50  # values that are also drawn as dots
_LOG_FROM = 1000.0  # smallest ratio of values for a logarithmic axis
_COUNTS, _LOST = "counts", "discarded"


def curves(summary: RunSummary) -> dict[str, WatchFigure]:
    """Return a figure for each metric with several values, at most `MAX_CURVES`, by its id."""
    drawn = [one for one in summary.curves if one.points and not one.has_one_value]
    left_out = ", ".join(one.name for one in drawn[MAX_CURVES:])
    return {
        f"curve-{number}": _curve_figure(one, left_out if number == MAX_CURVES else "")
        for number, one in enumerate(drawn[:MAX_CURVES], start=1)
    }


def _curve_figure(curve: Curve, left_out: str) -> WatchFigure:
    counted, note = style.thin_out(curve.counted, "steps")
    if note and counted[-1] != curve.counted[-1]:
        counted.append(curve.counted[-1])
    num_lost = sum(map(len, curve.lost))
    if num_lost:
        note += f" Discarded values: {num_lost}."
    if left_out:
        note += f" Not drawn: {left_out}; `holdfast history --metrics` has them."
    rows = [(point.step, point.attempt, f"{point.value:.6g}") for point in curve.counted]
    return style.make_figure("curve", rows, note=note, label=curve.name, chart=_curve_chart(curve, counted))


def _curve_chart(curve: Curve, counted: Sequence[Point]) -> Spec:
    lost = [_curve_point(one, _LOST) for stretch in curve.lost for one in style.thin_out(stretch)[0]]
    firsts: dict[int, int] = {}  # step that counts of each attempt
    for point in curve.counted:
        firsts.setdefault(point.attempt, point.step)
    starts = [{"step": step, "label": str(attempt)} for attempt, step in firsts.items()]
    values = [_curve_point(one, _COUNTS) for one in counted]
    axis: Spec = {"scale": {"zero": False}, "axis": {"title": None}}
    finite = [one.value for one in curve.points if math.isfinite(one.value)]
    if finite and min(finite) > 0 and max(finite) / min(finite) >= _LOG_FROM:  # over many powers of ten
        ticks = style.log_ticks(min(finite), max(finite))
        axis = {"scale": {"type": "log"}, "axis": {"title": None, "values": ticks, "format": "~g"}}
    line: Spec = {"type": "line", "strokeWidth": 1.7}
    if len(values) <= _MAX_DOTS:  # a single value has no line
        line["point"] = {"size": 20, "filled": True, "fill": "var(--kept)"}
    return {
        "y": {"field": "value", "type": "quantitative", **axis},
        "starts": starts,
        "resumed": len(starts) > 1,
        "labelled": 1 < len(starts) <= _MAX_LABELS,
        "lost": lost,  # an attempt may be discarded in several stretches, which are separate lines
        "counted": values,
        "line": line,
        "spots": [*lost, *values],  # targets for tooltips: a line has one for its first step only
    }


def _curve_point(point: Point, what: str) -> Spec:
    value = point.value if math.isfinite(point.value) else None  # a gap in the line
    return {"step": point.step, "value": value, "attempt": point.attempt, "what": what}


def make_figures(summary: RunSummary) -> dict[str, WatchFigure]:
    """Return all figures with content, by their id: those of the run, then those of the default watches."""
    makers = (progress, shares, costs, hangs, replicas, pace, rollbacks, problems, nodes, durations)
    made = {"timeline": timeline(summary), **curves(summary)}
    made.update({make.__name__: make(summary) for make in (*makers, intervals)})
    found = {name: one for name, one in made.items() if one is not None and (one.rows or one.chart)}
    for watch in holdfast.default_watches():
        lines = [line for line in summary.lines if line["event"] in watch.events]
        if lines and (figure := watch.figure(lines)) is not None:  # a watch may be named like a figure above
            found[watch.name] = figure
    return found
